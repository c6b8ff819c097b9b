"""Blocks to the device and back: raw bytes through pinned memory, reordered into tiles and back by a kernel there.

Bytes travel in chunks of whole row_blocks of 64 rows, so that neither side holds a second copy of a large matrix; while
one chunk is on its way, threads gather the next from the file. Chunks lie in CuPy's current allocator on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.parallel import for_slices

from .kernels.transforms import PACK, UNPACK
from .layout import tile as tiles

if TYPE_CHECKING:
    import cupy

STAGING_BYTES = 16 << 20  # bytes on their way at a time, or a row_block's; there are two such stages on each side
GATHERED_BYTES = 1 << 20  # bytes that a thread gathers at a time; one thread alone is slower than the bus


class Stage:
    """Pinned memory on the host, and as much on the device, for one chunk at a time."""

    def __init__(self, size: int) -> None:
        import cupy

        self.host: NDArray[np.uint8] = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self.device = cupy.empty(-(-size // 16) * 16, np.uint8)  # the kernels work in chunks of 16 bytes
        self.done = cupy.cuda.Event(disable_timing=True)

    def gather(self, part: NDArray[np.uint8]) -> None:
        """Gather rows of bytes in pinned memory, once the chunk before is done."""
        self.done.synchronize()
        host = self.host[: part.size].reshape(part.shape)

        def copy(rows: slice) -> None:
            host[rows] = part[rows]

        for_slices(len(part), max(1, GATHERED_BYTES // part.shape[1]), copy)

    def send(self, part: NDArray[np.uint8], device: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        """Gather rows of bytes here, and begin to send them to memory of the device."""
        self.gather(part)
        device.data.copy_from_host_async(self.host.ctypes.data, part.size, stream)


def upload(fmt: Format, blocks: Blocks, memory: cupy.ndarray | None = None) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Blocks [N, K / weights] -> tiles on the current device as bytes [row_blocks, tiles along K, bytes of a tile].

    Also `tiles.row_absmax` of the blocks, which follow on the tiles in memory. Returns once everything is there:
    kernels prefetch weights before they wait for their stream. memory: bytes on the device for both, else new ones.
    """
    n, count = blocks.shape
    data, row_absmax = empty_tiles(fmt, n, count, memory)
    if not data.size:
        return data, row_absmax
    kernel, row_blocks = PACK.load(fmt), row_blocks_of(fmt, count)

    def pack_chunk(stage: Stage, first: int, part: NDArray[np.uint8], stream: cupy.cuda.Stream) -> None:
        stage.send(part, stage.device, stream)
        start = first // tiles.ROWS
        target = data[start : start + row_blocks], (row_absmax[first:],)
        launch(kernel, fmt, stage.device, *target, len(part), count)

    _in_chunks(byte_rows(blocks), row_blocks * tiles.ROWS, pack_chunk)
    return data, row_absmax


def upload_into(fmt: Format, blocks: Blocks, memory: cupy.ndarray) -> None:
    """Blocks of a matrix or of experts -> bytes on the device: those that its class holds."""
    matrices = blocks if blocks.ndim == 3 else blocks[None]
    into = _send_numbers if fmt.plain else upload
    for matrix, matrix_memory in zip(matrices, memory.reshape(len(matrices), -1), strict=True):
        into(fmt, matrix, matrix_memory)


