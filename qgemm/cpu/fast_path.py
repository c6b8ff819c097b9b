"""The fast path of every product like an earlier one: by the same weights, on arrays of the same types and shapes.

The first of the weights keeps plans. A plan has two keys: the scalar arguments of a call with the facts of its arrays,
and the scalar arguments alone, which find the plan of the latest such call; a single call then compares all arrays.
A plan holds the arguments of C, so that a call fills in addresses and calls C. A call without a plan takes the slow
path, products.py, which checks and converts everything; its plan is made afterwards, if C can work on such arrays.

The arrays of a call are one sequence: x, the outputs, then a bias and a residual of each product that has them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import Array, Epilogue, Gated, Request, all_like, one_product, several_products
from qgemm.codec import q8_1_f32
from qgemm.codec.float_types import DType, dtype_name
from qgemm.tensor import Tensor

from .native.calls import GATES, TARGETS, TYPES, Target
from .native.interleave import copies_of
from .native.library import reason
from .native.products import Operand, Operands, in_place, targets_of
from .plan import Argument, Library, Plan, address_of
from .products import multiply

OUT = (False, True, True)  # a call with `out` lacks bias and residual
MAX_PLANS = 256  # entries that weights keep
Scalars = tuple[Any, ...]  # the scalar arguments of a call, and which arrays it lacks
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def product(
    w: Tensor, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
    dtype: DType | None, gated: Gated | None = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul`, or of `gated`: by a plan of w, else with all checks and conversions."""
    scalars: Scalars = (activation, dtype)
    arrays: Sequence[Any] = (x,)
    if bias is None and residual is None and gated is None:  # the most frequent call needs no lists
        if out is not None:
            scalars, arrays = (activation, dtype, OUT), (x, out)
    elif gated is not None:
        function, up, up_bias = gated
        scalars, arrays = call_of(x, (out,), (bias, up_bias), (activation, dtype, function, id(up)))
    else:
        scalars, arrays = call_of(x, (out,), (bias, residual), scalars)
    ys = planned(w, scalars, arrays)
    if ys is None:
        ys = multiply(x, one_product(w, _apart(bias), residual, out, gated), activation, dtype)
        request = one_product(w, bias, residual, out, gated)
        remember(w, scalars, arrays, lambda: _plan(arrays, ys, request, activation))
    return ys[0]


def replay(w: Tensor, x: Array, activation: str, bias: Array | None, dtype: DType) -> Plan | None:
    """The plan of the latest `product` with such arguments; None without one."""
    scalars: Scalars = (activation, dtype)
    plan: Plan | None = w.plans.get(scalars if bias is None else call_of(x, (None,), (bias, None), scalars)[0])
    return plan


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
    scalars: Scalars = (activation, dtype, len(weights), *map(id, weights[1:]))
    scalars, arrays = call_of(x, (None,) if outs is None else outs, added, scalars)
    ys = planned(weights[0], scalars, arrays)
    if ys is None:
        request = several_products(weights, epilogues, outs)
        ys = multiply(x, request, activation, dtype)
        remember(weights[0], scalars, arrays, lambda: _plan(arrays, ys, request, activation))
    return list(ys)


def call_of(x: Any, outs: Sequence[Any], added: Sequence[Any], scalars: Scalars) -> tuple[Scalars, Sequence[Any]]:
    """The scalar arguments of a call, which arrays it has among them, and its arrays."""
    optional = [*outs, *added]
    absent = tuple([array is None for array in optional])
    return (*scalars, absent), [x, *[array for array in optional if array is not None]]


def _facts(scalars: Scalars, arrays: Sequence[Any]) -> Any:
    """The key of calls on arrays like these; None where no plan can serve them."""
    facts: list[Any] = [scalars]
    for array in arrays:
        library = LIBRARIES.get(type(array)) or library_of(type(array))
        fact = None if library is None else library.facts(array)
        if fact is None:
            return None
        facts.append(fact)
    return tuple(facts)


def planned(w: Tensor, scalars: Scalars, arrays: Sequence[Any]) -> Sequence[Any] | None:
    """The outputs of a call by its plan; None without one."""
    try:
        plan: Plan | None = w.plans.get(scalars)
    except TypeError:  # an array or a list in place of a name, which the checks refuse
        return None
    if plan is None or reason():
        return None
    if not plan.like(*arrays):
        plan = w.plans.get(_facts(scalars, arrays))
        if plan is None:
            return None
        w.plans[scalars] = plan
    if plan.copies and plan.is_stale():
        return None
    return plan.outputs(arrays)


# ---------------------------------------------------------------- planning


def remember(w: Tensor, scalars: Scalars, arrays: Sequence[Any], plan_of: Callable[[], Plan | None]) -> None:
    """Keep the plan of a call that was just made, if C can work on arrays like these."""
    key = _facts(scalars, arrays)
    plan = None if key is None or reason() else plan_of()
    if plan is not None:
        if len(w.plans) > MAX_PLANS - 2:
            w.plans.clear()
        w.plans[key] = w.plans[scalars] = plan


