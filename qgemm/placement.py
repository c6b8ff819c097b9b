"""Placement: the device on which x and weights lie, the backend that serves them there, errors if they lie apart."""

from __future__ import annotations

from typing import Any, cast

from .arguments import Activation, PreparedActivations
from .arrays import on_cuda
from .backend import Backend, backend
from .codec.group_activations import activation_of
from .errors import UnsupportedError
from .packed import Packed, Transposed
from .tensor import Tensor


def backend_of(x: object, *weights: object) -> Backend[Any]:
    """The backend of x, once all weights lie where x does."""
    check_together(x, *weights)
    return backend("cuda" if is_on_device(x) else "cpu")


def check_together(x: object, *weights: object) -> None:
    """The error of `misplaced` unless all weights are packed and lie where x does."""
    device = is_on_device(x)
    for w in weights:
        if isinstance(w, Tensor) is device or not isinstance(w, Packed):
            raise misplaced(x, w)


def is_on_device(x: object) -> bool:
    """Whether x, an array or prepared activations, lies on a CUDA device."""
    return isinstance(x, PreparedActivations) or on_cuda(x)


def prepared_for(x: object) -> Activation | None:
    """The activation that multiplies prepared x; None for arrays."""
    if isinstance(x, PreparedActivations):
        return x.activation
    if isinstance(x, Tensor):
        return cast("Activation", activation_of(x.format) or "a8")
    return None


def misplaced(x: object, w: object) -> Exception:
    """The error about x and weights that no backend multiplies: what came, and what to write instead."""
    if isinstance(w, Transposed):
        return TypeError(f"w is {w!r}: write x @ tensor.T, or qgemm.matmul(x, tensor)")
    if not isinstance(w, Packed):
        if isinstance(x, Packed):
            return TypeError(f"x and w are swapped: x is {x!r}, w {described(w)}; matmul(x, w) is x @ w.T")
        planes = type(w).__module__.startswith("qgemm.") and hasattr(w, "to_device")
        packed = "call its to_device()" if planes else "qgemm.open and qgemm.quantize give such"
        return TypeError(f"w must be a Tensor or DeviceTensor of packed weights, got {described(w)}; {packed}")
    if isinstance(w, Tensor):
        return UnsupportedError(f"x is on a CUDA device, w on the host ({w!r}); multiply by w.to_device()")
    return UnsupportedError(f"w is on a CUDA device ({w!r}), x is not ({described(x)}); upload x first")


def described(value: object) -> str:
    """An argument in an error, e.g. numpy.ndarray of float32 (2, 64)."""
    if isinstance(value, (Packed, Transposed)):
        return repr(value)
    kind = type(value)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    shape = getattr(value, "shape", None)
    content = f" of {getattr(value, 'dtype', '?')} {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{package}{kind.__name__}{content}"