def _send_numbers(fmt: Format, blocks: Blocks, memory: cupy.ndarray) -> None:
    """Plain numbers [N, K] -> memory on the device, as they are."""
    raw = byte_rows(blocks)

    def send(stage: Stage, first: int, part: NDArray[np.uint8], stream: cupy.cuda.Stream) -> None:
        start = first * raw.shape[1]
        stage.send(part, memory[start : start + part.size], stream)

    _in_chunks(raw, max(1, STAGING_BYTES // raw.shape[1]), send)


def _in_chunks(raw: NDArray[np.uint8], step: int, send: Callable[..., None]) -> None:
    """Call send(stage, first row, rows, stream) for chunks of `step` rows, by two stages in turn, and wait for them."""
    import cupy

    stream, n = cupy.cuda.get_current_stream(), len(raw)
    stages = [Stage(min(step, n) * raw.shape[1]) for _ in range(min(2, -(-n // step)))]
    for index, first in enumerate(range(0, n, step)):
        stage = stages[index % 2]
        send(stage, first, raw[first : first + step], stream)
        stage.done.record(stream)
    stream.synchronize()


def byte_rows(blocks: Blocks) -> NDArray[np.uint8]:
    """Blocks [N, count] as bytes [N, bytes of a row]: a view where the blocks of a row lie side by side.

    Rows themselves may lie apart, as in a share of the columns of a mapped file, of which nothing else is read.
    """
    if blocks.shape[1] > 1 and blocks.strides[1] != blocks.itemsize:
        blocks = np.ascontiguousarray(blocks)
    return np.lib.stride_tricks.as_strided(
        blocks[:, :1].view(np.uint8),
        (len(blocks), blocks.shape[1] * blocks.itemsize),
        (blocks.strides[0], 1),
        writeable=False,
    )


def pack(fmt: Format, raw: cupy.ndarray, n: int, count: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Pack n rows of `count` blocks that are on the current device, as bytes in whole chunks of 16."""
    import cupy

    data, row_absmax = empty_tiles(fmt, n, count)
    if data.size:
        launch(PACK.load(fmt), fmt, raw, data, (row_absmax,), n, count)
        cupy.cuda.get_current_stream().synchronize()
    return data, row_absmax


def pack_into(fmt: Format, raw: cupy.ndarray, shape: tuple[int, ...], memory: cupy.ndarray) -> None:
    """Pack bytes [..., N, bytes of a row] that are on the current device into the memory of their tiles and bounds."""
    import cupy

    *_, n, k = shape
    count, size = fmt.blocks_in(k), raw.shape[-2] * raw.shape[-1]
    matrices = raw.reshape(-1, size)
    for matrix, matrix_memory in zip(matrices, memory.reshape(len(matrices), -1), strict=True):
        data, row_absmax = empty_tiles(fmt, n, count, matrix_memory)
        aligned = matrix if matrix.data.ptr % 16 == 0 else matrix.copy()  # kernels read chunks of 16 bytes
        launch(PACK.load(fmt), fmt, aligned, data, (row_absmax,), n, count)
    cupy.cuda.get_current_stream().synchronize()


def tiles_nbytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of the tiles of a matrix [N, K] and of the bounds of its rows; of its numbers for plain formats."""
    if fmt.plain:
        return n * k * fmt.block_bytes
    shape = tiles.tiles_shape(fmt, n, k)
    return prod(shape) + 4 * shape[0] * tiles.ROWS


def empty_tiles(
    fmt: Format, n: int, count: int, memory: cupy.ndarray | None = None
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Memory for the tiles of n rows of `count` blocks, then zeros for bounds of all rows of the row_blocks."""
    import cupy

    shape = tiles.tiles_shape(fmt, n, count * fmt.weights)
    size = prod(shape)
    if memory is None:
        memory = cupy.empty(tiles_nbytes(fmt, n, count * fmt.weights), np.uint8)
    row_absmax = memory[size:].view(np.float32)
    row_absmax.fill(0)
    return memory[:size].reshape(shape), row_absmax


def download(fmt: Format, data: cupy.ndarray, shape: tuple[int, int]) -> Blocks:
    """Tiles of a matrix [N, K] on the device -> its blocks [N, K / weights]."""
    import cupy

    n, count = shape[0], fmt.blocks_in(shape[1])
    blocks = np.empty((n, count), fmt.dtype)
    if not data.size:
        return blocks
    raw, row_bytes, row_blocks = blocks.reshape(-1).view(np.uint8), count * fmt.block_bytes, row_blocks_of(fmt, count)
    step = row_blocks * tiles.ROWS
    with data.device:
        kernel = UNPACK.load(fmt)
        chunk = cupy.empty(-(-min(step, n) * row_bytes // 16) * 16, np.uint8)
        for index, first in enumerate(range(0, n, step)):
            rows = min(step, n - first)
            launch(kernel, fmt, data[index * row_blocks : (index + 1) * row_blocks], chunk, (), rows, count)
            chunk[: rows * row_bytes].get(out=raw[first * row_bytes : (first + rows) * row_bytes])
    return blocks


def row_blocks_of(fmt: Format, count: int) -> int:
    """The number of row blocks of a chunk, where a row has `count` blocks."""
    return max(1, STAGING_BYTES // (tiles.ROWS * count * fmt.block_bytes))


def launch(
    kernel: Callable[..., None],
    fmt: Format,
    source: cupy.ndarray,
    target: cupy.ndarray,
    more: tuple[Any, ...],
    rows: int,
    count: int,
) -> None:
    """Reorder rows of `count` blocks, one CTA a panel of a row_block, on the current stream."""
    along = -(-count * fmt.weights // tiles.columns(fmt))
    panels = -(-rows // tiles.ROWS) * -(-along // tiles.panel_tiles(fmt))
    kernel((panels,), (tiles.PACK_THREADS,), (source, target, *more, np.int64(rows), np.int64(count), np.int64(along)))
