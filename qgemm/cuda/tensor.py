"""Weights on a GPU, packed in device tiles: DeviceTensor, a matrix; DeviceExperts, a matrix for each expert."""

from __future__ import annotations

from itertools import count
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.float_types import DType, float_name
from qgemm.codec.format import Blocks, Format
from qgemm.errors import UnsupportedError
from qgemm.locks import cached_property
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from . import devices, upload
from .driver.cublas import Matrix
from .kernels.panels import decode, plain_type
from .layout import tile as tiles
from .libraries import Library, current_device, default_library, library_or_default, on_device_of
from .problem import C_TYPES
from .rows import gathered

SERIALS = count(2)  # numbers of weights in keys of calls, where 0 and 1 equal False and True


class DeviceTensor(Packed):
    """Weights [N, K] on a CUDA device; made by `tensor.to_device()`.

    data: an array of CuPy or torch (see default_library), bytes [row_blocks, tiles along K, bytes of a tile]
    (cuda/layout/tile.py), for plain formats numbers [N, K]. row_absmax: follows on data in memory; bounds of the
    magnitude of the weights of every row of the row_blocks, float32. exponent: the power of two that brings all weights
    into the range of float16.
    """

    shape: tuple[int, int]

    def __init__(
        self, format: Format, shape: tuple[int, int], data: Any, row_absmax: Any = None, name: str = ""
    ) -> None:
        self.format, self.shape, self.data, self.row_absmax, self.name = format, shape, data, row_absmax, name
        self.library = library_or_default(data)
        bounds = None if row_absmax is None else self.library.host(row_absmax)
        self.exponent = 0 if bounds is None else half_exponent(float(bounds.max(initial=0)))
        self.pointer: int = self.library.pointer(data)
        self.device: int = self.library.device(data)
        self.serial = next(SERIALS)
        self.plans: dict[Any, Any] = {}  # remembered calls: qgemm/cuda/call/replay.py

    @classmethod
    def pack(cls, tensor: Tensor, blocks: Blocks) -> DeviceTensor:
        """Upload the blocks of a Tensor [N, K] to the current device and reorder them into tiles there."""
        fmt, (n, k), library = tensor.format, tensor.shape, default_library()
        device = current_device(library)
        with library.on_device(device):
            if fmt.plain:
                numbers = library.view(library.uploaded(as_bytes(blocks), device), plain_type(fmt))
                return cls(fmt, (n, k), numbers, None, tensor.name)
            memory = upload.upload(fmt, blocks, library, device)
            return cls(fmt, (n, k), *upload.split(fmt, memory, n, k, library), tensor.name)

    @property
    def nbytes(self) -> int:
        """Bytes on the device: those of the blocks, and the padding to whole tiles."""
        return int(self.data.nbytes)

    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The weights as an array of data's library, [N, K]: exact in float32, rounded once from it to other types."""
        if self.format.levels is None:
            raise UnsupportedError(f"{self!r}: {self.format} has no decoder")
        name, library, device = float_name(dtype), self.library, self.device
        with library.on_device(device):
            if self.format.plain:
                return library.cast(self.data, name)
            stored, (n, k) = name if name in C_TYPES else "float32", self.shape  # float64: from float32
            weights = library.empty((n, k), stored, device)
            target = Matrix(library.pointer(weights), n, k, stored)
            decode(self.format, self.pointer, len(self.data), target, 0, library.stream(device))
            return library.cast(weights, name)

    def rows(self, index: Any, dtype: str = "float32") -> Any:
        """Rows by their index, decoded: a new array [*index.shape, K] of index's library, on its current stream.

        index: int64, contiguous, a CuPy array or torch tensor on this device. dtype: "float32", exact, or rounded once
        from it "float16" or "bfloat16". Nothing waits for the GPU, so an index that is no row stops the device, as in
        torch's own embedding.
        """
        return gathered(self.format, self.shape, self.pointer, self.device, index, dtype)

    def file_rows(self, start: int, stop: int) -> Any:
        """Rows start to stop in the layout of a file, as new bytes [rows, bytes of a row] on the device."""
        (_, k), library, device = self.shape, self.library, self.device
        row_bytes = self.format.blocks_in(k) * self.format.block_bytes
        if self.format.plain:
            return library.view(self.data, "uint8").reshape(-1, row_bytes)[start:stop]
        with library.on_device(device):
            raw = upload.unpack(self.format, self.pointer, slice(start, stop), k, library, device)
            return raw.reshape(-1, row_bytes)

    def to_host(self) -> Tensor:
        """Back to a Tensor, byte for byte as it was packed."""
        n, k = self.shape
        if self.format.plain:
            raw = self.library.host(self.library.view(self.data, "uint8"))
            return Tensor(self.format, self.shape, raw.view(self.format.dtype), self.name)
        blocks = upload.download(self.format, self.data, (n, k), self.library, self.device)
        return Tensor(self.format, self.shape, blocks, self.name)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<DeviceTensor{name} {self.format} {' x '.join(map(str, self.shape))} on cuda:{self.device}>"


