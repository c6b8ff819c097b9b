"""Packed weights as a tensor of bytes, uint8, and the Tensor or DeviceTensor over the same memory that multiplies.

The number of axes tells the layout of the bytes:

    [N, bytes per row]    the file's: blocks of a row side by side; any device, and every state dict
    [bytes]               tiles of a GPU as `Tensor.to_device` makes them, followed by the bounds of their rows

Experts [E, N, K] are [E, N, bytes per row], or tiles and bounds of one expert after the other.

The Tensor or DeviceTensor is derived from the bytes on first use, and cached while their tensor exists and is
unchanged. So it follows the bytes wherever torch moves them, is shared by layers that share a parameter, and needs no
second copy of a weight.

On a GPU the parameter's storage is the tiles, in memory of torch's allocator. Bytes of the host are packed on their way
there, and tiles are unpacked on their way back, so the GPU never has both layouts of a weight. Bytes that other code
copied to a GPU are packed there at the first product, one weight after the other.

A layer knows the format and shape of its weight, so bytes in the file's layout need no class of their own. A parameter
that holds tiles becomes a PackedParameter, whose class has both: code that moves parameters without their layer, as
accelerate's offload does, gets the file's bytes back.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray

from qgemm import cuda
from qgemm.codec.format import Blocks, Format
from qgemm.cuda import upload
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.libraries import library_or_default, on_device_of
from qgemm.cuda.tensor import DeviceExperts, DeviceTensor, over_memory
from qgemm.errors import UnsupportedError
from qgemm.files.mapping import is_writable
from qgemm.formats import FORMATS, format_named
from qgemm.locks import new_lock
from qgemm.packed import Packed
from qgemm.placement import described
from qgemm.tensor import Tensor

from .parameter import PackedWeight

ALLOCATION_UNIT = 512  # bytes; torch's allocator gives multiples

_lock = new_lock()


class Derived(NamedTuple):
    """The Tensor or DeviceTensor over a tensor of bytes, that tensor, and a key that changes with its bytes."""

    packed: Packed
    weight: ReferenceType[Any]
    key: tuple[Any, ...]


_derived: dict[int, Derived] = {}  # id of the tensor of bytes -> derived


# ---------------------------------------------------------------- formats as text


def spelled(fmt: Format) -> str:
    """A format as text: its name and, unless it is the format's default, its codebook in hexadecimal."""
    if fmt.codebook is None or FORMATS.get(fmt.name) == fmt:
        return fmt.name
    return f"{fmt.name}:{fmt.codebook.astype('<f4').tobytes().hex()}"


@lru_cache(1024)
def format_of(spelling: str) -> Format:
    """The inverse of `spelled`; UnsupportedError if there is no such format."""
    name, _, codebook = spelling.partition(":")
    fmt = format_named(name)
    if not codebook:
        return fmt
    if fmt.variant is None:
        raise UnsupportedError(f"{fmt} has no codebook to replace, got {spelling!r}")
    return fmt.variant(np.frombuffer(bytes.fromhex(codebook), "<f4"), None)


Shape = tuple[int, ...]  # [N, K] of a matrix, [E, N, K] of experts


def file_shape(fmt: Format, shape: Shape) -> Shape:
    """[N, bytes per row] of a matrix [N, K]; ShapeError if K is not a multiple of the block."""
    return *shape[:-1], fmt.blocks_in(shape[-1]) * fmt.block_bytes


# ---------------------------------------------------------------- bytes -> Tensor or DeviceTensor


def packed_of(weight: torch.Tensor, spelling: str, shape: Shape, name: str = "") -> Any:
    """The Tensor or DeviceTensor over a weight's bytes, which are first converted to their device's layout."""
    cached = _derived.get(id(weight))
    if cached is not None:
        packed, reference, key = cached
        if key == _key(weight, spelling) and reference() is weight:
            return packed
    with _lock, torch.inference_mode(False), torch.no_grad():
        fmt, on_gpu = format_of(spelling), weight.device.type == "cuda"
        check_bytes(weight, fmt, shape, name)
        if on_gpu and weight.dim() > 1:
            weight.data = packed_there(weight.detach(), fmt, shape)
        elif not on_gpu and weight.dim() == 1:
            weight.data = file_bytes(_host_tensor(weight, fmt, shape, name))
        data = weight.detach().as_subclass(torch.Tensor)
        packed = (over_memory if on_gpu else _host_tensor)(data, fmt, shape, name)
        if isinstance(packed, Tensor):
            packed.packs = cached is None  # a weight whose bytes moved or changed after a product may do so each time
        keep(weight, packed, spelling)
    return packed


