"""Planes: a kbit matrix on a GPU as the parts of its blocks, quantized there and decoded from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from qgemm.arguments import Array
from qgemm.arrays import check_floats
from qgemm.codec.float_types import DType, float_name
from qgemm.codec.format import Format
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.formats.kbit import WEIGHTS
from qgemm.tensor import Tensor

from . import upload
from .kernels.transforms import DEQUANTIZE_CODEBOOK, PLANES_THREADS, QUANTIZE_CODEBOOK, encodes_planes
from .libraries import Library, current_device, default_library, library_or_default, on_device_of
from .problem import C_TYPES, gpu
from .tensor import DeviceTensor

CTAS = 16  # CTAs of an SM; more than it holds, so that none waits for the last
QUANTIZED, DECODED = 32, 8  # values of a thread at a time


class Planes:
    """Weights [..., N, K] of a kbit format on a CUDA device; made by `qgemm.quantize` from an array there.

    absmax: an array of CuPy or torch [..., N, K / 32], E4M4 codes or float16. planes: [..., N, K / 32, bits] uint32,
    bit j of plane b being bit b of the code of weight j. `to_device` packs a matrix for products.
    """

    def __init__(self, format: Format, shape: tuple[int, ...], absmax: Any, planes: Any, name: str = "") -> None:
        self.format, self.shape, self.absmax, self.planes, self.name = format, shape, absmax, planes, name
        self.library = library_or_default(planes)
        self.device: int = self.library.device(planes)

    @classmethod
    def upload(cls, tensor: Tensor) -> Planes:
        """Upload a kbit Tensor's blocks to the current device."""
        check(tensor.format)
        blocks, library = tensor.blocks, default_library()
        device = current_device(library)
        with library.on_device(device):
            absmax, planes = (library.uploaded(blocks[part], device) for part in ("absmax", "planes"))
        return cls(tensor.format, tensor.shape, absmax, planes, tensor.name)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.absmax.nbytes + self.planes.nbytes)

    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The weights as a new array [..., N, K], bit for bit as `Tensor.dequantize` gives them."""
        name, library = float_name(dtype), self.library
        with library.on_device(self.device):
            values = library.empty(self.shape, name if name in C_TYPES else "float32", self.device)
            if prod(self.shape):
                launch_dequantize(self.format, values, self.absmax, self.planes)
            return library.cast(values, name)

    def to_device(self) -> DeviceTensor:
        """Pack a matrix into device tiles, for products; lossless, and these parts are not needed any more."""
        if len(self.shape) != 2:
            raise ShapeError(f"only a matrix (N, K) is packed into tiles, got {self!r}")
        (n, k), fmt, library = self.shape, self.format, self.library
        with library.on_device(self.device):
            memory = upload.pack(fmt, self.blocks(), n, fmt.blocks_in(k), library, self.device)
            return DeviceTensor(fmt, (n, k), *upload.split(fmt, memory, n, k, library), self.name)

    def to_host(self) -> Tensor:
        """The matrix as a Tensor in host memory."""
        blocks = np.empty(tuple(self.absmax.shape), self.format.dtype)
        blocks["absmax"], blocks["planes"] = map(self.library.host, (self.absmax, self.planes))
        return Tensor(self.format, self.shape, blocks, self.name)

    def blocks(self) -> Any:
        """The bytes of the blocks as they lie in a Tensor, in whole chunks of 16, as a new array."""
        size, count, library = self.format.block_bytes, prod(self.absmax.shape), self.library
        raw = library.scratch(upload.whole_chunks(count * size), self.device)()
        blocks = raw[: count * size].reshape(-1, size)
        for part in ("absmax", "planes"):
            dtype, offset = self.format.dtype.fields[part][:2]  # type: ignore[index]
            stored = library.view(getattr(self, part).reshape(-1), "uint8").reshape(-1, dtype.itemsize)
            library.assign(blocks[:, offset : offset + dtype.itemsize], stored)
        return raw

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        on = f"cuda:{self.device}"
        return f"<Planes{name} {self.format} {' x '.join(map(str, self.shape))} on {on}>"


def quantize(x: Array, fmt: Format) -> Planes:
    """`qgemm.quantize` for x [..., K] on a CUDA device: byte for byte as on the CPU, errors included."""
    check(fmt)
    with on_device_of(x) as (array, library, device):
        name = library.name(array.dtype)
        check_floats(name, array.shape)
        values = array if name in C_TYPES else library.cast(array, "float32")
        values = values if library.contiguous(values) else library.copy(values)
        shape = tuple(values.shape)
        counts = (*shape[:-1], fmt.blocks_in(shape[-1]))
        absmax = library.empty(counts, fmt.dtype["absmax"].name, device)
        planes = library.empty((*counts, *fmt.dtype["planes"].shape), "uint32", device)
        if size := prod(counts):
            refused = library.uploaded(np.full(1, size, np.uint64), device)
            launch_quantize(fmt, values, absmax, planes, refused)
            fmt.check_first(array, int(library.host(refused)[0]), library.host)
        return Planes(fmt, shape, absmax, planes)


def launch_quantize(fmt: Format, values: Any, absmax: Any, planes: Any, refused: Any) -> None:
    """Quantize contiguous values into the parts of their blocks, on the current stream of their library."""
    library = library_or_default(values)
    if library.pointer(values) % upload.CHUNK:  # a view into an array: the kernel reads 16 bytes at a time
        values = library.copy(values)
    kernel = QUANTIZE_CODEBOOK.load(fmt, In=C_TYPES.get(library.name(values.dtype), "float"))
    _launch(kernel, QUANTIZED, library, values, (values, absmax, planes, refused), prod(absmax.shape))


def launch_dequantize(fmt: Format, values: Any, absmax: Any, planes: Any) -> None:
    """Decode the parts of blocks into contiguous values, on the current stream of their library."""
    library = library_or_default(values)
    kernel = DEQUANTIZE_CODEBOOK.load(fmt, Out=C_TYPES.get(library.name(values.dtype), "float"))
    _launch(kernel, DECODED, library, values, (absmax, planes, values), prod(absmax.shape))


def check(fmt: Format) -> None:
    """UnsupportedError unless this is a kbit format."""
    if not encodes_planes(fmt):
        raise UnsupportedError(f"{fmt} has no encoder on a GPU, the kbit formats have one; quantize on the host")


def _launch(
    kernel: Callable[..., None], values: int, library: Library, array: Any, arrays: Sequence[Any], blocks: int
) -> None:
    """Launch on arrays that lie where `array` does; values: of a thread at a time."""
    device, threads = library.device(array), PLANES_THREADS
    grid = min(CTAS * gpu(device).sms, -(-blocks * WEIGHTS // (values * threads)))
    kernel((grid,), (threads,), (*map(library.pointer, arrays), np.int64(blocks)), library.stream(device))
