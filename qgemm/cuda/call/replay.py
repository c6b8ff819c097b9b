"""Replay: the fast path of every call, by the launches of an earlier one of the same weights, shapes and types.

Weights remember calls (`plans`), each twice. The first key is the scalar arguments alone (activation, dtype, which
arrays are given, the other weights): the last call with these is checked by one guard call of the arrays' library. The
second key adds the shapes and types of all arrays; an array that kernels cannot read in place is copied. A call that
matches neither takes the slow path (products.py, experts.py), whose launches are remembered for the next.

All arrays of a call are one tuple: x, the outputs that the caller gives, then the other arrays in a fixed order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, combinations
from operator import attrgetter, is_
from types import CodeType
from typing import Any

from qgemm.arguments import Array, Epilogue, Gated, one_product, several_products
from qgemm.codec.float_types import DType
from qgemm.cuda.activations import DeviceActivations
from qgemm.cuda.driver.graph import graph_of
from qgemm.cuda.driver.workspace import workspace
from qgemm.cuda.libraries import LIBRARIES, Library
from qgemm.cuda.tensor import DeviceTensor
from qgemm.log import logger

from .arrays import ABSOLUTE, Call, Pointer, X, Y
from .plan import MAX_SCRATCH, SCRATCH, SCRATCH_BYTES, capacity
from .products import multiply

MAX_PLANS = 256  # entries that weights remember
MAX_BOUND = 16  # calls whose launches are bound to addresses, of a plan; a graph costs 0.1 MB of the GPU
GRAPHED = 3  # least launches that become a graph; a graph of two costs the GPU 2.6 us, and saves the host 4
ALIGNED = 256  # bytes between pieces of scratch memory

_serial, _is_absent = attrgetter("serial"), partial(is_, None)

Scalars = tuple[Any, ...]  # the scalar arguments of a call
CallArrays = tuple[Any, ...]
Addresses = tuple[int, ...]  # the stream of a call, then its bases from x on
Entry = tuple[Callable[[], int], Callable[[], None]]  # enters bound launches -> the driver's status; launches anew
Plans = dict[Any, "Replay"]  # the remembered calls of weights, by both keys


class Replay:
    """A remembered call. run: arrays -> y, or a list of them; None where kernels cannot use the arrays.

    outs: the number of outputs among the arrays. copies: whether run gets copies where kernels cannot read an array.
    like: Library.like of arrays that are read in place.
    """

    __slots__ = "copies", "device", "like", "outs", "run"

    def __init__(self, run: Callable[..., Any], outs: int, copies: bool, device: int) -> None:
        self.run, self.outs, self.copies, self.device = run, outs, copies, device
        self.like: Callable[..., bool] = lambda *arrays: False


def product(
    w: DeviceTensor, x: Array | DeviceActivations, activation: str | None, bias: Array | None, residual: Array | None,
    out: Array | None, dtype: DType | None, gated: Gated | None = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul`, or of `qgemm.gated` where w is a gate, by a replay or by the slow path."""
    plans: Plans = w.plans
    if bias is None and residual is None and gated is None:  # the most frequent call needs no tuple of arrays
        replay = plans.get((activation or "a16", dtype, out is None))
        if replay is not None:
            if out is None:
                y = replay.run(x) if replay.like(x) else None
            else:
                y = replay.run(x, out) if replay.like(x, out) else None
            if y is not None:
                return y
    outs = None if out is None else (out,)
    if gated is None:
        key = call_key(x, activation, outs, dtype, (), () if bias is None and residual is None else (bias, residual))
    else:
        gate = gated.function, getattr(gated.up, "serial", None)
        key = call_key(x, activation, outs, dtype, gate, (bias, gated.bias))
    y = replayed(plans, *key)
    if y is not None:
        return y
    return remember(plans, multiply(x, one_product(w, bias, residual, out, gated), activation, dtype), *key)


def products(
    x: Array | DeviceActivations, weights: Sequence[Any], activation: str | None, epilogues: Sequence[Epilogue] | None,
    outs: Sequence[Any] | None, dtype: DType | None,
) -> list[Any] | None:  # fmt: skip
    """The list of `qgemm.matmul_many`, by a replay or by the slow path.

    epilogues: None if nothing is added to any product. None unless all weights are DeviceTensors.
    """
    try:
        plans, serials = weights[0].plans, tuple(map(_serial, weights))
    except AttributeError:  # not all are DeviceTensors
        return None
    added = () if epilogues is None else tuple([array for epilogue in epilogues for array in epilogue])
    key = call_key(x, activation, outs, dtype, serials, added)
    ys: list[Any] | None = replayed(plans, *key)
    if ys is None:
        call = multiply(x, several_products(weights, epilogues, outs), activation, dtype)
        ys = remember(plans, call, *key, single=False)
    return ys


