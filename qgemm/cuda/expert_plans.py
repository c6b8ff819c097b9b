"""The short way of a call by experts: the launches of an earlier one of the same weights, shapes and types.

A call of the long way notes its launches with their pointers. Each pointer lies in an array of the call, in memory that
was made for it, or is one that never changes, of weights: so the launches of a later call follow from where its arrays
lie. What is not the same in every respect goes the long way, which says why or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from qgemm.arguments import output_dtype

from .expert_arrays import ALIGNMENT, Call, Given
from .libraries import LIBRARIES

MAX_PLANS = 256  # that the first weights of a call remember
MAX_ROOMS = 2  # of a call that is remembered; more hold memory that the long way would have freed
FIXED = 0  # number of what a pointer of weights is relative to; behind it the arrays of a call, y, and its rooms

Launch = tuple[
    Callable[..., None], tuple[tuple[int, int], ...]
]  # pointers as (what it is relative to, bytes from there)


class Plan(NamedTuple):
    """The launches of a call, what makes its y (None where it is given) and its rooms, bytes of arrays and of y."""

    launches: list[Launch]
    new: Any
    rooms: tuple[Any, ...]
    nbytes: tuple[int, ...]


def again(packed: Sequence[Any], function: str, arrays: Sequence[Any], out: Any, dtype: Any) -> Any:
    """y of a call as it was computed before; None if there is no plan for these arguments.

    arrays: x, ids, and others or None. function: of a layer, "" for a product.
    """
    library = LIBRARIES.get(type(arrays[0]))
    if library is None:
        return None
    plan = packed[0].plans.get(key_of(packed, function, arrays, out, dtype))
    if plan is None:
        return None
    device, pointer, contiguous, number = packed[0].device, library.pointer, library.contiguous, library.device
    if library.current_device is not None and library.current_device() != device:
        return None
    at = [0]
    for array in arrays:
        if array is None:
            at.append(0)
            continue
        if LIBRARIES.get(type(array)) is not library or number(array) != device or not contiguous(array):
            return None
        address = pointer(array)
        if address % ALIGNMENT:
            return None
        at.append(address)
    if out is None:
        y = plan.new()
    else:
        elsewhere = LIBRARIES.get(type(out)) is not library or number(out) != device
        if elsewhere or not contiguous(out) or (library.grad and out.requires_grad):
            return None
        y = out
    target = pointer(y)
    if out is not None:
        end = target + plan.nbytes[-1]
        for address, size in zip(at[1:], plan.nbytes):  # noqa: B905  y's bytes come last
            if address < end and target < address + size:
                return None
    rooms = [make() for make in plan.rooms]
    at += [target, *map(pointer, rooms)]
    stream = library.stream(device)
    for launch, pointers in plan.launches:
        launch(stream, *[at[base] + offset for base, offset in pointers])
    return y


def key_of(packed: Sequence[Any], function: str, arrays: Sequence[Any], out: Any, dtype: Any) -> tuple[Any, ...]:
    """What the launches of a call depend on."""
    key: list[Any] = [function, dtype]
    for w in packed:
        key.append(w.serial)
    for array in arrays:
        key += (None, None) if array is None else (array.shape, array.dtype)
    if out is not None:
        key += (out.shape, out.dtype)
    return tuple(key)


def remember(
    call: Call, packed: Sequence[Any], function: str, arrays: Sequence[Any], y: Given, out: Any, dtype: Any
) -> None:
    """Keep the launches of a call with its first weights, where kernels had its very arrays and wrote its very y."""
    library, own = call.library, {id(given.array): given for given in call.reads}
    given = [None if array is None else own.get(id(array)) for array in arrays]
    same = all(array is None or one is not None for array, one in zip(arrays, given, strict=True))
    if not same or not call.launched or len(call.rooms) > MAX_ROOMS or (out is not None and y.array is not out):
        return
    if out is None and output_dtype(dtype).name != y.name:
        return
    spans = [(0, 0), *((0, 0) if one is None else (one.pointer, one.end) for one in given), (y.pointer, y.end)]
    spans += [(room.pointer, room.pointer + room.nbytes) for room in call.rooms]
    filled = sorted(span for span in spans if span[0] < span[1])
    if any(first[1] > second[0] for first, second in pairwise(filled)):
        return  # of an array that is given twice a pointer could belong to either
    launches = [(one, tuple(_relative(pointer, spans) for pointer in pointers)) for one, pointers in call.launched]
    new = None if out is not None else library.new(tuple(y.array.shape), library.dtype(y.name), call.device)
    nbytes = tuple(end - start for start, end in spans[1 : len(arrays) + 2])
    plans = packed[0].plans
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key_of(packed, function, arrays, out, dtype)] = Plan(
        launches, new, tuple(room.make for room in call.rooms), nbytes
    )


def _relative(pointer: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """A pointer as bytes from the start of the span that holds it; of none it is an address for ever."""
    for number, (start, end) in enumerate(spans):
        if start <= pointer < end:
            return number, pointer - start
    return FIXED, pointer
