"""Planes: a kbit matrix on a GPU as the parts of its blocks, quantized there and decoded from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from qgemm.arguments import Array
from qgemm.arrays import as_cupy, stream_of
from qgemm.codec.float_types import DType
from qgemm.codec.format import Format, float_dtype
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.formats.kbit import WEIGHTS
from qgemm.tensor import Tensor

from . import upload
from .kernels.transforms import DEQUANTIZE_CODEBOOK, PLANES_THREADS, QUANTIZE_CODEBOOK, encodes_planes
from .problem import C_TYPES, c_type
from .tensor import DeviceTensor

if TYPE_CHECKING:
    import cupy

CTAS = 16  # CTAs of an SM; more than it holds, so that none waits for the last
QUANTIZED, DECODED = 32, 8  # values of a thread at a time


class Planes:
    """Weights [..., N, K] of a kbit format on a CUDA device; made by `qgemm.quantize` from an array there.

    absmax: a CuPy array [..., N, K / 32] of E4M4 codes or float16. planes: [..., N, K / 32, bits] uint32, bit j of
    plane b being bit b of the code of weight j. `to_device` packs a matrix for products.
    """

    def __init__(
        self, format: Format, shape: tuple[int, ...], absmax: cupy.ndarray, planes: cupy.ndarray, name: str = ""
    ) -> None:
        self.format, self.shape, self.absmax, self.planes, self.name = format, shape, absmax, planes, name

    @classmethod
    def upload(cls, tensor: Tensor) -> Planes:
        """Upload a kbit Tensor's blocks to the current device."""
        import cupy

        check(tensor.format)
        blocks = tensor.blocks
        absmax, planes = (cupy.asarray(np.ascontiguousarray(blocks[part])) for part in ("absmax", "planes"))
        return cls(tensor.format, tensor.shape, absmax, planes, tensor.name)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.absmax.nbytes + self.planes.nbytes)

    def dequantize(self, dtype: DType = np.float32) -> cupy.ndarray:
        """The weights as a new CuPy array [..., N, K], bit for bit as `Tensor.dequantize` gives them."""
        import cupy

        to = float_dtype(dtype)
        with self.planes.device:
            values = cupy.empty(self.shape, to if to.name in C_TYPES else np.float32)
            if values.size:
                launch_dequantize(self.format, values, self.absmax, self.planes)
            return values.astype(to, copy=False)

    def to_device(self) -> DeviceTensor:
        """Pack a matrix into device tiles, for products; lossless, and these parts are not needed any more."""
        if len(self.shape) != 2:
            raise ShapeError(f"only a matrix (N, K) is packed into tiles, got {self!r}")
        with self.planes.device:
            packed = upload.pack(self.format, self.blocks(), *self.absmax.shape)
            return DeviceTensor(self.format, self.shape, *packed, self.name)

    def to_host(self) -> Tensor:
        """The matrix as a Tensor in host memory."""
        blocks = np.empty(self.absmax.shape, self.format.dtype)
        blocks["absmax"], blocks["planes"] = self.absmax.get(), self.planes.get()
        return Tensor(self.format, self.shape, blocks, self.name)

    def blocks(self) -> cupy.ndarray:
        """The bytes of the blocks as they lie in a Tensor, in whole chunks of 16, as a new CuPy array."""
        import cupy

        size = self.format.block_bytes
        raw = cupy.empty(-(-self.absmax.size * size // 16) * 16, np.uint8)
        blocks = raw[: self.absmax.size * size].reshape(-1, size)
        for part in ("absmax", "planes"):
            dtype, offset = self.format.dtype.fields[part][:2]  # type: ignore[index]
            stored = getattr(self, part).reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize)
            blocks[:, offset : offset + dtype.itemsize] = stored
        return raw

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        on = f"cuda:{self.planes.device.id}"
        return f"<Planes{name} {self.format} {' x '.join(map(str, self.shape))} on {on}>"


def quantize(x: Array, fmt: Format) -> Planes:
    """`qgemm.quantize` for x [..., K] on a CUDA device: byte for byte as on the CPU, errors included."""
    import cupy

    check(fmt)
    with stream_of(x):
        array = as_cupy(x)
        values = cupy.ascontiguousarray(array if array.dtype.name in C_TYPES else array.astype(np.float32))
        counts = (*values.shape[:-1], fmt.blocks_in(values.shape[-1]))
        absmax = cupy.empty(counts, fmt.dtype["absmax"])
        planes = cupy.empty((*counts, *fmt.dtype["planes"].shape), np.uint32)
        if absmax.size:
            refused = cupy.full(1, absmax.size, np.uint64)
            launch_quantize(fmt, values, absmax, planes, refused)
            fmt.check_first(array, int(refused.get()[0]), cupy.asnumpy)
        return Planes(fmt, values.shape, absmax, planes)


def launch_quantize(
    fmt: Format, values: cupy.ndarray, absmax: cupy.ndarray, planes: cupy.ndarray, refused: cupy.ndarray
) -> None:
    """Quantize contiguous values into the parts of their blocks, on the current stream."""
    if values.data.ptr % 16:  # a view into an array: the kernel reads 16 bytes at a time
        values = values.copy()
    kernel = QUANTIZE_CODEBOOK.load(fmt, In=c_type(values.dtype))
    _launch(kernel, QUANTIZED, values, absmax, planes, refused, np.int64(absmax.size))


def launch_dequantize(fmt: Format, values: cupy.ndarray, absmax: cupy.ndarray, planes: cupy.ndarray) -> None:
    """Decode the parts of blocks into contiguous values, on the current stream."""
    kernel = DEQUANTIZE_CODEBOOK.load(fmt, Out=c_type(values.dtype))
    _launch(kernel, DECODED, absmax, planes, values, np.int64(absmax.size))


def check(fmt: Format) -> None:
    """UnsupportedError unless this is a kbit format."""
    if not encodes_planes(fmt):
        raise UnsupportedError(f"{fmt} has no encoder on a GPU, the kbit formats have one; quantize on the host")


def _launch(kernel: Callable[..., None], values: int, *arguments: Any) -> None:
    import cupy

    blocks = int(arguments[-1])
    threads, ctas = PLANES_THREADS, CTAS * cupy.cuda.Device().attributes["MultiProcessorCount"]
    kernel((min(ctas, -(-blocks * WEIGHTS // (values * threads))),), (threads,), arguments)