class DeviceExperts(Packed):
    """Weights [E, N, K] on a CUDA device, a matrix for each expert; made by `to_device()` of such a Tensor.

    data: an array of CuPy or torch, bytes [E, bytes of an expert]. The bytes of an expert are those of a DeviceTensor:
    tiles, then bounds of the rows; for plain formats its numbers. `experts[e]` is the DeviceTensor of one, over the
    same memory.
    """

    shape: tuple[int, int, int]

    def __init__(self, format: Format, shape: tuple[int, int, int], data: Any, name: str = "") -> None:
        self.format, self.shape, self.data, self.name = format, shape, data, name
        self.library = library_or_default(data)
        self.pointer: int = self.library.pointer(data)
        self.device: int = self.library.device(data)
        self.serial = next(SERIALS)
        self.plans: dict[Any, Any] = {}  # remembered calls: qgemm/cuda/call/replay.py

    @cached_property
    def exponent(self) -> int:
        """The power of two that brings all weights into the range of float16; waits for the device at first.

        0 for plain formats, whose numbers are multiplied as they are.
        """
        if self.format.plain:
            return 0
        bounds = self.data[:, self.tiles_nbytes :]
        if not prod(bounds.shape):
            return 0
        with self.library.on_device(self.device):
            return half_exponent(float(self.library.view(self.library.copy(bounds), "float32").max()))

    @classmethod
    def pack(cls, tensor: Tensor, blocks: Blocks) -> DeviceExperts:
        """Upload the blocks of a Tensor [E, N, K] to the current device, one expert after the other."""
        fmt, (e, n, k), library = tensor.format, tensor.shape, default_library()
        device, size = current_device(library), upload.tiles_nbytes(fmt, n, k)
        with library.on_device(device):
            if fmt.plain:
                numbers = library.uploaded(as_bytes(blocks), device)
                return cls(fmt, (e, n, k), numbers.reshape(e, size), tensor.name)
            data = library.empty((e, size), "uint8", device)
            for expert in range(e if size else 0):
                upload.upload(fmt, blocks[expert], library, device, data[expert])
            experts = cls(fmt, (e, n, k), data, tensor.name)
            _ = experts.exponent  # computed ahead: a CUDA graph that is being captured could not wait
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
        return matrix_over(self.data[int(expert)], self.format, (n, k), self.name, self.library)

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
    with on_device_of(rows) as (raw, library, device):
        raw = raw if library.contiguous(raw) else library.copy(raw)
        if fmt.plain:
            devices.synchronize(library.stream(device))  # kernels prefetch weights before they wait for their stream
            return over_memory(raw.reshape(-1), fmt, shape, name)
        memory = library.scratch(prod(shape[:-2]) * upload.tiles_nbytes(fmt, *shape[-2:]), device)()
        if prod(memory.shape):
            upload.pack_into(fmt, raw, shape, memory, library, device)
        return over_memory(memory, fmt, shape, name)


def over_memory(memory: Any, fmt: Format, shape: tuple[int, ...], name: str) -> DeviceTensor | DeviceExperts:
    """Weights over the bytes [bytes] of their tiles and bounds, or of plain numbers, one expert after the other."""
    if len(shape) == 3:
        e, n, k = shape
        experts = DeviceExperts(fmt, (e, n, k), memory.reshape(e, -1 if prod(memory.shape) else 0), name)
        _ = experts.exponent  # computed ahead: a CUDA graph that is being captured could not wait
        return experts
    n, k = shape
    return matrix_over(memory, fmt, (n, k), name, library_or_default(memory))


def matrix_over(memory: Any, fmt: Format, shape: tuple[int, int], name: str, library: Library) -> DeviceTensor:
    """A matrix over the bytes [bytes] of its tiles and bounds, or of plain numbers."""
    if fmt.plain:
        return DeviceTensor(fmt, shape, library.view(memory, plain_type(fmt)).reshape(shape), None, name)
    return DeviceTensor(fmt, shape, *upload.split(fmt, memory, *shape, library), name)


def check_tiled(fmt: Format, who: str) -> None:
    """UnsupportedError, which names `who`, for a format that no kernel reads."""
    if fmt.levels is None and not fmt.plain:
        raise UnsupportedError(f"{who}: {fmt} has no decoder, so it cannot be multiplied")
    if not fmt.tiled and not fmt.plain:
        reason = f"{fmt} has no device tile"
        raise UnsupportedError(f"{who}: {reason}; multiply it on the CPU, or convert it to a type with GPU tiles")


def as_bytes(blocks: Blocks) -> NDArray[np.uint8]:
    """Numbers of a plain format as bytes, with the same axes."""
    numbers: NDArray[np.uint8] = np.ascontiguousarray(blocks).view(np.uint8)
    return numbers


def half_exponent(largest: float) -> int:
    """e such that weights of up to this magnitude, times 2^-e, are below 2^15, the largest just below it."""
    return int(np.frexp(largest)[1]) - 15 if largest > 0 else 0
