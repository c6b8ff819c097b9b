"""CUDA arrays of CuPy and torch as raw pointers, without DLPack: the functions of their libraries that calls need.

Arrays of torch need torch alone: all memory of their calls is torch's. Other arrays, and work that no array of the
caller decides, go to CuPy where it is installed, and to torch elsewhere: `default_library`.

A product calls most of them, so they are the libraries' own C functions where there are any: half a microsecond in all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.arguments import all_like
from qgemm.codec.float_types import dtype_name, float_dtype

from . import devices

Array = Any


@dataclass(frozen=True, slots=True)  # its attributes are read faster than those of a NamedTuple
class Library:
    """How one library's CUDA arrays are read and made.

    pointer, device, contiguous: of an array: its address, the number of its device, whether it is in C order.
    grad: whether an array may require a gradient, so that no kernel may write into it.
    current_device: the number of the calling thread's device; None where there is one alone.
    stream: device -> the raw handle of its current stream.
    copy: a contiguous copy at an aligned address, on the current stream. cast: to a type by NumPy's name.
    host: an array as NumPy's, bfloat16 of torch as float32.
    dtype: NumPy's name of a type -> the library's type. name: the inverse.
    new: shape, type, device -> a call that makes such an array on the current stream; the device is the current one.
    wrap: an array of any library, by DLPack -> this library's over the same memory, detached.
    view: the bytes of an array as another type, by NumPy's name. strides: between elements, in bytes.
    array_at: address, shape, type by NumPy's name, device -> an array over memory that the caller owns.
    assign: array, values of any float type or a number -> stores them in the array, which autograd does not see.
    pinned: bytes of the host that a device copies from without a detour.
    device_context: device -> a context whose current device it is. stream_context: raw stream handle, device -> a
        context whose current stream it is.
    like: arrays -> a call on the same number of arrays: whether they agree, one by one, with the first in class, type,
        shape, strides, device and whether they require a gradient.
    """

    pointer: Callable[[Array], int]
    device: Callable[[Array], int]
    contiguous: Callable[[Array], bool]
    grad: bool
    current_device: Callable[[], int] | None
    stream: Callable[[int], int]
    copy: Callable[[Array], Array]
    cast: Callable[[Array, str], Array]
    host: Callable[[Array], NDArray[Any]]
    dtype: Callable[[str], Any]
    name: Callable[[Any], str]
    new: Callable[[tuple[int, ...], Any, int], Callable[[], Array]]
    wrap: Callable[[Array], Array]
    view: Callable[[Array, str], Array]
    strides: Callable[[Array], Sequence[int]]
    array_at: Callable[[int, tuple[int, ...], str, int], Array]
    assign: Callable[[Array, Any], None]
    pinned: Callable[[int], NDArray[np.uint8]]
    device_context: Callable[[int], AbstractContextManager[Any]]
    stream_context: Callable[[int, int], AbstractContextManager[Any]]
    like: Callable[[Sequence[Array]], Callable[..., bool]]

    def scratch(self, nbytes: int, device: int) -> Callable[[], Array]:
        """A call that makes an array of bytes."""
        return self.new((nbytes,), self.dtype("uint8"), device)

    def empty(self, shape: tuple[int, ...], name: str, device: int) -> Array:
        """A new array of a type by NumPy's name."""
        return self.new(shape, self.dtype(name), device)()

    def uploaded(self, values: NDArray[Any], device: int) -> Array:
        """A new array on the current device of values of the host."""
        array, stream = self.empty(values.shape, values.dtype.name, device), self.stream(device)
        values = np.ascontiguousarray(values)
        if values.size:
            devices.copy_to_device(self.pointer(array), values.ctypes.data, values.nbytes, stream)
            devices.synchronize(stream)
        return array

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a device current for the library, and in the driver, which a new thread must be told."""
        with self.device_context(device):
            devices.make_current(device)
            yield


LIBRARIES: dict[type, Library] = {}  # the class of an array -> its library, from its first use on


def library_of(x: object) -> Library | None:
    """The library of a CUDA array; None of one that only DLPack reads."""
    return library_for(type(x))


def library_for(kind: type) -> Library | None:
    """The library of CUDA arrays of a class."""
    if kind not in LIBRARIES:
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        if cupy is not None and kind is cupy.ndarray:
            LIBRARIES[kind] = _cupy(cupy)
        elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
            LIBRARIES[torch.Tensor] = LIBRARIES[torch.nn.Parameter] = _torch(torch)
    return LIBRARIES.get(kind)


def default_library() -> Library:
    """CuPy's, or torch's where CuPy is not installed; both also read arrays that only DLPack reads."""
    try:
        import cupy
    except ImportError:
        import torch

        torch.cuda.init()  # no tensor of the caller has done so
        return library_for(torch.Tensor)  # type: ignore[return-value]
    return library_for(cupy.ndarray)  # type: ignore[return-value]


def library_or_default(x: object) -> Library:
    """The library of a CUDA array, torch's for subclasses of its tensors; the default one for all others."""
    torch = sys.modules.get("torch")
    kind = torch.Tensor if torch is not None and isinstance(x, torch.Tensor) else type(x)
    return library_for(kind) or default_library()


