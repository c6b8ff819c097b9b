"""The short way of a call by experts: the launches of an earlier one of the same weights, shapes and types.

A call of the long way notes its launches with their pointers. Each pointer lies in an array of the call, in memory that
was made for it, or is one that never changes, of weights: so the launches of a later call follow from where its arrays
lie. What is not the same in every respect goes the long way, which says why or copies.

The last weights of a call, those of `down`, remember it twice, as in plan_cache.py: by its words alone (function,
dtype, which arrays are given, the other weights), and by the shapes and types of all arrays as well. Where arrays lie
where those of an earlier call lay, its launches are bound to their pointers, and nothing is written: two are entered
one by one, more as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from qgemm.arguments import output_dtype

from .driver.graph import graph_of
from .driver.workspace import workspace
from .expert_arrays import ALIGNMENT, Call, Given
from .libraries import LIBRARIES, Library

MAX_PLANS = 256  # entries that weights remember
MAX_ROOMS = 2  # of a call that is remembered; more hold memory that the long way would have freed
KEPT_BYTES = 1 << 20  # of rooms that lie in a workspace of the stream; larger ones are made for each call
ROOM_ALIGNMENT = 256
MAX_BOUND = 16  # calls whose launches are bound to their addresses, of each plan; a graph takes 0.1 MB of the GPU
GRAPHED = 3  # launches of a call that are a graph; of two it would cost the GPU 2.6 us, and spare the host 4
FIXED = 0  # number of what a pointer of weights is relative to; behind it the arrays of a call, y, and its rooms

Words = tuple[Any, ...]
Arrays = tuple[Any, ...]
At = tuple[int, ...]  # stream, and addresses behind it
Arguments = list[tuple[Any, At]]  # launches, each with its stream and pointers
Bound = list[tuple[Callable[[], int], Arguments]]  # what enters some launches at once: the driver's status; these


class Launched(NamedTuple):
    """A launch, and its pointers as (number of what each is relative to, bytes from there)."""

    launch: Any
    pointers: tuple[tuple[int, int], ...]


class Planned:
    """A call that was made. run: arrays -> y; None if they lie where kernels cannot take them.

    written: whether the last array is y. like: see Library; of arrays that are read in place.
    """

    __slots__ = "device", "like", "run", "written"

    def __init__(self, run: Callable[..., Any], written: bool, device: int) -> None:
        self.run, self.written, self.device = run, written, device
        self.like: Callable[..., bool] = lambda *arrays: False


def again(w: Any, x: Any, ids: Any, bias: Any, out: Any, dtype: Any) -> Any:
    """y of `qgemm.moe_matmul`, computed as before; None if there is no plan for these arguments."""
    return _again(w.plans, *of_product(x, ids, bias, out, dtype))


def again_layer(
    down: Any, x: Any, gate_up: Any, ids: Any, weights: Any, function: str, biases: Any, out: Any, dtype: Any
) -> Any:
    """y of `qgemm.moe`, computed as before; None if there is no plan for these arguments."""
    try:
        words, arrays = of_layer(x, gate_up, ids, weights, function, biases, out, dtype)
    except (AttributeError, TypeError):  # no experts of a device
        return None
    return _again(down.plans, words, arrays)


def of_product(x: Any, ids: Any, bias: Any, out: Any, dtype: Any) -> tuple[Words, Arrays]:
    """The words and arrays of a product."""
    arrays = (x, ids) if bias is None else (x, ids, bias)
    return ("", dtype, out is None, bias is None), arrays if out is None else (*arrays, out)


def of_layer(
    x: Any, gate_up: Any, ids: Any, weights: Any, function: str, biases: Any, out: Any, dtype: Any
) -> tuple[Words, Arrays]:
    """The words and arrays of a layer."""
    if type(gate_up) in (tuple, list):
        words: Words = (function, dtype, out is None, *[w.serial for w in gate_up])
    else:
        words = function, dtype, out is None, gate_up.serial
    arrays: Arrays = (x, ids, weights)
    if biases is not None:
        words = *words, *[bias is None for bias in biases]
        arrays = *arrays, *[bias for bias in biases if bias is not None]
    return words, arrays if out is None else (*arrays, out)


def _again(plans: dict[Any, Planned], words: Words, arrays: Arrays) -> Any:
    planned = plans.get(words)
    if planned is not None and planned.like(*arrays):
        return planned.run(*arrays)
    library = LIBRARIES.get(type(arrays[0]))
    key = None if library is None else _key(words, arrays, library)
    planned = plans.get(key)
    if library is None or planned is None or not all(map(library.contiguous, arrays)):
        return None
    if any(library.device(array) != planned.device for array in arrays):
        return None
    if planned.written and library.grad and arrays[-1].requires_grad:
        return None  # an error
    planned.like = library.like(arrays)
    plans[words] = planned
    return planned.run(*arrays)


def _key(words: Words, arrays: Arrays, library: Library) -> Any:
    """What a plan depends on besides its weights; None if an array is of another library."""
    key = [words]
    for array in arrays:
        if LIBRARIES.get(type(array)) is not library:
            return None
        key += (array.shape, array.dtype)
    return tuple(key)


# ---------------------------------------------------------------- planning


def remember(call: Call, w: Any, words: Words, arrays: Arrays, y: Given, out: Any, dtype: Any) -> None:
    """Keep the launches of a call with weights, where kernels had its very arrays and wrote its very y."""
    library, own = call.library, {id(given.array): given for given in call.reads}
    reads = arrays if out is None else arrays[:-1]
    given = [own.get(id(array)) for array in reads]
    key = _key(words, arrays, library)
    if key is None or not all(given) or not call.launched or len(call.rooms) > MAX_ROOMS:
        return
    if output_dtype(dtype).name != y.name if out is None else y.array is not out:
        return
    spans = [(0, 0), *((one.pointer, one.end) for one in given if one is not None), (y.pointer, y.end)]
    spans += [(room.pointer, room.pointer + room.nbytes) for room in call.rooms]
    filled = sorted(span for span in spans if span[0] < span[1])
    if any(first[1] > second[0] for first, second in pairwise(filled)):
        return  # of an array that is given twice a pointer could belong to either
    launches = [Launched(one, tuple(_relative(pointer, spans) for pointer in at)) for one, at in call.launched]
    new = None if out is not None else library.new(tuple(y.array.shape), library.dtype(y.name), call.device)
    nbytes = [end - start for start, end in spans[1 : len(reads) + 2]]
    if len(w.plans) >= MAX_PLANS:
        w.plans.clear()
    w.plans[key] = Planned(_running(call, launches, new, nbytes), out is not None, call.device)


def _relative(pointer: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """A pointer as bytes from the start of the span that holds it; of none it is an address for ever."""
    for number, (start, end) in enumerate(spans):
        if start <= pointer < end:
            return number, pointer - start
    return FIXED, pointer


def _running(call: Call, launches: Sequence[Launched], new: Any, nbytes: Sequence[int]) -> Callable[..., Any]:
    """Planned.run. new: makes y, None where it is given. nbytes: of the arrays that are read, and of y."""
    library, device = call.library, call.device
    pointer, stream, here = library.pointer, library.stream, library.current_device
    rooms = Rooms([room.nbytes for room in call.rooms], [room.make for room in call.rooms])
    seen: dict[At, Bound | None] = {}  # by stream and addresses: mostly those of the calls before

    def run(*arrays: Any) -> Any:
        if here is not None and here() != device:
            return None
        number, y = stream(device), arrays[-1] if new is None else new()
        at = (number, *map(pointer, arrays)) if new is None else (number, *map(pointer, arrays), pointer(y))
        if rooms.kept:
            room = rooms.of_stream.get(number) or rooms.enter(device, number)
            at, memory = at + room.pointers, None
            with room.lock:
                return y if _launched(at, seen, launches, nbytes, new is None) else None
        memory = [make() for make in rooms.makes]  # freed behind these launches, in the order of the stream
        at += tuple(map(pointer, memory))
        return y if _launched(at, seen, launches, nbytes, new is None) else None

    return run


class KeptRooms(NamedTuple):
    """Rooms of a stream's workspace, and the lock that a call has while it launches."""

    pointers: tuple[int, ...]
    lock: Any


