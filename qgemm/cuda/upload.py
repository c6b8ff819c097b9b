"""Blocks to the device and back: raw bytes through pinned memory, reordered into tiles and back by a kernel there.

Bytes travel in chunks of whole row_blocks of 64 rows, so that neither side holds a second copy of a large matrix; while
one chunk is on its way, threads gather the next from the file. Chunks lie in memory of the library of the tiles, all
work is on its current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.parallel import for_slices

from . import devices
from .kernels.transforms import PACK, UNPACK
from .layout import tile as tiles
from .libraries import Library

STAGING_BYTES = 16 << 20  # bytes on their way at a time, or a row_block's; there are two such stages on each side
GATHERED_BYTES = 1 << 20  # bytes that a thread gathers at a time; one thread alone is slower than the bus
CHUNK = 16  # bytes that kernels load at a time, and the alignment that they need

Array = Any  # an array of CuPy or torch


class Stage:
    """Pinned memory on the host, and as much on the device, for one chunk at a time."""

    def __init__(self, library: Library, device: int, size: int) -> None:
        self.host = library.pinned(size)
        self.memory = library.scratch(whole_chunks(size), device)()
        self.pointer = library.pointer(self.memory)
        self.done = devices.Event()

    def gather(self, part: NDArray[np.uint8]) -> None:
        """Gather rows of bytes in pinned memory, once the chunk before is done."""
        self.done.synchronize()
        host = self.host[: part.size].reshape(part.shape)

        def copy(rows: slice) -> None:
            host[rows] = part[rows]

        for_slices(len(part), max(1, GATHERED_BYTES // part.shape[1]), copy)

    def send(self, part: NDArray[np.uint8], pointer: int, stream: int) -> None:
        """Gather rows of bytes here, and begin to send them to an address of the device."""
        self.gather(part)
        devices.copy_to_device(pointer, self.host.ctypes.data, part.size, stream)


def upload(fmt: Format, blocks: Blocks, library: Library, device: int, memory: Array | None = None) -> Array:
    """Blocks [N, K / weights] -> bytes of tiles and bounds on the current device; `split` tells them apart.

    Returns once everything is there: kernels prefetch weights before they wait for their stream. memory: bytes on the
    device for both, else new ones.
    """
    n, count = blocks.shape
    stream = library.stream(device)
    memory = empty_tiles(fmt, n, count, library, device, memory)
    if not blocks.size:
        return memory
    kernel, row_blocks, pointer = PACK.load(fmt), row_blocks_of(fmt, count), library.pointer(memory)
    _, along, tile_bytes = tiles.tiles_shape(fmt, n, count * fmt.weights)
    bounds = pointer + bounds_offset(fmt, n, count)

    def pack_chunk(stage: Stage, first: int, part: NDArray[np.uint8]) -> None:
        stage.send(part, stage.pointer, stream)
        target = pointer + first // tiles.ROWS * along * tile_bytes
        launch(kernel, fmt, stage.pointer, target, (bounds + 4 * first,), len(part), count, stream)

    _in_chunks(byte_rows(blocks), row_blocks * tiles.ROWS, library, device, pack_chunk)
    return memory


def upload_into(fmt: Format, blocks: Blocks, memory: Array, library: Library, device: int) -> None:
    """Blocks of a matrix or of experts -> bytes on the device: those that its class holds."""
    matrices = blocks if blocks.ndim == 3 else blocks[None]
    into = _send_numbers if fmt.plain else upload
    for matrix, matrix_memory in zip(matrices, memory.reshape(len(matrices), -1), strict=True):
        into(fmt, matrix, library, device, matrix_memory)


def _send_numbers(fmt: Format, blocks: Blocks, library: Library, device: int, memory: Array) -> None:
    """Plain numbers [N, K] -> memory on the device, as they are."""
    raw, pointer, stream = byte_rows(blocks), library.pointer(memory), library.stream(device)

    def send(stage: Stage, first: int, part: NDArray[np.uint8]) -> None:
        stage.send(part, pointer + first * raw.shape[1], stream)

    _in_chunks(raw, max(1, STAGING_BYTES // raw.shape[1]), library, device, send)


def _in_chunks(
    raw: NDArray[np.uint8], step: int, library: Library, device: int, send: Callable[[Stage, int, Any], None]
) -> None:
    """Call send(stage, first row, rows) for chunks of `step` rows, by two stages in turn, and wait for them."""
    stream, n = library.stream(device), len(raw)
    stages = [Stage(library, device, min(step, n) * raw.shape[1]) for _ in range(min(2, -(-n // step)))]
    for index, first in enumerate(range(0, n, step)):
        stage = stages[index % 2]
        send(stage, first, raw[first : first + step])
        stage.done.record(stream)
    devices.synchronize(stream)


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


def pack(fmt: Format, raw: Array, n: int, count: int, library: Library, device: int) -> Array:
    """Pack n rows of `count` blocks that are on the current device, as bytes in whole chunks of 16, into new memory."""
    stream, memory = library.stream(device), empty_tiles(fmt, n, count, library, device)
    if n * count:
        _pack(fmt, library.pointer(raw), library.pointer(memory), n, count, stream)
        devices.synchronize(stream)
    return memory


def pack_into(fmt: Format, raw: Array, shape: tuple[int, ...], memory: Array, library: Library, device: int) -> None:
    """Pack bytes [..., N, bytes of a row] that are on the current device into the memory of their tiles and bounds."""
    *_, n, k = shape
    count, size = fmt.blocks_in(k), raw.shape[-2] * raw.shape[-1]
    stream, matrices = library.stream(device), raw.reshape(-1, size)
    for matrix, matrix_memory in zip(matrices, memory.reshape(len(matrices), -1), strict=True):
        empty_tiles(fmt, n, count, library, device, matrix_memory)
        aligned = matrix if library.pointer(matrix) % CHUNK == 0 else library.copy(matrix)
        _pack(fmt, library.pointer(aligned), library.pointer(matrix_memory), n, count, stream)
    devices.synchronize(stream)


def _pack(fmt: Format, source: int, target: int, n: int, count: int, stream: int) -> None:
    launch(PACK.load(fmt), fmt, source, target, (target + bounds_offset(fmt, n, count),), n, count, stream)


def tiles_nbytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of the tiles of a matrix [N, K] and of the bounds of its rows; of its numbers for plain formats."""
    if fmt.plain:
        return n * k * fmt.block_bytes
    shape = tiles.tiles_shape(fmt, n, k)
    return prod(shape) + 4 * shape[0] * tiles.ROWS


