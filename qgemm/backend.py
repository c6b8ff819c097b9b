"""Backends: what each of them does, and the registry, whose import at first use is the only lazy one of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import DTypeLike

if TYPE_CHECKING:
    from .arguments import Activation, Epilogue, Gated
    from .codec.format import Format
    from .tensor import Tensor

MODULES = {"cpu": "qgemm.cpu", "cuda": "qgemm.cuda"}  # each has a BACKEND


class Status(NamedTuple):
    """Whether a backend can be used, one line that says with what or why not, and the facts behind it."""

    available: bool
    detail: str
    facts: dict[str, Any]


class Backend(Protocol):
    """Products on one kind of device, behind the public functions of qgemm/ops.py, which documents the arguments."""

    def matmul(self, x: Any, w: Any, activation: str, epilogue: Epilogue, out: Any, dtype: DTypeLike | None) -> Any:
        """y [..., N] = x [..., K] @ w [N, K].T + epilogue, in `out` or as a new array of x's library."""

    def matmul_many(
        self,
        x: Any,
        weights: Sequence[Any],
        activation: str,
        epilogues: Sequence[Epilogue],
        outs: Sequence[Any],
        dtype: DTypeLike | None,
    ) -> list[Any]:
        """`matmul` of x by each of the weights, in their order."""

    def gated(
        self, x: Any, gate: Any, gated: Gated, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """y [..., N] = function(x @ gate.T + bias) * (x @ up.T + its bias)."""

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
        """x [..., K] as blocks of codes, for several products of "a8", "a8_g128" or "a8_g256"."""

    def quantize(self, x: Any, fmt: Format, importance: Any = None) -> Any:
        """Values [..., K] where they lie -> the blocks of a format there; importance: [K] or [..., K]."""

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """What products of weights like these need once, each a call that any thread may make: kernels, libraries.

        A call returns whether it compiled something.

        rows: of x, None for as many as a model asks for. dtypes: of x, by NumPy's names.
        """

    def upload(self, tensor: Tensor) -> Any:
        """A host Tensor as this backend multiplies it."""

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