def call_key(
    x: Array | DeviceActivations, kind: str | None, outs: Sequence[Any] | None, dtype: DType | None, scalars: Scalars,
    added: CallArrays,
) -> tuple[Scalars, CallArrays]:  # fmt: skip
    """The scalar arguments and the arrays of a call; kind: of activations, or the function of a layer of experts.

    scalars: further ones. added: arrays that are read besides x, None for an absent one.
    """
    first: Any = kind or "a16"
    if type(x) is DeviceActivations:  # only the activation that they are for multiplies them
        first, x = (x.activation if kind in (None, x.activation) else kind, x.shape, x.dtype), x.data
    arrays = (x,) if outs is None else (x, *outs)
    if not added:
        return (first, dtype, outs is None, *scalars), arrays
    absent = tuple(map(_is_absent, added))
    present = tuple([array for array in added if array is not None]) if True in absent else added
    return (first, dtype, outs is None, *scalars, *absent), arrays + present


def replayed(plans: Plans, scalars: Scalars, arrays: CallArrays) -> Any:
    """y of a call like a remembered one; None if there is none."""
    replay = plans.get(scalars)
    if replay is not None and replay.like(*arrays):
        y = replay.run(*arrays)
        if y is not None:
            return y
    library = LIBRARIES.get(type(arrays[0]))
    key = None if library is None else _key(scalars, arrays, library)
    replay = plans.get(key)
    if library is None or replay is None:
        return None
    read, written = arrays, range(1, 1 + replay.outs)
    if not replay.like(*arrays):
        if not replay.copies and not all(map(library.contiguous, arrays)):
            return None
        read = tuple([array if library.contiguous(array) else library.copy(array) for array in arrays])
        for index in written:
            if read[index] is not arrays[index] or (library.grad and arrays[index].requires_grad):
                return None  # the slow path stores by way of another array, or refuses
        if any(library.device(array) != replay.device for array in arrays):
            return None
        if all(map(is_, read, arrays)):
            replay.like = library.like(arrays)
    plans[scalars] = replay
    y = replay.run(*read)
    if y is not None or not replay.copies:
        return y
    return replay.run(*[array if index in written else library.copy(array) for index, array in enumerate(read)])


def _key(scalars: Scalars, arrays: CallArrays, library: Library) -> Any:
    """The second key of a call; None if an array is of another library."""
    key = [scalars]
    for array in arrays:
        if LIBRARIES.get(type(array)) is not library:
            return None
        key += (array.shape, array.dtype)
    return tuple(key)


# ---------------------------------------------------------------- planning


def remember(
    plans: Plans, call: Call, scalars: Scalars, arrays: CallArrays, single: bool = True, copies: bool = True
) -> Any:
    """Keep the launches of a call, and say in the log which kernels they are -> y.

    single: whether y is one array, not a list. copies: see Replay.
    """
    y, key = call.ys[0] if single else call.ys, _key(scalars, arrays, call.library)
    if key is None or not call.replayable or not call.launches or len(call.scratch) > MAX_SCRATCH:
        return y
    if logger.isEnabledFor(logging.INFO):
        for kernel, p in call.kernels:
            logger.info("%s: %s, config %s", p, kernel.name, kernel.choose(p))
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = Replay(_run(call, single), call.outs, copies, call.device)
    return y


def _run(call: Call, single: bool) -> Callable[..., Any]:
    """Replay.run, as Python without loops: for one product into a y that the caller gives

        def run(a1, a2):
            if here() != device: return None
            stream = stream_of(device)
            p1 = pointer(a1)
            p2 = pointer(a2)
            if p1 % 16 or -size2 < p2 - p1 < size1: return None
            launch0(stream, p1, c9, p2, 0, 0)
            return a2

    aN and pN are the array with base N and its address.
    """
    library, count, ys = call.library, len(call.addresses) - len(call.scratch), range(Y, Y + len(call.ys))
    new = ys if call.outs == 0 else range(0)
    values: dict[str, Any] = {
        "pointer": library.pointer, "stream_of": library.stream, "here": library.current_device, "device": call.device,
    }  # fmt: skip
    for base, y in zip(new, call.ys, strict=False):
        values[f"new{base}"] = library.new(tuple(y.shape), y.dtype, call.device)
    values |= {f"launch{i}": launch for i, (launch, _) in enumerate(call.launches)}
    values |= {f"size{base}": nbytes for base, nbytes in enumerate(call.nbytes)}
    body = [*_guard(call), *_launches(call, values)]
    if all(hasattr(launch, "bound") for launch, _ in call.launches):
        body = _binding(call, values, body)
    returned = ", ".join(f"a{base}" for base in ys)
    lines = [
        f"def run({', '.join(f'a{base}' for base in range(X, count) if base not in new)}):",
        *[" if here() != device: return None"] * (library.current_device is not None),
        " stream = stream_of(device)",
        *(f" a{base} = new{base}()" for base in new),
        *(f" p{base} = pointer(a{base})" for base in range(X, count)),
        *(f" {line}" for line in _with_scratch(call, values, body)),
        f" return {returned}" if single else f" return [{returned}]",
    ]
    exec(_code("\n".join(lines)), values)
    run: Callable[..., Any] = values["run"]
    return run