def current_device(library: Library) -> int:
    """The number of the calling thread's device."""
    return 0 if library.current_device is None else library.current_device()


@contextmanager
def on_device_of(x: Any) -> Iterator[tuple[Array, Library, int]]:
    """A CUDA array of any library as one of CuPy or torch, the library and the device, which is current meanwhile."""
    library = library_or_default(x)
    device = int(x.__dlpack_device__()[1])
    with library.on_device(device):
        yield library.wrap(x), library, device


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of a name; ml_dtypes has bfloat16."""
    return float_dtype(name) if name == "bfloat16" else np.dtype(name)


def _cupy(cupy: ModuleType) -> Library:
    current = cupy.cuda.get_current_stream

    def stream(_: int) -> int:
        handle: int = current().ptr
        return handle

    return Library(
        pointer=attrgetter("data.ptr"),
        device=attrgetter("data.device_id"),
        contiguous=attrgetter("flags.c_contiguous"),
        grad=False,
        current_device=cupy.cuda.runtime.getDevice if cupy.cuda.runtime.getDeviceCount() > 1 else None,
        stream=stream,
        copy=lambda x: x.copy(order="C"),
        cast=lambda x, name: x.astype(numpy_dtype(name), copy=False),
        host=lambda x: x.get(),
        dtype=numpy_dtype,
        name=dtype_name,
        new=lambda shape, dtype, device: partial(cupy.ndarray, shape, dtype),
        wrap=lambda x: x if type(x) is cupy.ndarray else cupy.from_dlpack(x.detach() if hasattr(x, "detach") else x),
        view=lambda x, name: x.view(numpy_dtype(name)),
        strides=attrgetter("strides"),
        array_at=partial(_array_at_of_cupy, cupy),
        assign=_assign,
        pinned=lambda size: np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size),
        device_context=cupy.cuda.Device,
        stream_context=partial(_stream_of_cupy, cupy),
        like=partial(_like, _like_one_of_cupy),
    )


def _torch(torch: ModuleType) -> Library:
    private = torch._C  # the public functions check for CUDA at every call, which costs more than a launch
    raw_stream = getattr(private, "_cuda_getCurrentRawStream", None)
    current = getattr(private, "_cuda_getDevice", torch.cuda.current_device)
    compiler = getattr(getattr(private, "_dynamo", None), "guards", None)  # torch's own compiled code calls these
    empty, guard = (getattr(compiler, name, None) for name in ("_empty_strided_cuda", "TensorGuards"))
    return Library(
        pointer=torch.Tensor.data_ptr,
        device=torch.Tensor.get_device,
        contiguous=torch.Tensor.is_contiguous,
        grad=True,
        current_device=current if torch.cuda.device_count() > 1 else None,
        stream=raw_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream),
        copy=lambda x: x.detach().clone(memory_format=torch.contiguous_format),
        cast=lambda x, name: x.detach().to(getattr(torch, name)),
        host=lambda x: (x.float() if x.dtype is torch.bfloat16 else x).detach().cpu().numpy(),
        dtype=partial(getattr, torch),
        name=lambda dtype: str(dtype).removeprefix("torch."),
        new=partial(_new_of_torch, torch, empty),
        wrap=lambda x: x.detach().as_subclass(torch.Tensor) if isinstance(x, torch.Tensor) else torch.from_dlpack(x),
        view=lambda x, name: x.view(getattr(torch, name)),
        strides=lambda x: [stride * x.itemsize for stride in x.stride()],
        array_at=partial(_array_at_of_torch, torch),
        assign=torch.inference_mode()(_assign),  # only this mode may write into its own tensors
        pinned=lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy(),
        device_context=torch.cuda.device,
        stream_context=partial(_stream_of_torch, torch),
        like=partial(_like, _like_one_of_torch) if guard is None else partial(_guarded, guard),
    )


def _assign(array: Array, values: Any) -> None:
    array[...] = values


def _array_at_of_cupy(cupy: ModuleType, pointer: int, shape: tuple[int, ...], name: str, device: int) -> Array:
    dtype = numpy_dtype(name)
    memory = cupy.cuda.UnownedMemory(pointer, prod(shape) * dtype.itemsize, None, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _array_at_of_torch(torch: ModuleType, pointer: int, shape: tuple[int, ...], name: str, device: int) -> Array:
    """By the CUDA array interface, of bytes: it has no bfloat16."""
    dtype = getattr(torch, name)
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))
    return torch.as_tensor(_Memory(pointer, nbytes), device=torch.device("cuda", device)).view(dtype).view(shape)


class _Memory:
    """Bytes at an address of a device, by the CUDA array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def _stream_of_cupy(cupy: ModuleType, stream: int, device: int) -> AbstractContextManager[Any]:
    if cupy.cuda.get_current_stream().ptr == stream:
        return nullcontext()
    external: AbstractContextManager[Any] = cupy.cuda.Stream.from_external(_RawStream(stream))
    return external