def _plan(arrays: Sequence[Any], ys: Sequence[Any], request: Request, activation: str | None) -> Plan | None:
    """The plan of a call with these outputs; None where C would need anything but the arrays and their conversions."""
    weights, epilogues, _, function = request
    outs, x = [out for out in request.outs if out is not None], arrays[0]
    kind = activation or ("a8" if type(x) is Tensor else "a16")
    if len(weights) > TARGETS or len(outs) not in (0, len(ys)) or not in_place(weights, kind):
        return None
    m, k = prod(x.shape[:-1]), x.shape[-1]
    operand, use_of_x = read_rows(x, k)
    used, own_residuals = [use_of_x], set[tuple[int, int]]()
    if operand is None or not m:
        return None
    for i, y in enumerate(ys):
        operand_of_y, use = read_rows(y, y.shape[-1])
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
            added, use = read_rows(residual, residual.shape[-1], flat=True)
            if added is None:
                return None
            if use.convert is None and array_library(ys[i]).type(ys[i]) == array_library(residual).type(residual):
                own_residuals.add((1 + i, len(used)))
            used.append(use._replace(offset=start + Target.residual.offset))
        y = None if function and i else read_rows(ys[i], ys[i].shape[-1])[0]
        gate = GATES[function] if function and not i else 0
        operands.append(Operands(w, w.blocks, y, 0, added, gate))
    targets, packed, converted = targets_of(operands, operand, m, k, kind)
    new = [] if outs else [array_library(y).new(y) for y in ys]
    files = [(w, i * ctypes.sizeof(Target) + Target.w.offset) for i, w in enumerate(weights) if not w.in_memory]
    guarded = {
        (y, other): (y, other) in own_residuals
        for y in range(1, 1 + len(outs))
        for other in (0, *range(y + 1, len(used)))
    }
    memory, like = packed + converted, likeness(arrays)
    copies = copies_of(weights)
    return Plan(
        targets, "qgemm_replay", memory, used, len(outs), new, weights[1:], files, like, guarded, m, packed, copies
    )


def array_library(array: Any) -> Library:
    """The library of an array's class, NumPy for classes that have none."""
    return LIBRARIES.get(type(array)) or LIBRARIES[np.ndarray]


def read_rows(array: Any, k: int, flat: bool = False) -> tuple[Operand | None, Argument]:
    """An array [..., k] as C reads its rows, from a copy where these are not equally far apart.

    flat: whether only rows without a gap are read in place. No Operand for a type that C does not read.
    """
    library = LIBRARIES.get(type(array)) or library_of(type(array)) or LIBRARIES[np.ndarray]
    name = library.type(array)
    if type(array) is Tensor:
        step, itemsize, code = q8_1_f32.DTYPE.itemsize, 4, None
        size = k // q8_1_f32.FORMAT.weights * step
    elif name in TYPES:
        code, step = TYPES[name], SIZES[name]
        size, itemsize = k * step, step
    else:
        return None, Argument(library.pointer, 0, 1, None, -1)
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


def likeness(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A call on as many arrays: whether they are like these, by `like` of their library if all have the same."""
    first, *others = {id(LIBRARIES[type(array)]): LIBRARIES[type(array)] for array in arrays}.values()
    return like_in_python(arrays) if others else first.like(arrays)


def like_in_python(arrays: Sequence[Any]) -> Callable[..., bool]:
    """`Library.like` of arrays of any libraries, by their facts."""

    def like_one(array: Any) -> Callable[[Any], bool]:
        kind, facts = type(array), LIBRARIES[type(array)].facts
        expected = facts(array)
        return lambda x: type(x) is kind and facts(x) == expected

    return all_like([like_one(array) for array in arrays])


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

    private = getattr(torch, "_C", None)
    compiler: Any = getattr(getattr(private, "_dynamo", None), "guards", None)  # torch's own compiled code calls these
    empty: Any = getattr(compiler, "_empty_strided_cpu", None)
    guards: Any = getattr(compiler, "TensorGuards", None)

    def new(y: Any) -> Callable[[], Any]:
        """By empty_strided of compiled code, which takes half the time of torch.empty."""
        strides = [*accumulate(reversed(y.shape[1:]), mul, initial=1)][::-1]
        if empty is None:
            return partial(torch.empty_strided, tuple(y.shape), strides, dtype=y.dtype, device=y.device)
        return partial(empty, tuple(y.shape), tuple(strides), y.dtype)

    def like(arrays: Sequence[Any]) -> Callable[..., bool]:
        """By the guards of torch.compile, one call of C: 0.2 us instead of 0.9 in Python."""
        sizes, strides = [list(array.shape) for array in arrays], [list(array.stride()) for array in arrays]
        check: Callable[..., bool] = guards(*arrays, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check

    return Library(
        facts=facts, like=like_in_python if guards is None else like, pointer=torch.Tensor.data_ptr,
        strides=lambda x: tuple(stride * x.element_size() for stride in x.stride()),
        type=lambda x: str(x.dtype).removeprefix("torch."),
        copy=lambda x: x.detach().contiguous(),
        float32=lambda x: x.detach().float().contiguous(),
        apart=lambda x: x.detach().clone(),  # NumPy would pin a storage that FSDP frees after each forward
        new=new,
    )  # fmt: skip


def library_of(kind: type) -> Library | None:
    """The library of a class of arrays; None where C reads none of them."""
    torch = sys.modules.get("torch")
    if kind not in LIBRARIES and torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        LIBRARIES[torch.Tensor] = LIBRARIES[torch.nn.Parameter] = _torch(torch)
    return LIBRARIES.get(kind)


LIBRARIES: dict[type, Library] = {
    np.ndarray: Library(
        facts=_numpy_facts, like=like_in_python, pointer=address_of, strides=lambda x: x.strides, type=_numpy_type,
        copy=np.ascontiguousarray, float32=partial(np.ascontiguousarray, dtype=np.float32), apart=lambda x: x,
        new=lambda y: partial(np.empty, y.shape, y.dtype),
    ),
    Tensor: Library(
        facts=_prepared_facts, like=like_in_python, pointer=lambda x: address_of(x.blocks),
        strides=lambda x: x.blocks.strides,
        type=lambda x: "", copy=_copied, float32=_copied, apart=lambda x: x,
        new=lambda y: partial(np.empty, y.shape, y.dtype),
    ),
}  # fmt: skip