@lru_cache(MAX_PLANS)
def _code(source: str) -> CodeType:
    """Compiled once for all calls of one layout, whose addresses and sizes are names."""
    return compile(source, "<replay>", "exec")


def _guard(call: Call) -> list[str]:
    """A line that returns None unless arrays are aligned and no output of the caller shares memory with another array.

    An output may be its own residual, if both have one type: then they are the same elements.
    """
    arrays = range(X, len(call.addresses) - len(call.scratch))
    outs = range(Y, Y + call.outs)
    pairs = [*combinations(outs, 2), *((y, read) for y in outs for read in arrays if read not in outs)]
    failures = [f"p{base} % {call.alignments[base]}" for base in arrays if call.alignments[base] > 1]
    for y, other in pairs:
        same = f"p{other} != p{y} and " if (y, other) in call.residuals else ""
        failures.append(f"{same}-size{other} < p{other} - p{y} < size{y}")
    return [f"if {' or '.join(failures)}: return None"] * bool(failures)


def _launches(call: Call, values: dict[str, Any]) -> list[str]:
    """Lines that launch everything; their constants become names in `values`."""

    def argument(pointer: Pointer) -> str:
        base, offset = pointer
        if offset:
            values[constant := f"c{len(values)}"] = offset
            return constant if base == ABSOLUTE else f"p{base} + {constant}"
        return f"p{base}" if base != ABSOLUTE else "0"

    return [f"launch{i}(stream, {', '.join(map(argument, pointers))})" for i, (_, pointers) in enumerate(call.launches)]


def _with_scratch(call: Call, values: dict[str, Any], body: list[str]) -> list[str]:
    """The body with addresses of scratch memory: a workspace of the stream if it is small, else new at each call."""
    bases = [len(call.addresses) - len(call.scratch) + i for i in range(len(call.scratch))]
    *starts, nbytes = accumulate((-(-size // ALIGNED) * ALIGNED for size in call.scratch), initial=0)
    if nbytes > SCRATCH_BYTES:  # memory that is freed goes to later launches of the same stream alone
        values |= {
            f"new{base}": call.library.scratch(n, call.device) for base, n in zip(bases, call.scratch, strict=True)
        }
        memory = [f"a{base} = new{base}(); p{base} = pointer(a{base})" for base in bases]
        return [*memory, *body]
    if not bases:
        return body
    spaces: dict[int, tuple[Any, Addresses]] = {}  # by stream: a lock, and the addresses of the pieces
    device = call.device

    def space_of(stream: int) -> tuple[Any, Addresses]:
        space = workspace(device, stream, f"{SCRATCH} 0", capacity(nbytes))
        return spaces.setdefault(stream, (space.lock, tuple(space.pointer + start for start in starts)))

    values |= {"spaces": spaces, "space_of": space_of}
    pointers = "".join(f"p{base}, " for base in bases)
    return [
        f"lock, ({pointers}) = spaces.get(stream) or space_of(stream)",
        "with lock:",
        *(f" {line}" for line in body),
    ]


def _binding(call: Call, values: dict[str, Any], body: list[str]) -> list[str]:
    """The body for addresses that are new; launches that are bound to their addresses for those that come again."""
    launches: Sequence[tuple[Any, Sequence[Pointer]]] = call.launches
    bound = dict[Addresses, Sequence[Entry]]()  # empty for addresses that came once

    def note(addresses: Addresses) -> None:
        if len(bound) >= MAX_BOUND:
            bound.clear()
        bound[addresses] = ()

    def bind(addresses: Addresses) -> Sequence[Entry]:
        stream, *pointers = addresses
        starts = (0, *pointers)
        prepared = [
            (launch, (stream, *[starts[base] + offset for base, offset in relative])) for launch, relative in launches
        ]

        def launch_all() -> None:
            for launch, args in prepared:
                launch(*args)

        if len(prepared) >= GRAPHED:
            bound[addresses] = [(graph_of(prepared), launch_all)]
        else:
            bound[addresses] = [(launch.bound(*args), partial(launch, *args)) for launch, args in prepared]
        return bound[addresses]

    values |= {"bound": bound, "note": note, "bind": bind}
    addresses = ", ".join(["stream", *(f"p{base}" for base in range(X, len(call.addresses)))])
    return [
        f"addresses = ({addresses})",
        "entries = bound.get(addresses)",
        "if entries is None:",
        *(f" {line}" for line in body),
        " note(addresses)",
        "else:",
        " for enter, launch in entries or bind(addresses):",
        "  if enter(): launch()",  # launch() raises the driver's errors, and serves a stream that is captured
    ]
