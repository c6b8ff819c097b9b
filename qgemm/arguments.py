"""Arguments of a product and their checks, shared by all backends: each error says what came and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from .codec.format import FLOATS, float_dtype, float_name
from .codec.group_activations import E4M3, GROUPS, activation_of, multiplies
from .errors import UnsupportedError
from .packed import Packed, Transposed
from .tensor import Tensor

Activation = Literal["a16", "a8", "a8_g256", "e4m3_g256"]
MAX_WORK = 10_000  # candidates that are tried to tell whether two arrays share memory
ACTIVATIONS: tuple[Activation, ...] = ("a16", "a8")  # exact, and ggml's integer formulas: every table has both
KINDS: tuple[Activation, ...] = (*ACTIVATIONS, "a8_g256", "e4m3_g256")


class PreparedActivations:
    """Base of activations that a device holds in quantized form; on the host they are a Tensor.

    activation: that which multiplies them: "a8", "a8_g256" or "e4m3_g256".
    """

    activation: Activation = "a8"


class Epilogue(NamedTuple):
    """What is added to a product before it is rounded: bias [N] and residual [..., N], of y's shape; None for none."""

    bias: Any = None
    residual: Any = None

    @property
    def given(self) -> bool:
        """Whether there is anything to add."""
        return self.bias is not None or self.residual is not None


NO_EPILOGUE = Epilogue()


class Gated(NamedTuple):
    """What a product gates: by which of GATES (qgemm/gating.py), the other weights, and the bias of their product."""

    function: str
    up: Any
    bias: Any = None


def epilogues(weights: int, biases: Any, residuals: Any, outs: Any) -> list[Epilogue]:
    """An Epilogue for each of so many weights; UnsupportedError if a sequence has another length."""
    for name, given in (("biases", biases), ("residuals", residuals), ("outs", outs)):
        if given is not None and len(given) != weights:
            raise UnsupportedError(f"{name} has {len(given)} entries for {weights} weights")
    columns = ([None] * weights if column is None else column for column in (biases, residuals))
    pairs = zip(*columns, strict=True)
    return [NO_EPILOGUE if bias is None and residual is None else Epilogue(bias, residual) for bias, residual in pairs]


def check_activation(activation: str | None, prepared: str | None = None) -> str:
    """The kind of activations: as given, else that which they are prepared for, "a16" where they are not."""
    if activation is None:
        return prepared or "a16"
    if activation not in KINDS:
        raise unknown_activation(activation)
    return activation


def unknown_activation(activation: Any, known: Sequence[str] = KINDS) -> UnsupportedError:
    """The error that names the activations that exist."""
    listed = f"activation is {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
    removed = ", which was removed; use 'a8_g256'" if activation == "a8_g128" else ""
    return UnsupportedError(f"{listed}, got {activation!r}{removed}")


def prepared_for(x: Any) -> Activation | None:
    """The activation that multiplies prepared x; None for arrays."""
    if isinstance(x, PreparedActivations):
        return x.activation
    if isinstance(x, Tensor):
        return cast("Activation", activation_of(x.format) or "a8")
    return None


def check_prepared(prepared: str | None, activation: str) -> None:
    """UnsupportedError unless this activation multiplies what was prepared for another, or for none."""
    if prepared not in (None, activation):
        bytes_of = "e4m3 numbers" if prepared == E4M3 else "codes of eight bits"
        kind = f"{bytes_of} a group of {GROUPS[prepared]}" if prepared in GROUPS else "Q8_1"
        raise UnsupportedError(f"prepared activations are {kind} for activation {prepared!r}, got {activation!r}")


def misplaced(x: Any, w: Any) -> Exception:
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


def described(given: Any) -> str:
    """What came as an argument, e.g. numpy.ndarray of float32 (2, 64)."""
    if isinstance(given, (Packed, Transposed)):
        return repr(given)
    kind = type(given)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}."
    shape = getattr(given, "shape", None)
    of = f" of {getattr(given, 'dtype', '?')} {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{package}{kind.__name__}{of}"


