"""Blocks to the device and back: raw bytes through pinned memory, reordered into tiles and back by a kernel there.

Bytes travel in chunks of whole row_blocks of 64 rows, so that neither side holds a second copy of a large matrix; while
one chunk is on its way, the next is read from the file.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format

from .kernels.transforms import PACK, UNPACK
from .layout import tile as tiles

if TYPE_CHECKING:
    import cupy

STAGING_BYTES = 4 << 20  # bytes on their way at a time, or a row_block's; there are two such stages on each side


class Stage:
    """Pinned memory on the host, and as much on the device, for one chunk at a time."""

    def __init__(self, size: int) -> None:
        import cupy

        self.host: NDArray[np.uint8] = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self.device = cupy.empty(-(-size // 16) * 16, np.uint8)  # the kernels work in chunks of 16 bytes
        self.done = cupy.cuda.Event(disable_timing=True)

    def send(self, part: NDArray[np.uint8], stream: cupy.cuda.Stream) -> None:
        """Gather rows of bytes here, once the chunk before is done, and begin to send them to the device."""
        self.done.synchronize()
        self.host[: part.size].reshape(part.shape)[...] = part
        self.device.data.copy_from_host_async(self.host.ctypes.data, part.size, stream)


def upload(fmt: Format, blocks: Blocks, memory: cupy.ndarray | None = None) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Blocks [N, K / weights] -> tiles on the current device as bytes [row_blocks, tiles along K, bytes of a tile].

    Also `tiles.row_absmax` of the blocks, which follow on the tiles in memory. Returns once everything is there:
    kernels prefetch weights before they wait for their stream. memory: bytes on the device for both, else new ones.
    """
    import cupy

    n, count = blocks.shape
    data, row_absmax = empty_tiles(fmt, n, count, memory)
    if not data.size:
        return data, row_absmax
    stream, kernel = cupy.cuda.get_current_stream(), PACK.load(fmt)
    raw, row_blocks = byte_rows(blocks), row_blocks_of(fmt, count)
    step = row_blocks * tiles.ROWS
    stages = [Stage(min(step, n) * raw.shape[1]) for _ in range(min(2, -(-n // step)))]
    for index, first in enumerate(range(0, n, step)):
        stage, rows = stages[index % 2], raw[first : first + step]
        stage.send(rows, stream)
        part = data[index * row_blocks : (index + 1) * row_blocks]
        launch(kernel, fmt, stage.device, part, (row_absmax[first:],), len(rows), count)
        stage.done.record(stream)
    stream.synchronize()
    return data, row_absmax


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
