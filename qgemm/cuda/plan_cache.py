"""Products by DeviceTensors: the short way of a call, by the plan of an earlier one of the same weights, shapes and
types, on other pointers; else the long way (products.py), whose plan is kept for the next.

A DeviceTensor remembers planned calls (`plans`), each twice. By its words alone (activation, dtype, which arrays are
given, which weights), the last one of such a call: where arrays are like those that it had, which one call of their
library says, nothing is left but addresses. By the shapes and types of all arrays as well: they are looked at one by
one, and copied where a kernel could not read them. What fits neither goes the long way.

All arrays of a call are one tuple here: x, the outputs that are given, then what is added, in the order of products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from qgemm.arguments import NO_EPILOGUE, Epilogue, Gated
from qgemm.arguments import epilogues as epilogues_of

from .activations import ALIGNMENT, DeviceActivations
from .libraries import LIBRARIES, Library
from .plan import Plan
from .problem import C_TYPES
from .products import Made, multiply, multiply_gated
from .tensor import DeviceTensor

MAX_PLANS = 256  # entries that a tensor remembers

_serial = attrgetter("serial")

Words = tuple[Any, ...]
Arrays = tuple[Any, ...]


class Planned:
    """A call that was planned. run: arrays -> y, or a list of them; None if they lie where kernels cannot take them.

    outs: how many arrays, from the second on, are written. like: see Library; of arrays that are read in place.
    """

    __slots__ = "device", "like", "outs", "run"

    def __init__(self, run: Callable[..., Any], outs: int, device: int) -> None:
        self.run, self.outs, self.device = run, outs, device
        self.like: Callable[..., bool] = lambda *arrays: False


def product(
    w: DeviceTensor,
    x: Any,
    activation: str | None,
    bias: Any,
    residual: Any,
    out: Any,
    dtype: Any,
    gated: Gated | None = None,
) -> Any:
    """y of `qgemm.matmul`, computed as before; by the long way if there is no plan for these arguments.

    gated: what the product by w gates, for y of `qgemm.gated`.
    """
    plans = w.plans
    if bias is None and residual is None and gated is None:  # as below, without making tuples of arrays
        planned = plans.get((activation or "a16", dtype, out is None))
        if planned is not None:
            if out is None:
                y = planned.run(x) if planned.like(x) else None
            else:
                y = planned.run(x, out) if planned.like(x, out) else None
            if y is not None:
                return y
    words, arrays = of_one(x, activation, bias, residual, out, dtype, gated)
    planned = plans.get(words)
    if planned is not None and planned.like(*arrays):
        y = planned.run(*arrays)
        if y is not None:
            return y
    y = _by_shapes(plans, words, arrays)
    if y is not None:
        return y
    added = NO_EPILOGUE if bias is None and residual is None else Epilogue(bias, residual)
    if gated is None:
        made = multiply(x, [w], activation, [added], [out], dtype)
    else:
        made = multiply_gated(x, w, gated, activation, bias, out, dtype)
    _remember(made, x, [w], [added], [out], dtype, gated)
    return made.ys[0]


def products(
    x: Any,
    weights: Sequence[Any],
    activation: str | None,
    epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None,
    dtype: Any,
) -> list[Any] | None:
    """The list of `qgemm.matmul_many`, computed as before; by the long way if there is no plan for these arguments.

    epilogues: None if nothing is added to any product. None if not all weights are DeviceTensors.
    """
    try:
        plans = weights[0].plans
        if epilogues is None and outs is not None and type(x) is not DeviceActivations:  # as of_many, without a call
            words: Words = (activation or "a16", dtype, False, *map(_serial, weights))
            arrays: Arrays = (x, *outs)
        else:
            words, arrays = of_many(x, weights, activation, epilogues, outs, dtype)
    except AttributeError:  # not all are DeviceTensors
        return None
    planned = plans.get(words)
    if planned is not None and planned.like(*arrays):
        ys: list[Any] | None = planned.run(*arrays)
        if ys is not None:
            return ys
    ys = _by_shapes(plans, words, arrays)
    if ys is not None:
        return ys
    added = epilogues_of(len(weights), None, None, outs) if epilogues is None else epilogues
    targets = [None] * len(weights) if outs is None else outs
    made = multiply(x, weights, activation, added, targets, dtype)
    _remember(made, x, weights, added, targets, dtype)
    return made.ys


def of_one(
    x: Any, activation: Any, bias: Any, residual: Any, out: Any, dtype: Any, gated: Gated | None
) -> tuple[Words, Arrays]:
    """The words and arrays of a call of one product."""
    if type(x) is DeviceActivations:
        activation, x = _prepared(x, activation)
    if bias is None and residual is None and gated is None:
        return (activation or "a16", dtype, out is None), (x,) if out is None else (x, out)
    added = [bias, residual]
    words: Words = (activation or "a16", dtype, out is None, bias is None, residual is None)
    if gated is not None:
        added.append(gated.bias)
        words = *words, gated.function, getattr(gated.up, "serial", None), gated.bias is None
    return words, tuple([array for array in (x, out, *added) if array is not None])


def of_many(
    x: Any,
    weights: Sequence[Any],
    activation: Any,
    epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None,
    dtype: Any,
) -> tuple[Words, Arrays]:
    """The words and arrays of a call of several products; an array that is None fits no plan."""
    if type(x) is DeviceActivations:
        activation, x = _prepared(x, activation)
    words = (activation or "a16", dtype, outs is None) + tuple(map(_serial, weights))  # noqa: RUF005  faster so
    arrays = (x,) if outs is None else (x, *outs)
    if epilogues is None:
        return words, arrays
    added = [array for epilogue in epilogues for array in epilogue]
    given = [array for array in added if array is not None]
    return (*words, *[array is None for array in added]), (*arrays, *given)


def _prepared(x: DeviceActivations, activation: Any) -> tuple[Words, Any]:
    """The words of prepared activations, which no other activation multiplies, and the array that they are in."""
    return (x.activation if activation in (None, x.activation) else activation, x.shape, x.dtype), x.data


def _by_shapes(plans: dict[Any, Planned], words: Words, arrays: Arrays) -> Any:
    """The call of these words for arrays of these shapes and types, with copies of what cannot be read in place."""
    library = LIBRARIES.get(type(arrays[0]))
    key = None if library is None else _key(words, arrays, library)
    planned = plans.get(key)
    if library is None or planned is None:
        return None
    given, written = arrays, range(1, 1 + planned.outs)
    if not planned.like(*arrays):
        given = tuple([array if library.contiguous(array) else library.copy(array) for array in arrays])
        for index in written:
            if given[index] is not arrays[index] or (library.grad and arrays[index].requires_grad):
                return None  # a copy or an error
        if any(library.device(array) != planned.device for array in arrays):
            return None
        if all(map(is_, given, arrays)):
            planned.like = library.like(arrays)
    plans[words] = planned
    y = planned.run(*given)
    if y is not None:
        return y
    return planned.run(*[array if index in written else library.copy(array) for index, array in enumerate(given)])


def _key(words: Words, arrays: Arrays, library: Library) -> Any:
    """What a plan depends on besides its first weights; None if an array is of another library."""
    key = [words]
    for array in arrays:
        if LIBRARIES.get(type(array)) is not library:
            return None
        key += (array.shape, array.dtype)
    return tuple(key)


# ---------------------------------------------------------------- planning


class Slots(NamedTuple):
    """Where the arrays of a product are in the tuple of a call's, 0 for none."""

    y: int
    bias: int
    residual: int