def keep(weight: torch.Tensor, packed: Packed, spelling: str) -> None:
    """Cache a Tensor or DeviceTensor as the one over the weight's bytes."""
    number = id(weight)
    reference = ref(weight, lambda _: _derived.pop(number, None))
    _derived[number] = Derived(packed, reference, _key(weight, spelling))
    if weight.dim() == 1 and type(weight) in (torch.nn.Parameter, PackedWeight):
        weight.__class__ = parameter_class(PackedParameter, spelling, packed.shape)


def release_moved(weight: torch.Tensor, spelling: str) -> None:
    """Free the memory that the cache holds for a weight whose bytes were moved away from it."""
    cached = _derived.get(id(weight))
    if cached is not None and cached.key != _key(weight, spelling):
        _derived.pop(id(weight), None)


def _key(weight: torch.Tensor, spelling: str) -> tuple[Any, ...]:
    """A key that changes with the bytes: their address, and torch's count of writes."""
    try:
        return weight.data_ptr(), weight._version, spelling
    except RuntimeError:  # inference tensors have no count of writes
        return weight.data_ptr(), 0, spelling


def host_tensor(weight: torch.Tensor, spelling: str, shape: Shape, name: str = "") -> Tensor:
    """The Tensor of a weight's bytes on any device; over their memory if they are on the host."""
    packed = packed_of(weight, spelling, shape, name)
    if isinstance(packed, Tensor):
        return packed
    return packed.to_host()  # type: ignore[no-any-return]


def _host_tensor(weight: torch.Tensor, fmt: Format, shape: Shape, name: str) -> Tensor:
    """The Tensor of bytes in the file's layout, or of tiles that were copied to the host."""
    host = weight.detach().cpu().contiguous()
    raw = np.asarray(_Memory(host, host.data_ptr(), tuple(host.shape)))
    return Tensor(fmt, shape, _blocks(raw, fmt, shape), name)


def _blocks(raw: NDArray[np.uint8], fmt: Format, shape: Shape) -> Blocks:
    """Bytes on the host, in either layout -> blocks [N, K / weights], read-only."""
    blocks = np.empty((*shape[:-1], fmt.blocks_in(shape[-1])), fmt.dtype)
    if raw.size and (raw.ndim > 1 or fmt.plain):
        blocks = raw.reshape(-1).view(fmt.dtype).reshape(blocks.shape)
    elif raw.size and len(shape) > 2:
        for expert, expert_bytes in zip(blocks, raw.reshape(shape[0], -1), strict=True):
            expert[...] = _blocks(expert_bytes, fmt, shape[1:])
    elif raw.size:
        n, k = shape
        size = tiles.tiles_shape(fmt, n, k)
        blocks = tiles.unpack(fmt, raw[: prod(size)].view(tiles.tile_dtype(fmt)).reshape(size[:2]), n, k)
    blocks.flags.writeable = False
    return blocks


def check_bytes(weight: torch.Tensor, fmt: Format, shape: Shape, name: str = "") -> None:
    """UnsupportedError unless these are the bytes of a matrix of this format, on a CPU or GPU."""
    label = f"the packed weight{name and ' of ' + name} ({fmt}, {' x '.join(map(str, shape))})"
    expected = file_shape(fmt, shape)
    fitting = [expected, (device_size(fmt, shape),)]
    if weight.dtype != torch.uint8 or tuple(weight.shape) not in fitting:
        raise UnsupportedError(
            f"{label} is uint8 {list(expected)}, bytes as in a file; got {weight.dtype} {list(weight.shape)}"
        )
    if hasattr(weight, "full_tensor"):
        raise UnsupportedError(f"{label} is sharded over ranks: only a forward under FSDP has all of it")
    if weight.device.type not in ("cpu", "cuda"):
        advice = (
            "load a state dict with assign=True" if weight.device.type == "meta" else "move the model to cpu or cuda"
        )
        raise UnsupportedError(f"{label} is on the device {weight.device}: {advice}")


# ---------------------------------------------------------------- parameters that know their format


