"""The fast path of every product like an earlier one: by the same weights, on arrays of the same types and shapes.

The first of the weights keeps plans, each under its key: the scalar arguments of a call and the facts of its arrays. A
plan holds the arguments of C, so that a call fills in addresses and calls C. A call without a plan takes the slow path,
products.py, which checks and converts everything; its plan is made afterwards, if C can work on arrays like these.

The arrays of a call are one sequence: x, the outputs, then a bias and a residual of each product that has them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import Array, Epilogue, Gated, Request, one_product, several_products
from qgemm.codec import q8_1_f32
from qgemm.codec.float_types import DType, dtype_name
from qgemm.tensor import Tensor

from .native.calls import GATES, TARGETS, TYPES, Guard, Replay, Target
from .native.library import reason
from .native.pool import ready
from .native.products import Operand, Operands, in_place, scratch, targets_of
from .products import multiply

MAX_PLANS = 256  # that weights keep
HEAD = object.__basicsize__  # bytes of an array object before its first field, which is the address of its numbers


class Library(NamedTuple):
    """How arrays of one class are read.

    facts: all that a plan depends on, so that an array with equal facts can stand for another; None where C reads no
    such array. pointer: the address of the first number. strides: in bytes. type: its name. copy: to C order.
    float32: to that type and C order. apart: to memory of its own, where NumPy would keep the array's. new: an output
    like another -> a call that makes such an array.
    """

    facts: Callable[[Any], Any]
    pointer: Callable[[Any], int]
    strides: Callable[[Any], tuple[int, ...]]
    type: Callable[[Any], str]
    copy: Callable[[Any], Any]
    float32: Callable[[Any], Any]
    apart: Callable[[Any], Any]
    new: Callable[[Any], Callable[[], Any]]


class Argument(NamedTuple):
    """How a plan uses one array: its bytes from first to last, the size of a number, a conversion before C reads it.

    offset: of its address among the arguments of C; negative for x, which is an argument by itself.
    """

    pointer: Callable[[Any], int]
    nbytes: int
    itemsize: int
    convert: Callable[[Any], Any] | None
    offset: int


class Plan:
    """The arguments of C for one kind of call.

    used: of each array, in order. outs: how many outputs the caller gives. new: makes each output where it gives none.
    own_residuals: pairs of an output and a residual that may be the output itself.
    """

    def __init__(
        self, targets: Any, packed: int, memory: int, m: int, used: Sequence[Argument], outs: int,
        new: Sequence[Callable[[], Any]], weights: Sequence[Tensor], own_residuals: set[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.memory, self.used, self.new, self.outs = memory, used, new, outs
        self.converts = any(argument.convert for argument in used)
        self.pointers = [argument.pointer for argument in used]
        self.files = [w for w in weights if not w.in_memory]  # checked at each access
        self.weights = weights[1:]  # alive, since their ids are in the key
        offsets = [argument.offset for argument in used]
        size = ctypes.sizeof(Target)
        offsets += [i * size + Target.w.offset for i, w in enumerate(weights) if not w.in_memory]
        count = len(offsets)
        masks = [argument.itemsize - 1 for argument in used] + [0] * len(self.files)
        guards = [
            Guard(y, other, used[y].nbytes, used[other].nbytes, (y, other) in own_residuals)
            for y in range(1, 1 + outs)
            for other in (0, *range(y + 1, len(used)))
            if used[other].convert is None
        ]
        numbers = ctypes.c_int64 * count
        self.arrays = targets, numbers(*masks), numbers(*offsets), (Guard * len(guards))(*guards)
        addresses = map(ctypes.addressof, self.arrays)
        self.call = Replay(*addresses, len(targets), m, packed, count, len(guards))
        self.address = ctypes.addressof(self.call)
        self.packed_addresses = Struct(f"{count}N").pack

    def run(self, arrays: Sequence[Any]) -> bool:
        """Whether C could multiply these arrays in place, and did."""
        if self.converts:
            arrays = [a if use.convert is None else use.convert(a) for a, use in zip(arrays, self.used, strict=True)]
        addresses = [pointer(array) for pointer, array in zip(self.pointers, arrays)]  # noqa: B905 - strict is slow
        if self.files:
            addresses += [address_of(w.blocks) for w in self.files]
        done: int = ready().qgemm_replay(self.address, self.packed_addresses(*addresses), scratch(self.memory))
        return bool(done)


def product(
    w: Tensor, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
    dtype: DType | None, gated: Gated | None = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul`, or of `gated`: by a plan of w, else with all checks and conversions."""
    added: Sequence[Any] = () if bias is None and residual is None else (bias, residual)
    if gated is not None:
        function, up, up_bias = gated
        added = (bias, up_bias)
        key, arrays = _key(x, (out,), added, (activation, dtype, function, id(up)))
    else:
        key, arrays = _key(x, (out,), added, (activation, dtype))
    ys = _planned(w, key, arrays)
    if ys is None:
        ys = multiply(x, one_product(w, _apart(bias), residual, out, gated), activation, dtype)
        _remember(w, key, arrays, ys, one_product(w, bias, residual, out, gated), activation)
    return ys[0]