def _remember(
    made: Made,
    x: Any,
    weights: Sequence[DeviceTensor],
    epilogues: Sequence[Epilogue],
    outs: Sequence[Any],
    dtype: Any,
    gated: Gated | None = None,
) -> None:
    """Keep the plan of a call with its first weights, unless kernels got a bias or residual in another type."""
    plan, library, activation = made.plan, made.library, made.activation
    if plan is None or library is None or len(made.ys) != len(plan.y_nbytes):
        return
    given = None if all(one is NO_EPILOGUE for one in epilogues) else epilogues
    targets = None if all(out is None for out in outs) else outs
    if len(weights) == 1:
        ((bias, residual),) = epilogues
        words, arrays = of_one(x, activation, bias, residual, outs[0], dtype, gated)
        if gated is not None:
            weights, epilogues = [*weights, gated.up], [*epilogues, Epilogue(gated.bias)]
    else:
        words, arrays = of_many(x, weights, activation, given, targets, dtype)
    key = _key(words, arrays, library)
    written = 0 if targets is None else len(targets)
    if key is None or not all(library.name(array.dtype) in C_TYPES for array in arrays[1 + written :]):
        return
    plans = weights[0].plans
    if len(plans) >= MAX_PLANS:
        plans.clear()
    new = [library.new(tuple(y.shape), library.dtype(made.dtype), weights[0].device) for y in made.ys]
    run = _running(plan, new, arrays, written, weights, epilogues, gated is not None, len(outs) == 1, library)
    plans[key] = Planned(run, written, weights[0].device)


