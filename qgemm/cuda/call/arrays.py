"""Call: the record of a product while it takes the slow path, for weights and for experts alike; data alone.

Every pointer of a launch is noted relative to an array of the call, so that replay.py can launch again on other arrays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qgemm.cuda.kernels.kernel import Kernel, Launchable
from qgemm.cuda.libraries import Library
from qgemm.cuda.problem import ITEMSIZE, Problem

SIZES = {**ITEMSIZE, "int32": 4, "int64": 8, "float64": 8}  # bytes of an element
ABSOLUTE, X, Y = 0, 1, 2  # bases: address 0, to which pointers to weights are relative; x; the first output


class Pointer(NamedTuple):
    """An address: bytes from the start of its base, which is an array or scratch memory of the call."""

    base: int
    offset: int = 0

    def plus(self, nbytes: int) -> Pointer:
        """The pointer some bytes further."""
        return Pointer(self.base, self.offset + nbytes)


NULL = Pointer(ABSOLUTE)


class Array(NamedTuple):
    """An array as kernels read or write it, of a type by NumPy's name; NOTHING stands for an absent one."""

    values: Any
    pointer: Pointer
    dtype: str

    def element(self, number: int) -> Pointer:
        """The pointer to an element by its number; NULL for NOTHING."""
        return self.pointer.plus(number * SIZES[self.dtype]) if self.dtype else NULL


NOTHING = Array(None, NULL, "")


@dataclass(slots=True)
class Call:
    """A call and its launches.

    source: the array of the caller whose library, device and stream the call works with.
    ys: the outputs as the caller gets them, whose bases follow on that of x. outs: how many of them the caller gave.
    addresses, nbytes, alignments: of every base, in the order 0, x, outputs, arrays that are read, scratch memory.
    residuals: pairs of bases, an output and its own residual, which may be the very same elements.
    launches: each launch with its pointers. kernels: each product with the kernel that serves it, for the log.
    scratch: bytes of each piece of scratch memory.
    memory, locks: held until everything is launched.
    replayable: whether the launches serve every call on arrays of these shapes and types.
    """

    source: Any
    library: Library
    device: int
    stream: int
    addresses: list[int]
    nbytes: list[int]
    alignments: list[int]
    replayable: bool
    ys: list[Any] = field(default_factory=list)
    outs: int = 0
    residuals: set[tuple[int, int]] = field(default_factory=set)
    launches: list[tuple[Launchable, tuple[Pointer, ...]]] = field(default_factory=list)
    kernels: list[tuple[Kernel, Problem]] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    memory: list[Any] = field(default_factory=list)
    locks: list[threading.Lock] = field(default_factory=list)
