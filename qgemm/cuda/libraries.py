"""CUDA arrays of CuPy and torch as raw pointers, without DLPack: the functions of their libraries that calls need.

A product calls most of them, so they are the libraries' own C functions where there are any: half a microsecond in all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.float_types import dtype_name, float_dtype

Array = Any


@dataclass(frozen=True, slots=True)  # its attributes are read faster than those of a NamedTuple
class Library:
    """How one library's CUDA arrays are read and made.

    pointer, device, contiguous: of an array: its address, the number of its device, whether it is in C order.
    grad: whether an array may require a gradient, so that no kernel may write into it.
    current_device: the number of the calling thread's device; None where there is one alone.
    stream: device -> the raw handle of its current stream.
    copy: a contiguous copy at an aligned address, on the current stream. cast: to a type by NumPy's name.
    host: an array as NumPy's.
    dtype: NumPy's name of a type -> the library's type. name: the inverse.
    new: shape, type, device -> a call that makes such an array on the current stream; the device is the current one.
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
    like: Callable[[Sequence[Array]], Callable[..., bool]]

    def scratch(self, nbytes: int, device: int) -> Callable[[], Array]:
        """A call that makes an array of bytes."""
        return self.new((nbytes,), self.dtype("uint8"), device)


LIBRARIES: dict[type, Library] = {}  # the class of an array -> its library, from its first use on


def library_of(x: object) -> Library | None:
    """The library of a CUDA array; None of one that only DLPack reads."""
    return library_for(type(x))


def library_for(kind: type) -> Library | None:
    """The library of CUDA arrays of a class."""
    if kind not in LIBRARIES:
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        if cupy is not None and kind is cupy.ndarray:
            return cupy_library()
        elif torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
            LIBRARIES[torch.Tensor] = LIBRARIES[torch.nn.Parameter] = _torch(torch)
    return LIBRARIES.get(kind)


def cupy_library() -> Library:
    """CuPy's, which also reads arrays that only DLPack reads."""
    import cupy

    if cupy.ndarray not in LIBRARIES:
        LIBRARIES[cupy.ndarray] = _cupy(cupy)
    return LIBRARIES[cupy.ndarray]


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
        cast=lambda x, name: x.astype(name),
        host=lambda x: x.get(),
        dtype=lambda name: float_dtype(name) if name == "bfloat16" else np.dtype(name),
        name=dtype_name,
        new=lambda shape, dtype, device: partial(cupy.ndarray, shape, dtype),
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
        host=lambda x: x.detach().cpu().numpy(),
        dtype=partial(getattr, torch),
        name=lambda dtype: str(dtype).removeprefix("torch."),
        new=partial(_new_of_torch, torch, empty),
        like=partial(_like, _like_one_of_torch) if guard is None else partial(_guarded, guard),
    )


def _like(guard: Callable[[Array], Callable[[Array], bool]], arrays: Sequence[Array]) -> Callable[..., bool]:
    """Library.like in Python. guard: an array -> whether another is like it."""
    guards = [guard(array) for array in arrays]
    if len(guards) == 1:
        return guards[0]
    if len(guards) == 2:
        first, second = guards
        return lambda a, b: first(a) and second(b)
    return lambda *others: all([is_like(array) for is_like, array in zip(guards, others)])  # noqa: B905  faster so


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
