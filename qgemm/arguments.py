"""Arguments of a product and their checks, shared by all backends: each error says what came and what fits.

Nothing here knows a class of weights or a device: placement.py has the checks that do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .codec.float_types import FLOATS, DType, float_dtype, float_name, not_floats
from .codec.format import Format
from .codec.group_activations import E4M3, GROUP_COLUMNS, multiplies
from .errors import ShapeError, UnsupportedError

Activation = Literal["a16", "a8", "a8_g256", "e4m3_g256"]
MAX_WORK = 10_000  # candidates that are tried to tell whether two arrays share memory
ACTIVATIONS: tuple[Activation, ...] = ("a16", "a8")  # exact, and ggml's integer formulas: every table has both
KINDS: tuple[Activation, ...] = (*ACTIVATIONS, "a8_g256", "e4m3_g256")


class Array(Protocol):
    """An array of NumPy, CuPy, torch or another library that speaks DLPack, as far as products look at it."""

    @property
    def shape(self) -> Any:
        """The length of each axis, a tuple of integers."""

    @property
    def dtype(self) -> Any:
        """The type of its elements, in terms of its library."""


class Weights(Protocol):
    """Packed weights [..., N, K] on any device, as far as checks look at them: a Packed."""

    @property
    def format(self) -> Format:
        """The format of their blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis, in weights."""

    @property
    def name(self) -> str:
        """Their name in a file, or nothing."""

    @property
    def ndim(self) -> int:
        """The number of axes."""


class PreparedActivations:
    """Base of activations that a device holds in quantized form; on the host they are a Tensor.

    activation: the kind that multiplies them: "a8", "a8_g256" or "e4m3_g256".
    """

    activation: Activation = "a8"
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Epilogue(NamedTuple):
    """Terms that are added to a product before it is rounded: bias [N] and residual [..., N], of y's shape, or None."""

    bias: Any = None
    residual: Any = None

    @property
    def adds(self) -> bool:
        """Whether there is anything to add."""
        return self.bias is not None or self.residual is not None


NO_EPILOGUE = Epilogue()


class Gated(NamedTuple):
    """How a product gates another: a function of GATES (qgemm/gating.py), the other's weights and its bias."""

    function: str
    up: Any
    bias: Any = None


class Request(NamedTuple):
    """The products of a call, as every backend gets them: weights, their epilogues, and an output of each or None.

    function: "", or the gate of two products with one output: y = function(first product) * (second product).
    """

    weights: Sequence[Any]
    epilogues: Sequence[Epilogue]
    outs: Sequence[Any]
    function: str = ""


def one_product(w: Any, bias: Any, residual: Any, out: Any, gated: Gated | None = None) -> Request:
    """The call of `qgemm.matmul`; with `gated`, of `qgemm.gated`, whose gate is w."""
    if gated is None:
        return Request((w,), (Epilogue(bias, residual),), (out,))
    return Request((w, gated.up), (Epilogue(bias), Epilogue(gated.bias)), (out,), gated.function)


def several_products(weights: Sequence[Any], added: Sequence[Epilogue] | None, outs: Sequence[Any] | None) -> Request:
    """The call of `qgemm.matmul_many`; added: None if nothing is added to any product."""
    added = epilogues(len(weights), None, None, outs) if added is None else added
    return Request(weights, added, [None] * len(weights) if outs is None else outs)


def epilogues(
    weights: int, biases: Sequence[Any] | None, residuals: Sequence[Any] | None, outs: Sequence[Any] | None
) -> list[Epilogue]:
    """An Epilogue for each of the weights, whose number is `weights`; ShapeError if a sequence has another length."""
    for name, sequence in (("biases", biases), ("residuals", residuals), ("outs", outs)):
        if sequence is not None and len(sequence) != weights:
            raise ShapeError(f"{name} has {len(sequence)} entries for {weights} weights")
    columns = ([None] * weights if column is None else column for column in (biases, residuals))
    pairs = zip(*columns, strict=True)
    return [NO_EPILOGUE if bias is None and residual is None else Epilogue(bias, residual) for bias, residual in pairs]


def check_activation(activation: str | None, prepared: str | None = None) -> str:
    """The kind of activations: the argument, else the kind that x was prepared for, else "a16"."""
    if activation is None:
        return prepared or "a16"
    if not isinstance(activation, str) or activation not in KINDS:
        raise unknown_activation(activation)
    return activation


def unknown_activation(activation: object, kinds: Sequence[str] = KINDS) -> UnsupportedError:
    """The error that names the activations that exist."""
    listed = f"activation is {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
    if not isinstance(activation, str):
        return UnsupportedError(f"{listed}, got {type(activation).__name__}; a bias, residual or out has its keyword")
    removed = ", which was removed; use 'a8_g256'" if activation == "a8_g128" else ""
    return UnsupportedError(f"{listed}, got {activation!r}{removed}")


def check_prepared(prepared: str | None, activation: str) -> None:
    """UnsupportedError if x was prepared for another activation than the one that multiplies it."""
    if prepared not in (None, activation):
        values = "e4m3 numbers" if prepared == E4M3 else "codes of eight bits"
        kind = f"{values} a group of {GROUP_COLUMNS[prepared]}" if prepared in GROUP_COLUMNS else "Q8_1"
        raise UnsupportedError(f"prepared activations are {kind} for activation {prepared!r}, got {activation!r}")