class Rooms:
    """Memory of a call behind its arrays: in a workspace of the stream if it is little, else made for each call."""

    def __init__(self, sizes: Sequence[int], makes: Sequence[Callable[[], Any]]) -> None:
        ends = [*accumulate(-(-size // ROOM_ALIGNMENT) * ROOM_ALIGNMENT for size in sizes)]
        self.starts, self.makes = [0, *ends][: len(sizes)], makes
        self.nbytes = 1 << (max([*ends, 1]) - 1).bit_length()  # one of few: workspaces are kept
        self.kept, self.of_stream = self.nbytes <= KEPT_BYTES, dict[int, KeptRooms]()

    def enter(self, device: int, stream: int) -> KeptRooms:
        """Those of a stream, from now on."""
        memory = workspace(device, stream, "experts", self.nbytes)
        found = KeptRooms(tuple(memory.pointer + start for start in self.starts), memory.lock)
        return self.of_stream.setdefault(stream, found)


def _launched(
    at: At, seen: dict[At, Bound | None], launches: Sequence[Launched],
    nbytes: Sequence[int], written: bool,
) -> bool:  # fmt: skip
    """Launch all; False if arrays lie where kernels cannot take them. at: stream, and addresses behind it."""
    try:
        bound = seen[at]
    except KeyError:
        if not _can_be_read(at[1:], nbytes, written):
            return False
        if len(seen) >= MAX_BOUND:
            seen.clear()
        seen[at] = None
        for launch, args in _arguments(at, launches):
            launch(*args)
        return True
    if bound is None:
        bound = seen[at] = _bound(_arguments(at, launches))
    for enter, launched in bound:
        if enter():
            for launch, args in launched:
                launch(*args)  # by what knows the driver's errors, or for a stream that is being captured
    return True


def _bound(launches: Arguments) -> Bound:
    """What enters launches that are bound to their arguments."""
    if len(launches) >= GRAPHED:
        return [(graph_of(launches), launches)]
    return [(launch.bound(*args), [(launch, args)]) for launch, args in launches]


def _arguments(at: At, launches: Sequence[Launched]) -> Arguments:
    """Launches with their stream and pointers."""
    values = (0, *at[1:])
    return [(one, (at[0], *[values[base] + offset for base, offset in pointers])) for one, pointers in launches]


def _can_be_read(at: Sequence[int], nbytes: Sequence[int], written: bool) -> bool:
    """Whether the arrays of a call are aligned, and y, if it is given, shares no memory with them."""
    reads = at[: len(nbytes) - 1]
    if any(address % ALIGNMENT for address in reads):
        return False
    y, end = at[len(reads)], at[len(reads)] + nbytes[-1]
    apart = (end <= address or address + size <= y for address, size in zip(reads, nbytes[:-1], strict=True))
    return not written or all(apart)