def check_weights(w: Any, activation: str = "a16") -> None:
    """UnsupportedError unless w is a matrix of a format that can be decoded, and multiplied by such activations."""
    if w.ndim != 2:
        raise UnsupportedError(f"w must be a matrix (N, K), got {w!r}; index its leading axes first")
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder, so it cannot be multiplied")
    if activation == E4M3 and not multiplies(activation, w.format):
        raise UnsupportedError(
            f"{w!r}: activation {E4M3!r} is for MXFP4, whose weights are e4m3 numbers times powers of two; those of "
            f"{w.format} are not: use 'a8_g256' or 'a16'"
        )


def check_shapes(x: tuple[int, ...], w: Any) -> None:
    """UnsupportedError unless x [..., K] fits w [N, K]."""
    if x[-1] != w.shape[1]:
        raise UnsupportedError(f"x has rows of {x[-1]}, {w!r} needs K = {w.shape[1]} (x is {x}, w is (N, K))")


def check_gated(gate: Any, up: Any) -> None:
    """UnsupportedError unless two weights are of one shape, so that the product by one can gate that by the other."""
    if gate.shape != up.shape:
        raise UnsupportedError(f"gate and up differ in shape: {gate!r} and {up!r}")


def check_epilogue(given: Epilogue, shape: tuple[int, ...]) -> None:
    """UnsupportedError unless bias and residual fit y of this shape; TypeError for what is not an array of floats."""
    for name, array, fitting in (("bias", given.bias, shape[-1:]), ("residual", given.residual, shape)):
        if array is None:
            continue
        if array.shape != fitting:
            raise UnsupportedError(f"{name} has shape {array.shape}, y needs {fitting}")
        if array.dtype.name not in FLOATS:
            raise TypeError(f"{name} must be of float16, float32, float64 or bfloat16, got {array.dtype}")


def check_out(out: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """UnsupportedError unless `out` can hold y, in the dtype asked for if one is; TypeError if it is not of floats."""
    came = str(out.dtype).removeprefix("torch.")
    if came not in FLOATS:
        raise TypeError(f"out must be of float16, float32, float64 or bfloat16, got {came}")
    if tuple(out.shape) != shape:
        raise UnsupportedError(f"out has shape {tuple(out.shape)}, y has {shape}")
    if dtype is not None and float_name(dtype) != came:
        raise UnsupportedError(f"out is {came}, dtype asks for {float_name(dtype)}; give one of them")


def check_elements(out: Any) -> None:
    """UnsupportedError if elements of an array share memory: one that was broadcast, or windows of another."""
    reach = sum((size - 1) * abs(stride) for size, stride in zip(out.shape, out.strides, strict=True))
    if out.size and reach + out.itemsize < out.size * out.itemsize:
        raise UnsupportedError(f"out has elements that share memory: shape {out.shape}, strides {out.strides}")


def check_apart(outs: Sequence[Any]) -> None:
    """UnsupportedError if two outputs, arrays of NumPy or CuPy, share memory: one product would overwrite another's."""
    spans = [_Span(out) for out in outs]
    for i, j in combinations(range(len(spans)), 2):
        if spans[i].meets(spans[j]):
            raise UnsupportedError(f"outs[{i}] and outs[{j}] share memory: one product would overwrite the other's")


class _Span:
    """Where an array lies, as NumPy's protocol has it; nothing is read there."""

    def __init__(self, array: Any) -> None:
        interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        self.data: tuple[int, int] = interface["data"]
        self.__array_interface__ = {
            "data": (self.data[0], True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }

    def meets(self, other: _Span) -> bool:
        """Whether they have a byte in common; also where that is too hard to tell."""
        try:
            return np.shares_memory(np.asarray(self), np.asarray(other), MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


def output_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of a new y: as asked for, float32 without."""
    return float_dtype(np.float32 if dtype is None else dtype)


def check_not_scalar(x: NDArray[Any]) -> NDArray[Any]:
    """x, unless it has no axis for K."""
    if x.ndim == 0:
        raise UnsupportedError("x is a scalar; it needs the shape [..., K]")
    return x