class PackedParameter(PackedWeight):
    """Bytes of a packed weight in either layout; `parameter_class` makes a subclass for each format and shape.

    Libraries that offload or copy weights replace a parameter p by `type(p)(p.to(device), requires_grad=...)`, and
    require the shape to stay. Since format and shape belong to the class, the new parameter has them too, and tiles
    that leave a GPU become the file's bytes again, on the device "meta" as well.
    """

    spelling: ClassVar[str]
    packed_shape: ClassVar[Shape]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> PackedParameter:
        """A parameter over the memory of `data`; like every packed weight it takes no gradient."""
        return torch.Tensor._make_subclass(cls, data, False)  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:
        """The bytes; assigning others, as diffusers' offload of groups does, frees the memory of the old ones."""
        data: torch.Tensor = torch.Tensor.data.__get__(self)
        return data

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, data)
        release_moved(self, self.spelling)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor.to`, except that bytes become tiles on their way to a GPU, and the file's on their way back."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or device.type == self.device.type or self.is_meta:
            return super().to(*args, **kwargs)
        fmt = format_of(self.spelling)
        if device.type == "cuda" and self.dim() > 1 and device_size(fmt, self.packed_shape) >= 0:
            return type(self)(to_device(host_tensor(self, self.spelling, self.packed_shape), device))
        if device.type == "cuda" or self.dim() > 1:
            return super().to(*args, **kwargs)
        if device.type == "meta":
            return torch.empty(file_shape(fmt, self.packed_shape), dtype=torch.uint8, device=device)
        return file_bytes(host_tensor(self, self.spelling, self.packed_shape)).to(device)

    def __getitem__(self, index: Any) -> Any:
        """Rows in the file's layout, whatever layout the bytes have: unpacked into new bytes where they are tiles."""
        if self.dim() > 1 or not self.is_cuda or len(self.packed_shape) != 2 or type(index) is not slice:
            return super().__getitem__(index)
        start, stop, step = index.indices(self.packed_shape[0])
        if step < 1:
            return super().__getitem__(index)
        packed = packed_of(self, self.spelling, self.packed_shape)
        return library_or_default(self).wrap(packed.file_rows(start, max(start, stop)))[::step]

    def cpu(self, *_: Any, **__: Any) -> Any:
        """`to("cpu")`."""
        return self.to("cpu")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.data,)


@cache
def parameter_class(base: Any, spelling: str, shape: Shape) -> type[Any]:
    """The subclass of PackedParameter, or of a class derived from it, for weights of one format and shape.

    Its qualified name is e.g. "PackedParameter[q4_k,4096,14336]". The module of the base finds it by `class_named`, so
    that libraries that store classes by name, as pickle and dill do, find it in another process too. diffusers looks
    for the name of the base.
    """
    name = f"{base.__name__}[{','.join((spelling, *map(str, shape)))}]"
    names = {"__module__": base.__module__, "__qualname__": name}
    return type(base.__name__, (base,), {**names, "spelling": spelling, "packed_shape": shape})


def class_named(base: Any, name: str) -> type[Any]:
    """The class of parameter_class with this base and qualified name; AttributeError for other names."""
    if not (parts := re.fullmatch(rf"{base.__name__}\[([\w:]+),([\d,]+)\]", name)):
        raise AttributeError(f"module {base.__module__!r} has no attribute {name!r}")
    return parameter_class(base, parts[1], tuple(map(int, parts[2].split(","))))


def __getattr__(name: str) -> type[Any]:
    return class_named(PackedParameter, name)


# ---------------------------------------------------------------- tiles of a GPU


def device_size(fmt: Format, shape: Shape) -> int:
    """Bytes of a weight's tiles and the bounds after them, or of plain numbers; -1 for formats without tiles."""
    if not (fmt.plain or fmt.tiled):
        return -1
    return prod(shape[:-2]) * upload.tiles_nbytes(fmt, *shape[-2:])


def element_size(fmt: Format, shape: Shape) -> float:
    """Bytes that a GPU allocates for a weight, divided by its number of bytes in the file."""
    allocated = -(-max(device_size(fmt, shape), 0) // ALLOCATION_UNIT) * ALLOCATION_UNIT
    return max(1.0, allocated / max(1, prod(file_shape(fmt, shape))))


def device_bytes(packed: DeviceTensor | DeviceExperts) -> torch.Tensor:
    """The memory of a DeviceTensor or DeviceExperts, tiles followed by bounds, as a tensor of bytes [bytes]."""
    data = packed.data
    if isinstance(packed, DeviceExperts):
        return torch.from_dlpack(data.reshape(-1))
    bounds_nbytes = 0 if packed.row_absmax is None else int(packed.row_absmax.nbytes)
    if isinstance(data, torch.Tensor):
        raw = data.detach().view(torch.uint8)
        return raw.as_strided((raw.numel() + bounds_nbytes,), (1,))
    return torch.from_dlpack(type(data)((data.nbytes + bounds_nbytes,), np.uint8, memptr=data.data))


def to_device(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """A Tensor of the host as new bytes [bytes] on a GPU, tiles and bounds, packed by way of staging buffers."""
    cuda.BACKEND.check_upload(tensor.format, tensor.shape, repr(tensor))
    memory = device_memory(device_size(tensor.format, tensor.shape), device)
    if memory.numel():
        blocks = tensor.blocks  # may be put together from parts, on the host
        with on_device_of(memory) as (_, library, index):
            upload.upload_into(tensor.format, blocks, memory, library, index)
    return memory


def packed_there(raw: torch.Tensor, fmt: Format, shape: Shape) -> torch.Tensor:
    """Bytes in the file's layout on a GPU -> tiles and bounds, as new bytes beside them."""
    if fmt.plain:
        return raw.contiguous().reshape(-1)
    cuda.BACKEND.check_upload(fmt, shape, f"bytes of {fmt}")
    memory, raw = device_memory(device_size(fmt, shape), raw.device), raw.contiguous()
    if memory.numel():
        with on_device_of(raw) as (_, library, index):
            upload.pack_into(fmt, raw, shape, memory, library, index)
    return memory


def device_memory(size: int, device: torch.device) -> torch.Tensor:
    """Bytes [size] on a GPU, in the memory that torch's allocator shares among all of the process.

    A thread of its own allocates them. The calling thread may have an allocator for a CUDA graph that is about to be
    captured, as torch.compile has, and weights outlive the graph.
    """

    index = torch.cuda.current_device() if device.index is None else device.index

    def allocate() -> torch.Tensor:
        with torch.cuda.device(index):
            memory = torch.empty(size, dtype=torch.uint8, device="cuda")
            torch.cuda.current_stream().synchronize()  # the allocator may have handed over memory still in use there
            return memory

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


# ---------------------------------------------------------------- Tensors -> bytes


def weight_of(packed: Packed, ndim: int = 2) -> torch.nn.Parameter:
    """The bytes of a Tensor, DeviceTensor or DeviceExperts, over its memory, as a parameter without a gradient."""
    if not isinstance(packed, Packed):
        planes = type(packed).__module__.startswith("qgemm.") and hasattr(packed, "to_device")
        hint = "call its to_device()" if planes else "qgemm.open and qgemm.quantize give such"
        raise TypeError(f"a layer is made of a Tensor or DeviceTensor, got {described(packed)}; {hint}")
    if packed.ndim != ndim:
        expected = "a matrix (N, K)" if ndim == 2 else "experts (E, N, K)"
        raise UnsupportedError(
            f"a layer needs {expected}, got {packed!r}{'; index its leading axes first' * (packed.ndim > ndim == 2)}"
        )
    if packed.format.levels is None:
        raise UnsupportedError(f"{packed!r}: {packed.format} has no decoder, so it cannot be multiplied")
    with torch.inference_mode(False):
        data = file_bytes(packed) if isinstance(packed, Tensor) else device_bytes(packed)  # type: ignore[arg-type]
        weight = torch.nn.Parameter(data, requires_grad=False)
    if not isinstance(packed, Tensor):
        keep(weight, packed, spelled(packed.format))
    return weight


def file_bytes(tensor: Tensor) -> torch.Tensor:
    """A Tensor's blocks as bytes [N, bytes per row], over the same memory, which may be a mapped file.

    Memory that cannot be written is copied: torch and libraries over it may write into any tensor.
    """
    blocks = np.ascontiguousarray(tensor.blocks)
    shape = file_shape(tensor.format, tensor.shape)
    if not blocks.size:
        return torch.empty(shape, dtype=torch.uint8)
    blocks = blocks if is_writable(blocks) else blocks.copy()
    return torch.from_numpy(np.asarray(_Memory(blocks, blocks.ctypes.data, shape)))


class _Memory:
    """Bytes at an address as a NumPy array that keeps their owner alive.

    The array lacks the read-only flag of blocks, which makes torch warn. Unlike `.numpy()` it leaves the storage of a
    tensor resizable: FSDP frees and allocates that at each forward.
    """

    def __init__(self, owner: Any, address: int, shape: Shape) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "|u1", "version": 3}
