"""DeviceTensor: a matrix on a GPU, packed in device tiles."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from qgemm.codec.format import Blocks, Format, float_dtype
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from . import upload
from .kernels.panels import dense, plain_dtype
from .problem import C_TYPES
from .rows import gathered

SERIALS = count()  # of DeviceTensors, by which plans of several know them


class DeviceTensor(Packed):
    """Weights [N, K] on a CUDA device; made by `tensor.to_device()`.

    data: a CuPy array of bytes [row_blocks, tiles along K, bytes of a tile] (cuda/layout/tile.py), or for plain formats
    of numbers [N, K]. row_absmax: right behind it, of the magnitude of the weights of each row of the row_blocks,
    float32.
    exponent: of a power of two that brings all weights into the range of float16.
    """

    shape: tuple[int, int]

    def __init__(
        self, format: Format, shape: tuple[int, int], data: Any, row_absmax: Any = None, name: str = ""
    ) -> None:
        self.format, self.shape, self.data, self.row_absmax, self.name = format, shape, data, row_absmax, name
        self.exponent = 0 if row_absmax is None else half_exponent(float(row_absmax.get().max(initial=0)))
        self.pointer: int = data.data.ptr
        self.device: int = data.device.id
        self.serial = next(SERIALS)
        self.plans: dict[Any, Any] = {}  # see qgemm/cuda/plan_cache.py

    @classmethod
    def pack(cls, tensor: Tensor, blocks: Blocks) -> DeviceTensor:
        """Upload the blocks of a Tensor [N, K] to the current device and reorder them into tiles there."""
        fmt, (n, k) = tensor.format, tensor.shape
        if fmt.plain:
            import cupy

            return cls(fmt, (n, k), cupy.asarray(as_numbers(fmt, blocks)), None, tensor.name)
        return cls(fmt, (n, k), *upload.upload(fmt, blocks), tensor.name)

    @property
    def nbytes(self) -> int:
        """Bytes on the device: those of the blocks, and the padding to whole tiles."""
        return int(self.data.nbytes)

    def dequantize(self, dtype: DTypeLike = np.float32) -> Any:
        """The weights as a new CuPy array [N, K]: exact in float32, rounded once from it to float16 or bfloat16."""
        found = float_dtype(dtype)
        if self.format.levels is None:
            raise UnsupportedError(f"{self!r}: {self.format} has no decoder")
        made = found if found.name in C_TYPES else np.dtype(np.float32)  # float64: from float32
        with self.data.device:
            if self.format.plain:
                return self.data.astype(found, copy=False)
            (n, k), row_blocks = self.shape, self.data
            return dense(self.format, k, row_blocks, n, made, 0).astype(found, copy=False)

    def rows(self, index: Any, dtype: str = "float32") -> Any:
        """Rows by their index, decoded: a new array [*index.shape, K] of index's library, on its current stream.

        index: int64, contiguous, a CuPy array or torch tensor on this device. dtype: "float32", exact, or rounded once
        from it "float16" or "bfloat16". Nothing waits for the GPU, so an index that is no row stops the device, as in
        torch's own embedding.
        """
        if not self.format.tiled:
            raise UnsupportedError(f"{self!r}: rows are gathered of tiles; index `data`, which holds plain numbers")
        return gathered(self.format, self.shape, self.pointer, self.device, index, dtype)

    def to_host(self) -> Tensor:
        """Back to a Tensor, byte for byte as it was packed."""
        n, k = self.shape
        if self.format.plain:
            return Tensor(self.format, self.shape, self.data.get().view(self.format.dtype), self.name)
        return Tensor(self.format, self.shape, upload.download(self.format, self.data, (n, k)), self.name)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<DeviceTensor{name} {self.format} {' x '.join(map(str, self.shape))} on cuda:{self.data.device.id}>"


def check_tiled(fmt: Format, who: str) -> None:
    """UnsupportedError, which names `who`, for a format that no kernel reads."""
    if fmt.levels is None and not fmt.plain:
        raise UnsupportedError(f"{who}: {fmt} has no decoder, so it cannot be multiplied")
    if not fmt.tiled and not fmt.plain:
        why = f"{fmt} has no device tile"
        raise UnsupportedError(f"{who}: {why}; multiply it on the CPU, or convert it to a type with GPU tiles")


def as_numbers(fmt: Format, blocks: Any) -> Any:
    """The blocks of a plain format as an array of float32, float16 or bfloat16."""
    return blocks.view(plain_dtype(fmt))


def half_exponent(largest: float) -> int:
    """e such that weights of up to this magnitude, times 2^-e, are below 2^15, the largest just below it."""
    return int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