def bounds_offset(fmt: Format, n: int, count: int) -> int:
    """Bytes of the tiles of n rows of `count` blocks, which the bounds of rows follow."""
    return prod(tiles.tiles_shape(fmt, n, count * fmt.weights))


def empty_tiles(fmt: Format, n: int, count: int, library: Library, device: int, memory: Array | None = None) -> Array:
    """Memory for the tiles of n rows of `count` blocks, then zeros for bounds of all rows of the row_blocks."""
    if memory is None:
        memory = library.scratch(tiles_nbytes(fmt, n, count * fmt.weights), device)()
    size = bounds_offset(fmt, n, count)
    if nbytes := tiles_nbytes(fmt, n, count * fmt.weights) - size:
        devices.fill_zeros(library.pointer(memory) + size, nbytes, library.stream(device))
    return memory


def split(fmt: Format, memory: Array, n: int, k: int, library: Library) -> tuple[Array, Array]:
    """Bytes of a matrix [N, K] -> tiles [row_blocks, tiles along K, bytes of a tile], and the bounds of all rows."""
    shape = tiles.tiles_shape(fmt, n, k)
    return memory[: prod(shape)].reshape(shape), library.view(memory[prod(shape) :], "float32")


def download(fmt: Format, data: Array, shape: tuple[int, int], library: Library, device: int) -> Blocks:
    """Tiles of a matrix [N, K] on the device -> its blocks [N, K / weights]."""
    n, count = shape[0], fmt.blocks_in(shape[1])
    blocks = np.empty((n, count), fmt.dtype)
    if not blocks.size:
        return blocks
    raw, row_bytes, row_blocks = blocks.reshape(-1).view(np.uint8), count * fmt.block_bytes, row_blocks_of(fmt, count)
    step, (_, along, tile_bytes) = row_blocks * tiles.ROWS, data.shape
    with library.on_device(device):
        kernel, stream = UNPACK.load(fmt), library.stream(device)
        chunk = library.scratch(whole_chunks(min(step, n) * row_bytes), device)()
        pointer = library.pointer(chunk)
        for first in range(0, n, step):
            rows, source = min(step, n - first), library.pointer(data) + first // tiles.ROWS * along * tile_bytes
            launch(kernel, fmt, source, pointer, (), rows, count, stream)
            target = raw[first * row_bytes : (first + rows) * row_bytes]
            devices.copy_to_host(target.ctypes.data, pointer, target.size, stream)
    return blocks


def unpack(fmt: Format, pointer: int, rows: slice, k: int, library: Library, device: int) -> Array:
    """Rows of tiles by their address -> bytes of the rows one after the other, in new memory of the current device."""
    count, first, stream = fmt.blocks_in(k), rows.start // tiles.ROWS, library.stream(device)
    row_bytes, skipped = count * fmt.block_bytes, rows.start - first * tiles.ROWS
    raw = library.scratch(whole_chunks((skipped + rows.stop - rows.start) * row_bytes), device)()
    if rows.stop > rows.start and count:
        source = pointer + bounds_offset(fmt, first * tiles.ROWS, count)
        target = library.pointer(raw)
        launch(UNPACK.load(fmt), fmt, source, target, (), skipped + rows.stop - rows.start, count, stream)
    return raw[skipped * row_bytes : (skipped + rows.stop - rows.start) * row_bytes]


def row_blocks_of(fmt: Format, count: int) -> int:
    """The number of row blocks of a chunk, where a row has `count` blocks."""
    return max(1, STAGING_BYTES // (tiles.ROWS * count * fmt.block_bytes))


def whole_chunks(size: int) -> int:
    """Bytes up to the end of a chunk that kernels load."""
    return -(-size // CHUNK) * CHUNK


def launch(
    kernel: Callable[..., None], fmt: Format, source: int, target: int, more: tuple[int, ...], rows: int, count: int,
    stream: int,
) -> None:  # fmt: skip
    """Reorder rows of `count` blocks by their addresses, one CTA a panel of a row_block."""
    along = -(-count * fmt.weights // tiles.columns(fmt))
    panels = -(-rows // tiles.ROWS) * -(-along // tiles.panel_tiles(fmt))
    sizes = np.int64(rows), np.int64(count), np.int64(along)
    kernel((panels,), (tiles.PACK_THREADS,), (source, target, *more, *sizes), stream)
