"""Backends: what each of them does, and the registry, whose import at first use is the only lazy one of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import DTypeLike

if TYPE_CHECKING:
    from .arguments import Activation
    from .codec.format import Blocks, Format
    from .tensor import Tensor

MODULES = {"cpu": "qgemm.cpu", "cuda": "qgemm.cuda"}  # each has a BACKEND


class Status(NamedTuple):
    """Whether a backend can be used, one line that says with what or why not, and the facts behind it."""

    available: bool
    detail: str
    facts: dict[str, Any]


class Backend(Protocol):
    """What one kind of device does, behind the public functions of qgemm/ops.py and experts.py, which document it.

    Products by a matrix are called by its class: `product` and `products` of Packed.
    """

    def moe_matmul(
        self, x: Any, w: Any, ids: Any, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """y [T, top_k, N] = x @ w[ids].T + bias[ids], w [E, N, K]."""

    def moe(
        self, x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, activation: str, biases: Sequence[Any] | None,
        out: Any, dtype: DTypeLike | None,
    ) -> Any:  # fmt: skip
        """y [T, K]: what the experts of each token make of it, by the weights of the router."""

    def quantize_activations(self, x: Any, activation: Activation) -> Any:
        """x [..., K] as blocks of codes, for several products of any kind but "a16"."""

    def quantize(self, x: Any, fmt: Format, importance: Any = None) -> Any:
        """Values [..., K] where they lie -> the blocks of a format there; importance: [K] or [..., K]."""

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """What products of weights like these need once, each a call that any thread may make: kernels, libraries.

        A call returns whether it compiled something.

        rows: of x, None for as many as a model asks for. dtypes: of x, by NumPy's names.
        """

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str) -> None:
        """UnsupportedError, which names `who`, unless this backend multiplies by weights of a format and shape."""

    def upload(self, tensor: Tensor, blocks: Blocks) -> Any:
        """A host Tensor, whose blocks these are, as this backend multiplies it."""

    def status(self) -> Status:
        """What is there; looks for a device when called."""


@cache
def module(name: str) -> Any:
    """The module of the backend "cpu" or "cuda", imported at first use."""
    return import_module(MODULES[name])


@cache
def backend(name: str) -> Backend:
    """The backend "cpu" or "cuda", imported at first use."""
    found: Backend = module(name).BACKEND
    return found


def backends() -> dict[str, Status]:
    """The state of the backends "cpu" and "cuda" on this machine; looks for a GPU when called."""
    return {name: backend(name).status() for name in MODULES}