def check_weights(w: Weights, activation: str) -> None:
    """ShapeError unless w is a matrix; UnsupportedError unless its format is decoded, and served by the activation."""
    if w.ndim != 2:
        raise ShapeError(f"w must be a matrix (N, K), got {w!r}{'; index its leading axes first' * (w.ndim > 2)}")
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder, so it cannot be multiplied")
    if activation == E4M3 and not multiplies(activation, w.format):
        raise UnsupportedError(
            f"{w!r}: activation {E4M3!r} is for MXFP4, whose weights are e4m3 numbers times powers of two; those of "
            f"{w.format} are not: use 'a8_g256' or 'a16'"
        )


def check_shapes(x: tuple[int, ...], w: Weights) -> None:
    """ShapeError unless x [..., K] fits w [N, K]."""
    if x[-1] != w.shape[1]:
        raise ShapeError(f"x has rows of {x[-1]}, {w!r} needs K = {w.shape[1]} (x is {x}, w is (N, K))")


def check_gated(gate: Weights, up: Weights) -> None:
    """ShapeError unless two weights have one shape, so that the product by one can gate the product by the other."""
    if gate.shape != up.shape:
        raise ShapeError(f"gate and up differ in shape: {gate!r} and {up!r}")


def check_epilogue(added: Epilogue, shape: tuple[int, ...]) -> None:
    """ShapeError unless bias and residual fit y of this shape; TypeError unless they are arrays of floats."""
    for name, array, fitting in (("bias", added.bias, shape[-1:]), ("residual", added.residual, shape)):
        if array is None:
            continue
        if tuple(array.shape) != fitting:
            raise ShapeError(f"{name} has shape {tuple(array.shape)}, y needs {fitting}")
        if str(array.dtype).removeprefix("torch.") not in FLOATS:
            raise not_floats(name, array.dtype)


def check_out(out: Array, shape: tuple[int, ...], dtype: DType | None) -> None:
    """ShapeError unless `out` has y's shape; TypeError unless it is of floats, UnsupportedError for a second dtype."""
    name = str(out.dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise not_floats("out", name)
    if tuple(out.shape) != shape:
        raise ShapeError(f"out has shape {tuple(out.shape)}, y has {shape}")
    if dtype is not None and float_name(dtype) != name:
        raise UnsupportedError(f"out is {name}, dtype asks for {float_name(dtype)}; give one of them")


def check_elements(out: Any) -> None:
    """UnsupportedError if elements of an array share memory: one that was broadcast, or windows of another."""
    size, strides = prod(out.shape), strides_of(out)
    reach = sum((length - 1) * abs(stride) for length, stride in zip(out.shape, strides, strict=True))
    if size and reach + out.itemsize < size * out.itemsize:
        raise UnsupportedError(f"out has elements that share memory: shape {tuple(out.shape)}, strides {strides}")


def strides_of(array: Any) -> tuple[int, ...]:
    """Bytes from an element of an array to the next along each axis; torch counts them in elements."""
    return array.strides if hasattr(array, "strides") else tuple(step * array.itemsize for step in array.stride())


def check_apart(outs: Sequence[Any]) -> None:
    """UnsupportedError if two outputs of any library share memory: one product would overwrite another's."""
    ranges = [_Memory(out) for out in outs] if len(outs) > 1 else []
    for i, j in combinations(range(len(ranges)), 2):
        if ranges[i].overlaps(ranges[j]):
            raise UnsupportedError(f"outs[{i}] and outs[{j}] share memory: one product would overwrite the other's")


class _Memory:
    """The memory of an array, as NumPy's protocol describes it; nothing is read there."""

    def __init__(self, array: Any) -> None:
        if hasattr(array, "data_ptr"):  # torch
            interface = {"data": (array.data_ptr(), False)}
        else:
            interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        self.data: tuple[int, int] = interface["data"]
        self.__array_interface__ = {
            "data": (self.data[0], True),
            "shape": tuple(array.shape),
            "strides": strides_of(array),
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }

    def overlaps(self, other: _Memory) -> bool:
        """Whether they have a byte in common; true as well where that is too hard to tell."""
        try:
            return np.shares_memory(np.asarray(self), np.asarray(other), MAX_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


def output_dtype(dtype: DType | None) -> np.dtype[Any]:
    """The dtype of a new y: the argument, float32 without one."""
    return float_dtype(np.float32 if dtype is None else dtype)


def check_not_scalar(x: NDArray[Any]) -> NDArray[Any]:
    """x, unless it has no axis for K."""
    if x.ndim == 0:
        raise ShapeError("x is a scalar; it needs the shape [..., K]")
    return x


def all_like(guards: Sequence[Callable[[Any], bool]]) -> Callable[..., bool]:
    """A call on as many arrays as there are guards: whether each guard accepts its array. One and two need no loop."""
    if len(guards) == 1:
        return guards[0]
    if len(guards) == 2:
        first, second = guards
        return lambda a, b: first(a) and second(b)
    return lambda *arrays: all([guard(array) for guard, array in zip(guards, arrays)])  # noqa: B905 - strict is slow