def _apart(bias: Any) -> Any:
    """A bias for the slow path, which reads it by NumPy."""
    library = None if bias is None else LIBRARIES.get(type(bias))
    return bias if library is None else library.apart(bias)


def products(
    x: Array, weights: Sequence[Any], activation: str | None, epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Array | None] | None, dtype: DType | None,
) -> list[Any] | None:  # fmt: skip
    """The list of `qgemm.matmul_many`; None if some weights are no Tensors."""
    if not all(isinstance(w, Tensor) for w in weights):
        return None
    added = () if epilogues is None else [array for epilogue in epilogues for array in epilogue]
    targets = (None,) if outs is None else outs
    key, arrays = _key(x, targets, added, (activation, dtype, len(weights), *map(id, weights[1:])))
    ys = _planned(weights[0], key, arrays)
    if ys is None:
        request = several_products(weights, epilogues, outs)
        ys = multiply(x, request, activation, dtype)
        _remember(weights[0], key, arrays, ys, request, activation)
    return ys


def _key(x: Any, outs: Sequence[Any], added: Sequence[Any], scalars: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The key of a call and its arrays; the key is None where no plan can serve it."""
    arrays: list[Any] = []
    facts: list[Any] = [scalars]
    for array in (x, *outs, *added):
        if array is None:
            facts.append(None)
            continue
        library = LIBRARIES.get(type(array)) or _library_of(type(array))
        fact = None if library is None else library.facts(array)
        if fact is None:
            return None, arrays
        arrays.append(array)
        facts.append(fact)
    return tuple(facts), arrays


def _planned(w: Tensor, key: Any, arrays: list[Any]) -> list[Any] | None:
    """The outputs of a call by its plan; None without one."""
    plan = w.plans.get(key)
    if plan is None or reason():
        return None
    if plan.new:
        ys = [new() for new in plan.new]
        arrays = [arrays[0], *ys, *arrays[1:]]
    else:
        ys = arrays[1 : 1 + plan.outs]
    return ys if plan.run(arrays) else None


# ---------------------------------------------------------------- planning


def _remember(
    w: Tensor, key: Any, arrays: list[Any], ys: Sequence[Any], request: Request, activation: str | None
) -> None:
    """Keep the plan of a call that was just made, if C can work on arrays like these."""
    plan = None if key is None or reason() else _plan(arrays, ys, request, activation)
    if plan is not None:
        if len(w.plans) >= MAX_PLANS:
            w.plans.clear()
        w.plans[key] = plan


def _plan(arrays: Sequence[Any], ys: Sequence[Any], request: Request, activation: str | None) -> Plan | None:
    """The plan of a call with these outputs; None where C would need anything but the arrays and their conversions."""
    weights, epilogues, _, function = request
    outs, x = [out for out in request.outs if out is not None], arrays[0]
    kind = activation or ("a8" if type(x) is Tensor else "a16")
    if len(weights) > TARGETS or len(outs) not in (0, len(ys)) or not in_place(weights, kind):
        return None
    m, k = prod(x.shape[:-1]), x.shape[-1]
    operand, use_of_x = _read_rows(x, k)
    used, own_residuals = [use_of_x], set()
    if operand is None or not m:
        return None
    for i, y in enumerate(ys):
        operand_of_y, use = _read_rows(y, y.shape[-1])
        if operand_of_y is None or use.convert is not None:
            return None
        used.append(use._replace(offset=i * ctypes.sizeof(Target) + Target.y.offset))
    operands = []
    for i, (w, (bias, residual)) in enumerate(zip(weights, epilogues, strict=True)):
        start = i * ctypes.sizeof(Target)
        if bias is not None:
            use_of_bias = _read_bias(bias)
            if use_of_bias is None:
                return None
            used.append(use_of_bias._replace(offset=start + Target.bias.offset))
        added = None
        if residual is not None:
            added, use = _read_rows(residual, residual.shape[-1], flat=True)
            if added is None:
                return None
            if use.convert is None and _library(ys[i]).type(ys[i]) == _library(residual).type(residual):
                own_residuals.add((1 + i, len(used)))
            used.append(use._replace(offset=start + Target.residual.offset))
        y = None if function and i else _read_rows(ys[i], ys[i].shape[-1])[0]
        gate = GATES[function] if function and not i else 0
        operands.append(Operands(w, w.blocks, y, 0, added, gate))
    targets, packed, converted = targets_of(operands, operand, m, k, kind)
    new = [] if outs else [_library(y).new(y) for y in ys]
    return Plan(targets, packed, packed + converted, m, used, len(outs), new, weights, own_residuals)


def _library(array: Any) -> Library:
    return LIBRARIES.get(type(array)) or LIBRARIES[np.ndarray]


def _read_rows(array: Any, k: int, flat: bool = False) -> tuple[Operand | None, Argument]:
    """An array [..., k] as C reads its rows, from a copy where these are not equally far apart.

    flat: whether only rows without a gap are read in place. No Operand for a type that C does not read.
    """
    library = LIBRARIES.get(type(array)) or _library_of(type(array)) or LIBRARIES[np.ndarray]
    name = library.type(array)
    if type(array) is Tensor:
        step, itemsize, code = q8_1_f32.DTYPE.itemsize, 4, None
        size = k // q8_1_f32.FORMAT.weights * step
    elif name in TYPES:
        code, step = TYPES[name], SIZES[name]
        size, itemsize = k * step, step
    else:
        return None, _NO_ARGUMENT
    row, convert = _row(array.shape, library.strides(array), step, size), None
    if row is None or row % itemsize or (flat and row != size):
        row, convert = size, library.copy
    m = prod(array.shape[:-1])
    use = Argument(library.pointer, (m - 1) * row + size, itemsize, convert, -1)
    return Operand(0, row, code), use


def _row(shape: tuple[int, ...], strides: tuple[int, ...], step: int, size: int) -> int | None:
    """Bytes from a row of [..., K] to the next; None if that differs, or if a row has gaps.

    step: bytes from a number or block of a row to the next, without gaps. size: of a row.
    """
    if shape[-1] > 1 and strides[-1] != step:
        return None
    row = None
    reach = 1
    for length, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if length == 1:
            continue
        if row is None:
            row = stride
        elif stride != row * reach:
            return None
        reach *= length
    return size if row is None else row if row >= 0 else None


def _read_bias(bias: Any) -> Argument | None:
    """How C reads a bias: as float32 without gaps. A float64 may need an error handler, which the slow path has."""
    library = LIBRARIES.get(type(bias))
    if library is None or library.type(bias) not in ("float32", "float16", "bfloat16"):
        return None
    plain = library.type(bias) == "float32" and (len(bias) < 2 or library.strides(bias)[-1] == 4)
    return Argument(library.pointer, 4 * len(bias), 4, None if plain else library.float32, 0)


# ---------------------------------------------------------------- libraries


def address_of(array: NDArray[Any]) -> int:
    """The address of an array of NumPy, as compiled extensions read it: `ctypes.data` costs ten times as much."""
    address: int | None = ctypes.c_void_p.from_address(id(array) + HEAD).value
    return address or 0


if sys.implementation.name != "cpython" or address_of(_probe := np.zeros(1)) != _probe.ctypes.data:

    def address_of(array: NDArray[Any]) -> int:
        """The address of an array of NumPy."""
        return int(array.ctypes.data)


def _numpy_facts(x: NDArray[Any]) -> Any:
    return np.ndarray, x.dtype, x.shape, x.strides, x.flags.writeable


def _numpy_type(x: NDArray[Any]) -> str:
    return dtype_name(x.dtype) if x.dtype.isnative else ""


def _prepared_facts(x: Tensor) -> Any:
    """Facts of activations that were prepared for "a8"; None for other tensors and for those of a file."""
    if x.format is not q8_1_f32.FORMAT or not x.in_memory:
        return None
    return Tensor, x.shape, x.blocks.strides


def _copied(x: Tensor) -> Tensor:
    return Tensor(x.format, x.shape, np.ascontiguousarray(x.blocks))


def _torch(torch: Any) -> Library:
    """The functions of torch for tensors in the memory of the host."""

    def facts(x: Any) -> Any:
        if not x.is_cpu or x.is_neg() or x.layout is not torch.strided:
            return None
        return torch, x.dtype, x.shape, x.stride(), x.requires_grad

    def new(y: Any) -> Callable[[], Any]:
        return partial(torch.empty, tuple(y.shape), dtype=y.dtype, device=y.device)

    return Library(
        facts=facts, pointer=torch.Tensor.data_ptr,
        strides=lambda x: tuple(stride * x.element_size() for stride in x.stride()),
        type=lambda x: str(x.dtype).removeprefix("torch."),
        copy=lambda x: x.detach().contiguous(),
        float32=lambda x: x.detach().float().contiguous(),
        apart=lambda x: x.detach().clone(),  # NumPy would pin a storage that FSDP frees after each forward
        new=new,
    )  # fmt: skip


def _library_of(kind: type) -> Library | None:
    """The library of a class of arrays that comes for the first time; None where C reads none of them."""
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        LIBRARIES[torch.Tensor] = LIBRARIES[torch.nn.Parameter] = _torch(torch)
    return LIBRARIES.get(kind)


SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_NO_ARGUMENT = Argument(address_of, 0, 1, None, -1)
LIBRARIES: dict[type, Library] = {
    np.ndarray: Library(
        facts=_numpy_facts, pointer=address_of, strides=lambda x: x.strides, type=_numpy_type,
        copy=np.ascontiguousarray, float32=partial(np.ascontiguousarray, dtype=np.float32), apart=lambda x: x,
        new=lambda y: partial(np.empty, y.shape, y.dtype),
    ),
    Tensor: Library(
        facts=_prepared_facts, pointer=lambda x: address_of(x.blocks), strides=lambda x: x.blocks.strides,
        type=lambda x: "", copy=_copied, float32=_copied, apart=lambda x: x,
        new=lambda y: partial(np.empty, y.shape, y.dtype),
    ),
}  # fmt: skip
