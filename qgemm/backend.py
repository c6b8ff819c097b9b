"""Backends: the protocol of one kind of device, the table by which weights find theirs, and its import at first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arguments import Activation, Array, Epilogue, Gated, Weights
from .codec.float_types import DType
from .codec.format import Blocks, Format

MODULES = {"cpu": "qgemm.cpu", "cuda": "qgemm.cuda"}  # each has a BACKEND

Kind = TypeVar("Kind", contravariant=True)  # the class of weights that a backend multiplies by


class Status(NamedTuple):
    """Whether a backend can be used, one line with its facts or the reason why not, and these facts by name."""

    available: bool
    detail: str
    facts: dict[str, Any]


class Tuned(NamedTuple):
    """The result of `qgemm.tune`.

    products: number of products with times, one for each matrix shape, number of rows, activation and type of x.
    configs: number of configs that this call timed. changed: number of products whose fastest config by times differs
    from the predicted one. gain: the mean factor by which that config is faster. finished: whether all configs are
    timed. stored: whether later processes can read the times. seconds: of this call.
    """

    products: int
    configs: int
    changed: int
    gain: float
    finished: bool
    stored: bool
    seconds: float

    def __str__(self) -> str:
        """E.g. "72 products have times, 12 of them a faster config, 1.8% on average; 910 configs timed in 212 s"."""
        gain = f"{self.changed} of them a faster config, {100 * (self.gain - 1):.1f}% on average"
        return f"{self.products} products have times, {gain}; {self.configs} configs timed in {self.seconds:.0f} s"


class Products(Protocol[Kind]):
    """Products by one class of weights. qgemm/ops.py and qgemm/experts.py document the public functions that call them.

    Arguments come unchecked, in these places: each implementation checks them once.
    """

    def product(
        self, w: Kind, x: Array, activation: str | None, bias: Array | None, residual: Array | None,
        out: Array | None, dtype: DType | None, gated: Gated | None = None, /,
    ) -> Any:  # fmt: skip
        """y of `qgemm.matmul`; with `gated`, y of `qgemm.gated`, whose gate is w."""

    def products(
        self, x: Array, weights: Sequence[Any], activation: str | None, epilogues: Sequence[Epilogue] | None,
        outs: Sequence[Array] | None, dtype: DType | None, /,
    ) -> list[Any] | None:  # fmt: skip
        """The list of `qgemm.matmul_many`; None if the weights are of several classes. epilogues: None for none."""

    def moe_matmul(
        self, x: Array, w: Kind, ids: Array, activation: str | None, bias: Array | None, out: Array | None,
        dtype: DType | None, check_ids: bool, /,
    ) -> Any:  # fmt: skip
        """y of `qgemm.moe_matmul`."""

    def moe(
        self, x: Array, gate_up: Weights | Sequence[Weights], down: Kind, ids: Array, weights: Array, activation: str,
        biases: Sequence[Array | None] | None, out: Array | None, dtype: DType | None, check_ids: bool, /,
    ) -> Any:  # fmt: skip
        """y of `qgemm.moe`."""


class Backend(Products[Kind], Protocol[Kind]):
    """One kind of device: products by the weights that lie there, and all else that the package asks of it."""

    def quantize_activations(self, x: Array, activation: Activation, /) -> Any:
        """x [..., K] as blocks of codes, for several products of any kind but "a16"."""

    def quantize(self, x: Array, fmt: Format, importance: Any = None, /) -> Any:
        """Values [..., K] on the device -> weights of a format there; importance: [K] or [..., K]."""

    def dequantize(self, w: Kind, dtype: DType, /) -> Any:
        """The weights as a new array: exact in float32, otherwise rounded once from it."""

    def rows(self, w: Kind, index: NDArray[np.int64], dtype: DType, /) -> Any:
        """Rows of a matrix by an index that is valid, decoded: a new array [*index.shape, K]."""

    def from_bytes(self, rows: Array, fmt: Format, shape: tuple[int, ...], name: str, /) -> Any:
        """Weights of a shape over bytes in the layout of a file, uint8 [..., N, bytes of a row]."""

    def array(self, values: NDArray[Any], /) -> Any:
        """Values of the host as an array on the device."""

    def gated(self, function: str, gate: Any, up: Any, /) -> Any:
        """y = function(gate) * up of two products, float32 arrays of one library and shape."""

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str, /) -> None:
        """An error that names `who`, unless this backend multiplies by weights of a format and shape."""

    def upload(self, tensor: Weights, blocks: Blocks, /) -> Any:
        """Weights of the host, with their blocks, as this backend multiplies by them."""

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str], /
    ) -> list[Callable[[], bool]]:
        """A call for each kernel or library that products by these weights need; it returns whether it compiled.

        Any thread may make a call. rows: of x; None for all numbers that a model uses. dtypes: of x, by NumPy's names.
        """

    def tune(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str],
        seconds: float, progress: bool | None, /,
    ) -> Tuned:  # fmt: skip
        """Time the configs of products by these weights and keep the times; UnsupportedError where there are none."""

    def status(self) -> Status:
        """The state of the device; looks for one when called."""


PRODUCTS: dict[type, Products[Any]] = {}  # class of weights -> its products; filled by the module of each backend


def backend_for(w: object) -> Products[Any] | None:
    """The products of the class of w, None if it is no class of weights.

    Weights on a device exist only after its backend was imported, so that the one that may still be missing is the
    CPU's, which serves Tensors.
    """
    if (products := PRODUCTS.get(type(w))) is not None:
        return products
    backend("cpu")
    return next((PRODUCTS[base] for base in type(w).__mro__ if base in PRODUCTS), None)


@cache
def backend(name: str) -> Backend[Any]:
    """The backend "cpu" or "cuda", imported at first use."""
    loaded: Backend[Any] = import_module(MODULES[name]).BACKEND
    return loaded


def backends() -> dict[str, Status]:
    """The state of the backends "cpu" and "cuda" on this machine; looks for a GPU when called."""
    return {name: backend(name).status() for name in MODULES}
