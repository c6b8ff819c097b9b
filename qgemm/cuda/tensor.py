"""Weights on a GPU, packed in device tiles: DeviceTensor, a matrix; DeviceExperts, a matrix for each expert."""

from __future__ import annotations

from itertools import count
from math import prod
from typing import Any

import numpy as np

from qgemm.arrays import stream_of
from qgemm.codec.float_types import DType
from qgemm.codec.format import Blocks, Format, float_dtype
from qgemm.errors import UnsupportedError
from qgemm.locks import cached_property
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from . import upload
from .kernels.panels import dense, plain_dtype
from .layout import tile as tiles
from .libraries import cupy_library, library_of
from .problem import C_TYPES
from .rows import gathered

SERIALS = count(2)  # numbers of weights in keys of calls, where 0 and 1 equal False and True


class DeviceTensor(Packed):
    """Weights [N, K] on a CUDA device; made by `tensor.to_device()`.

    data: a CuPy array of bytes [row_blocks, tiles along K, bytes of a tile] (cuda/layout/tile.py), for plain formats
    numbers [N, K]. row_absmax: follows on data in memory; bounds of the magnitude of the weights of every row of the
    row_blocks, float32. exponent: the power of two that brings all weights into the range of float16.
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
        self.plans: dict[Any, Any] = {}  # remembered calls: qgemm/cuda/call/replay.py

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

    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The weights as a new CuPy array [N, K]: exact in float32, rounded once from it to float16 or bfloat16."""
        to = float_dtype(dtype)
        if self.format.levels is None:
            raise UnsupportedError(f"{self!r}: {self.format} has no decoder")
        stored = to if to.name in C_TYPES else np.dtype(np.float32)  # float64: from float32
        with self.data.device:
            if self.format.plain:
                return self.data.astype(to, copy=False)
            (n, k), row_blocks = self.shape, self.data
            return dense(self.format, k, row_blocks, n, stored, 0).astype(to, copy=False)

    def rows(self, index: Any, dtype: str = "float32") -> Any:
        """Rows by their index, decoded: a new array [*index.shape, K] of index's library, on its current stream.

        index: int64, contiguous, a CuPy array or torch tensor on this device. dtype: "float32", exact, or rounded once
        from it "float16" or "bfloat16". Nothing waits for the GPU, so an index that is no row stops the device, as in
        torch's own embedding.
        """
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


class DeviceExperts(Packed):
    """Weights [E, N, K] on a CUDA device, a matrix for each expert; made by `to_device()` of such a Tensor.

    data: a CuPy array of bytes [E, bytes of an expert]. The bytes of an expert are those of a DeviceTensor: tiles, then
    bounds of the rows; for plain formats its numbers. `experts[e]` is the DeviceTensor of one, over the same memory.
    """

    shape: tuple[int, int, int]

    def __init__(self, format: Format, shape: tuple[int, int, int], data: Any, name: str = "") -> None:
        self.format, self.shape, self.data, self.name = format, shape, data, name
        self.pointer: int = data.data.ptr
        self.device: int = data.device.id
        self.serial = next(SERIALS)
        self.plans: dict[Any, Any] = {}  # remembered calls: qgemm/cuda/call/replay.py

    @cached_property
    def exponent(self) -> int:
        """The power of two that brings all weights into the range of float16; waits for the device at first.

        0 for plain formats, whose numbers are multiplied as they are.
        """
        if self.format.plain:
            return 0
        bounds = self.data[:, self.tiles_nbytes :].copy().view(np.float32)
        return half_exponent(float(bounds.max()) if bounds.size else 0.0)

    @classmethod
    def pack(cls, tensor: Tensor, blocks: Blocks) -> DeviceExperts:
        """Upload the blocks of a Tensor [E, N, K] to the current device, one expert after the other."""
        import cupy

        fmt, (e, n, k) = tensor.format, tensor.shape
        if fmt.plain:
            numbers = cupy.asarray(np.ascontiguousarray(blocks)).view(np.uint8)
            return cls(fmt, (e, n, k), numbers.reshape(e, upload.tiles_nbytes(fmt, n, k)), tensor.name)
        data = cupy.empty((e, upload.tiles_nbytes(fmt, n, k)), np.uint8)
        for expert in range(e if data.size else 0):
            upload.upload(fmt, blocks[expert], data[expert])
        experts = cls(fmt, (e, n, k), data, tensor.name)
        _ = experts.exponent  # now: a CUDA graph that is being captured could not wait
        return experts

    @property
    def row_absmax(self) -> int:
        """Address of the rows' largest magnitudes of expert 0, which follow on its tiles."""
        return self.pointer + self.tiles_nbytes

    @property
    def tiles_nbytes(self) -> int:
        """Bytes of the tiles of an expert."""
        return prod(tiles.tiles_shape(self.format, *self.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes on the device: those of the blocks, and the padding to whole tiles."""
        return int(self.data.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> DeviceTensor:
        _, n, k = self.shape
        memory = self.data[int(expert)]
        if self.format.plain:
            return DeviceTensor(
                self.format, (n, k), memory.view(plain_dtype(self.format)).reshape(n, k), None, self.name
            )
        shape = tiles.tiles_shape(self.format, n, k)
        size = prod(shape)
        bounds = memory[size:].view(np.float32)
        return DeviceTensor(self.format, (n, k), memory[:size].reshape(shape), bounds, self.name)

    def to_host(self) -> Tensor:
        """Back to a Tensor, byte for byte as it was packed."""
        e, n, k = self.shape
        blocks = np.empty((e, n, self.format.blocks_in(k)), self.format.dtype)
        for expert in range(e if blocks.size else 0):
            blocks[expert] = self[expert].to_host().blocks
        return Tensor(self.format, self.shape, blocks, self.name)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<DeviceExperts{name} {self.format} {' x '.join(map(str, self.shape))} on cuda:{self.device}>"


def packed_there(rows: Any, fmt: Format, shape: tuple[int, ...], name: str) -> DeviceTensor | DeviceExperts:
    """Bytes [..., N, bytes of a row] on a device -> weights there, over the same memory if their format is plain."""
    import cupy

    library = library_of(rows) or cupy_library()
    with stream_of(rows):
        raw = cupy.ascontiguousarray(cupy.from_dlpack(rows))
        if fmt.plain:
            return over_memory(raw.reshape(-1), fmt, shape, name)
        size = prod(shape[:-2]) * upload.tiles_nbytes(fmt, *shape[-2:])
        memory = cupy.from_dlpack(library.scratch(size, library.device(rows))())
        if size:
            upload.pack_into(fmt, raw, shape, memory)
        return over_memory(memory, fmt, shape, name)


def over_memory(memory: Any, fmt: Format, shape: tuple[int, ...], name: str) -> DeviceTensor | DeviceExperts:
    """Weights over the bytes [bytes] of their tiles and bounds, or of plain numbers, one expert after the other."""
    if len(shape) == 3:
        e, n, k = shape
        experts = DeviceExperts(fmt, (e, n, k), memory.reshape(e, -1 if memory.size else 0), name)
        _ = experts.exponent  # now: a CUDA graph that is being captured could not wait
        return experts
    n, k = shape
    if fmt.plain:
        return DeviceTensor(fmt, (n, k), memory.view(plain_dtype(fmt)).reshape(shape), None, name)
    size = tiles.tiles_shape(fmt, n, k)
    data, bounds = memory[: prod(size)].reshape(size), memory[prod(size) :].view(np.float32)
    return DeviceTensor(fmt, (n, k), data, bounds, name)


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