class _RawStream:
    """A raw stream handle with the CUDA stream protocol, which older torch streams lack."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _stream_of_torch(torch: ModuleType, stream: int, device: int) -> AbstractContextManager[Any]:
    if torch.cuda.current_stream(device).cuda_stream == stream:
        return nullcontext()
    external: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
    return external


def _like(guard: Callable[[Array], Callable[[Array], bool]], arrays: Sequence[Array]) -> Callable[..., bool]:
    """Library.like in Python. guard: an array -> whether another is like it."""
    return all_like([guard(array) for array in arrays])


def _like_one_of_cupy(array: Array) -> Callable[[Array], bool]:
    kind, dtype, shape, device = type(array), array.dtype, array.shape, array.data.device_id

    # CuPy's flags are a new object at every access
    in_order = attrgetter("_c_contiguous" if hasattr(kind, "_c_contiguous") else "flags.c_contiguous")
    return lambda x: (
        type(x) is kind and x.dtype is dtype and x.shape == shape and in_order(x) and x.data.device_id == device
    )


def _like_one_of_torch(array: Array) -> Callable[[Array], bool]:
    def facts(x: Array) -> Any:
        return x.dtype, x.shape, x.stride(), x.device, x.requires_grad

    kind, expected = type(array), facts(array)
    return lambda x: type(x) is kind and facts(x) == expected


def _guarded(guard: Callable[..., Any], arrays: Sequence[Array]) -> Callable[..., bool]:
    """Library.like by the guards of torch.compile: one call of C for all arrays, 0.2 us instead of 0.9 in Python."""
    sizes, strides = [list(array.shape) for array in arrays], [list(array.stride()) for array in arrays]
    check: Callable[..., bool] = guard(*arrays, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _new_of_torch(
    torch: ModuleType, empty: Callable[..., Array] | None, shape: tuple[int, ...], dtype: Any, device: int
) -> Callable[[], Array]:
    """By empty_strided: half the time of torch.empty, and a third of that without torch's dispatcher."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if empty is not None:
        return partial(empty, shape, strides, dtype)
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=torch.device("cuda", device))