def _running(
    plan: Plan,
    new: Sequence[Callable[[], Any]],
    arrays: Arrays,
    written: int,
    weights: Sequence[DeviceTensor],
    epilogues: Sequence[Epilogue],
    gated: bool,
    one: bool,
    library: Library,
) -> Callable[..., Any]:
    """Planned.run of a call that had these arrays. new: what makes each y. one: whether it gives one y, not a list."""
    device, pointer, stream, here = weights[0].device, library.pointer, library.stream, library.current_device
    enter = plan.enter
    if one and len(arrays) == 1 + written and not gated:
        return _one(plan, new[0], weights[0].pointer, bool(written), device, library)
    slots = _slots(epilogues, written, len(arrays), gated)
    constants = 0, *(w.pointer for w in weights)
    first = len(constants)
    picked = [first]
    for index, (y, bias, residual) in enumerate(slots):
        picked += (1 + index, first + y, bias and first + bias, residual and first + residual)
    pick, apart, end = itemgetter(*picked), _apart(plan, arrays, written, slots), 1 + written
    checked: tuple[int, ...] = ()  # addresses: mostly those of the call before

    def run(*arrays: Any) -> Any:
        nonlocal checked
        if here is not None and here() != device:
            return None
        at = tuple(map(pointer, arrays))
        if at != checked:
            if at[0] % ALIGNMENT or not _are_apart(at, apart):
                return None
            checked = at
        if written:
            ys = [*arrays[1:end]]
        else:
            ys = [make() for make in new]
            at += tuple(map(pointer, ys))
        enter(stream(device), *pick(constants + at))
        return ys[0] if one else ys

    return run


def _are_apart(at: Sequence[int], apart: Sequence[tuple[int, int, int, int, bool]]) -> bool:
    for a, a_nbytes, b, b_nbytes, same in apart:
        distance = at[b] - at[a]
        if -b_nbytes < distance < a_nbytes and (distance or not same):
            return False
    return True


def _one(
    plan: Plan, new: Callable[[], Any], w: int, written: bool, device: int, library: Library
) -> Callable[..., Any]:
    """Planned.run of one product to which nothing is added: the same, without loops."""
    enter, pointer, stream, here = plan.enter, library.pointer, library.stream, library.current_device
    x_nbytes, (y_nbytes,) = plan.x_nbytes, plan.y_nbytes

    def into(x: Any, y: Any) -> Any:
        if here is not None and here() != device:
            return None
        source, target = pointer(x), pointer(y)
        if source % ALIGNMENT or -y_nbytes < target - source < x_nbytes:
            return None
        enter(stream(device), source, w, target, 0, 0)
        return y

    def made(x: Any) -> Any:
        source = pointer(x)
        if source % ALIGNMENT or (here is not None and here() != device):
            return None
        y = new()
        enter(stream(device), source, w, pointer(y), 0, 0)
        return y

    return into if written else made


def _slots(epilogues: Sequence[Epilogue], written: int, count: int, gated: bool) -> list[Slots]:
    """Of each product; new outputs come behind all `count` arrays that are given. A gate has the y of what it gates."""
    found, added = [], 1 + written
    for index, epilogue in enumerate(epilogues):
        places = []
        for array in epilogue:
            places.append(0 if array is None else added)
            added += array is not None
        y = 0 if gated else index
        found.append(Slots(1 + y if written else count + y, *places))
    return found


def _apart(plan: Plan, arrays: Arrays, written: int, slots: Sequence[Slots]) -> list[tuple[int, int, int, int, bool]]:
    """Pairs that may share no memory, an output and what is read or another output: where each is, and its bytes.

    The last says that they may be the same elements: an output and its own residual of the same type.
    """
    sizes = [plan.x_nbytes, *plan.y_nbytes[:written], *(array.nbytes for array in arrays[1 + written :])]
    outs = range(1, 1 + written)
    reads = [0, *range(1 + written, len(arrays))]
    own = {(slot.y, slot.residual) for slot in slots if slot.residual}
    pairs = [*combinations(outs, 2), *((y, read) for y in outs for read in reads)]
    return [(y, sizes[y], b, sizes[b], (y, b) in own and arrays[y].dtype == arrays[b].dtype) for y, b in pairs]
