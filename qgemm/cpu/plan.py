"""The plan of a product: the arguments of C for calls on arrays like those of an earlier one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.tensor import Tensor

from .native.calls import Guard, Replay, Target
from .native.interleave import Copy
from .native.library import reason
from .native.pool import ready
from .native.products import scratch

HEAD = object.__basicsize__  # bytes of an array object before its first field, which is the address of its numbers


class Library(NamedTuple):
    """How arrays of one class are read.

    facts: all that a plan depends on, so that an array with equal facts can stand for another; None where C reads no
    such array.
    like: arrays -> a call on as many arrays, which tells whether their facts are those.
    pointer: the address of the first number. strides: in bytes. type: its name. copy: to C order.
    float32: to that type and C order. apart: to memory of its own, where NumPy would keep the array's. new: an output
    like another -> a call that makes such an array.
    """

    facts: Callable[[Any], Any]
    like: Callable[[Sequence[Any]], Callable[..., bool]]
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

    record: the arguments, Targets or Experts, with all but the addresses of arrays. function: the one of C for them.
    memory: bytes of scratch memory; m, packed: as Replay has them. used: of each array, in order. files: weights of
    files, whose addresses are filled in at each call as well, and the offset of each in the record. outs: how many
    outputs the caller gives. new: makes each output where it gives none. weights: kept alive, since their ids are in
    the key. copies: those that the record reads of weights that packed themselves. guarded: pairs of an output and
    another array that must not share memory; True: unless one is at the other's address. like: whether arrays have the
    facts of those of the call.
    """

    def __init__(
        self, record: Any, function: str, memory: int, used: Sequence[Argument], outs: int,
        new: Sequence[Callable[[], Any]], weights: Sequence[Tensor], files: Sequence[tuple[Tensor, int]],
        like: Callable[..., bool], guarded: Mapping[tuple[int, int], bool], m: int = 0, packed: int = 0,
        copies: Sequence[Copy] = (),
    ) -> None:  # fmt: skip
        self.like, self.function, self.copies = like, function, copies
        self.memory, self.used, self.new, self.outs = memory, used, new, outs
        self.converts = any(argument.convert for argument in used)
        self.files, self.weights = [w for w, _ in files], weights
        same = len({argument.pointer for argument in used}) == 1 and not files
        self.pointer = used[0].pointer if same else None  # the only one that a call needs
        offsets = [argument.offset for argument in used] + [offset for _, offset in files]
        count = len(offsets)
        masks = [argument.itemsize - 1 for argument in used] + [0] * len(files)
        guards = [
            Guard(y, other, used[y].nbytes, used[other].nbytes, may_be_same)
            for (y, other), may_be_same in guarded.items()
            if used[other].convert is None
        ]
        numbers = ctypes.c_int64 * count
        self.arrays = record, numbers(*masks), numbers(*offsets), (Guard * len(guards))(*guards)
        addresses, size = map(ctypes.addressof, self.arrays), ctypes.sizeof(record)
        self.call = Replay(*addresses, size, size // ctypes.sizeof(Target), m, packed, count, len(guards))
        self.address = ctypes.addressof(self.call)
        self.packed_addresses = Struct(f"{count}N").pack

    def is_stale(self) -> bool:
        """Whether blocks were overwritten of which the record reads a copy."""
        return any([copy.is_stale() for copy in self.copies])

    def one_output(self) -> Callable[..., Any] | None:
        """The call as a function of x and its terms, if y is one new array and nothing but addresses is filled in.

        The function gives None for arrays of another kind, where C cannot work in place, and without compiled code.
        """
        if len(self.new) != 1 or self.converts or self.pointer is None:
            return None
        like, pointer, (new,), address, pack = self.like, self.pointer, self.new, self.address, self.packed_addresses
        memory, replay, is_stale = self.memory, getattr(ready(), self.function), self.is_stale if self.copies else None
        record = self.call, self.arrays  # read by C at the address; the plan itself would keep weights alive

        def output(x: Any, *terms: Any, record: Any = record) -> Any:
            if not like(x, *terms) or reason() or (is_stale is not None and is_stale()):
                return None
            y = new()
            ready()  # with the number of threads that is set now
            more = map(pointer, terms) if terms else ()
            addresses = pack(pointer(x), pointer(y), *more)
            return y if replay(address, addresses, scratch(memory)) else None

        return output

    def outputs(self, arrays: Sequence[Any]) -> Sequence[Any] | None:
        """The outputs of a call on these arrays; None if C cannot multiply them in place, and did nothing."""
        if self.new:
            ys: Sequence[Any] = [new() for new in self.new]
            arrays = [arrays[0], *ys, *arrays[1:]]
        else:
            ys = arrays[1 : 1 + self.outs]
        if self.converts:
            arrays = [a if use.convert is None else use.convert(a) for a, use in zip(arrays, self.used, strict=True)]
        if self.pointer is not None:
            addresses = self.packed_addresses(*map(self.pointer, arrays))
        else:
            pairs = zip(self.used, arrays, strict=True)
            blocks = [w.blocks for w in self.files]  # alive until C returns: some are put together at each access
            addresses = self.packed_addresses(*[use.pointer(array) for use, array in pairs], *map(address_of, blocks))
        return ys if getattr(ready(), self.function)(self.address, addresses, scratch(self.memory)) else None


def address_of(array: NDArray[Any]) -> int:
    """The address of an array of NumPy, as compiled extensions read it: `ctypes.data` costs ten times as much."""
    address: int | None = ctypes.c_void_p.from_address(id(array) + HEAD).value
    return address or 0


if sys.implementation.name != "cpython" or address_of(_probe := np.zeros(1)) != _probe.ctypes.data:

    def address_of(array: NDArray[Any]) -> int:
        """The address of an array of NumPy."""
        return int(array.ctypes.data)
