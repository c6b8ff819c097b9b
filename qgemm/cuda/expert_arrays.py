"""Arrays of a call of experts as kernels read and write them; one product of a launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

from numpy.typing import DTypeLike

from qgemm.arguments import check_out, output_dtype
from qgemm.arrays import as_cupy, check_no_grad, like, on_cuda
from qgemm.errors import UnsupportedError
from qgemm.placement import described

from .libraries import Library, cupy_library, library_of
from .problem import C_TYPES, ITEMSIZE

ALIGNMENT = 16  # of x, which kernels read 16 bytes at a time
SIZES = {**ITEMSIZE, "int32": 4, "int64": 8, "float64": 8}


class Given(NamedTuple):
    """An array of a call as kernels read it; pointer 0 and name "" for none."""

    array: Any
    pointer: int
    name: str

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.pointer + (prod(self.array.shape) * SIZES[self.name] if self.name else 0)


NOTHING = Given(None, 0, "")


class Room(NamedTuple):
    """Memory of a call, and what makes it."""

    make: Any
    memory: Any
    pointer: int
    nbytes: int


class Call:
    """What arrays of a call are read by: the library of x, on the device of the experts, whose stream it works on.

    launched: the launches so far, each with its pointers. rooms: memory that was made for the call alone, each with
    what makes it and its bytes.
    """

    def __init__(self, x: Any, w: Any) -> None:
        self.source, self.device = x, w.device
        found = library_of(x)
        self.library: Library = found or cupy_library()
        self.x = x if found is not None else as_cupy(x)
        self.reads: list[Given] = []
        self.launched: list[tuple[Any, tuple[int, ...]]] = []
        self.rooms: list[Room] = []
        if self.library.device(self.x) != self.device:
            raise UnsupportedError(f"x is on cuda:{self.library.device(self.x)}, {w!r}")

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device current where another one is."""
        import cupy

        known = self.library.current_device
        return nullcontext() if known is None or known() == self.device else cupy.cuda.Device(self.device)

    def read(self, array: Any, who: str, types: tuple[str, ...] = tuple(C_TYPES)) -> Given:
        """An array, contiguous and of one of some types; float64 becomes float32. None is nothing."""
        if array is None:
            return NOTHING
        library = self.library
        if not on_cuda(array):
            raise UnsupportedError(f"{who} is on the host, the product is on a CUDA device; got {described(array)}")
        if library_of(array) is not library:
            if library is not cupy_library():
                raise UnsupportedError(f"{who} is of another library than x: {described(array)}")
            array = as_cupy(array, who)
        if library.device(array) != self.device:
            raise UnsupportedError(f"{who} is on cuda:{library.device(array)}, the experts on cuda:{self.device}")
        if library.name(array.dtype) not in types:
            array = library.cast(array, "float32")
        if not library.contiguous(array) or library.pointer(array) % ALIGNMENT:
            array = library.copy(array)
        found = Given(array, library.pointer(array), library.name(array.dtype))
        self.reads.append(found)
        return found

    def target(self, shape: tuple[int, ...], out: Any, dtype: DTypeLike | None) -> Given:
        """The memory of y: that of `out` if a kernel can write there, else a new array."""
        name = output_dtype(dtype).name
        if out is not None:
            if not on_cuda(out):
                raise UnsupportedError(f"out must be on the CUDA device of the experts, got {type(out).__name__}")
            check_no_grad(out)
            check_out(out, shape, dtype)
            name = str(out.dtype).removeprefix("torch.")
            if library_of(out) is self.library and self.library.contiguous(out) and name in C_TYPES:
                given = Given(out, self.library.pointer(out), name)
                if all(given.end <= one.pointer or one.end <= given.pointer for one in self.reads):
                    return given
        made_in = name if name in C_TYPES and out is None else "float32"
        made = self.new(shape, made_in)
        return Given(made, self.library.pointer(made), made_in)

    def launch(self, one: Any, *pointers: int) -> None:
        """Launch on the stream of the library."""
        one(self.library.stream(self.device), *pointers)
        self.launched.append((one, pointers))

    def room(self, nbytes: int) -> int:
        """The address of so many bytes that live as long as the call."""
        make = self.library.scratch(nbytes, self.device)
        memory = make()
        self.rooms.append(Room(make, memory, self.library.pointer(memory), nbytes))
        return self.rooms[-1].pointer

    def new(self, shape: tuple[int, ...], name: str) -> Any:
        """A new array."""
        return self.library.new(shape, self.library.dtype(name), self.device)()

    def handed_back(self, y: Given, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as an array of x's library and of a type."""
        if out is not None:
            if out is not y.array:
                (as_cupy(out, "out") if library_of(out) is not self.library else out)[...] = y.array
            return out
        name = output_dtype(dtype).name
        made = y.array if name == y.name else self.library.cast(y.array, name)
        return like(self.source, made)


class Part(NamedTuple):
    """One product of a launch: addresses of expert 0's tiles and of its rows' largest magnitudes, y, bias, and the
    gate's values or nothing.
    """

    tiles: int
    row_absmax: int
    y: Given
    bias: Given
    residual: Given = NOTHING
