"""Tiles of formats whose weights are points of a grid: a permutation of the bits of blocks (codec/layouts/grid.py).

A lane field of a k_block is [warp][8 g * owners], in the order of the quads; a field per block is as in any tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.codec.layouts.grid import K_BLOCKS, Grid

WARPS, G = 4, 8  # warps of 16 rows, quads of lanes
MAX_TABLE = 64 << 10  # bytes of a table of points in shared memory
BANKS = 128  # bytes of a row of shared memory, one word from every bank

Bits = NDArray[np.intp]


class Table(NamedTuple):
    """The levels of all points as bytes in shared memory, `copies` of each point side by side.

    Copies let lanes read from different banks; lanes that load the same point share a copy.
    """

    points: int
    entry: int
    copies: int

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.points * self.entry * self.copies


def table(grid: Grid) -> Table:
    """The table of a grid."""
    points, entry = grid.points().shape
    return Table(points, entry, min(BANKS // entry, MAX_TABLE // (points * entry)))


def lane_fields(grid: Grid) -> list[tuple[Any, ...]]:
    """The dtype of a k_block, as a list."""
    return [(field.name, field.dtype, (WARPS, G * field.owners)) for field in grid.lanes]


def block_fields(grid: Grid) -> list[tuple[Any, ...]]:
    """The dtype of the fields per block, as a list."""
    shapes = ((field, (1, 2) if field.half else (1, len(field.bits) // 16, 2)) for field in grid.per_block)
    return [(field.name, "<f2" if field.half else "<u2", (WARPS, G, *shape)) for field, shape in shapes]


def pack(fmt: Format, blocks: Blocks, tiles: NDArray[Any]) -> None:
    """Blocks [row_blocks * 64, tiles along K] -> tiles [row_blocks, tiles along K]."""
    row_blocks, along = tiles.shape
    of_blocks = np.unpackbits(np.ascontiguousarray(blocks)[..., None].view(np.uint8), axis=-1, bitorder="little")
    #                         row_block warp r g tile bit -> row_block tile warp g r bit
    rows = of_blocks.reshape(row_blocks, WARPS, 2, G, along, -1).transpose(0, 4, 1, 3, 2, 5)
    flat = np.ascontiguousarray(rows).reshape(row_blocks, along, WARPS, G, -1)
    for target, source in _fields(fmt, tiles):
        packed = np.packbits(flat[..., source], axis=-1, bitorder="little")
        #      ... warp g | bytes of a quad -> words of the tile
        target[...] = packed.view(target.dtype)


def unpack(fmt: Format, tiles: NDArray[Any]) -> Blocks:
    """The inverse of `pack`: -> blocks [row_blocks * 64, tiles along K]."""
    row_blocks, along = tiles.shape
    size = 8 * fmt.block_bytes
    flat = np.empty((row_blocks, along, WARPS, G, 2 * size), np.uint8)
    for words, source in _fields(fmt, tiles):
        flat[..., source] = np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little").reshape(
            *words.shape[:-1], -1
        )
    #                        row_block tile warp g r bit -> row_block warp r g tile bit
    rows = flat.reshape(row_blocks, along, WARPS, G, 2, size).transpose(0, 2, 4, 3, 1, 5)
    packed = np.packbits(rows.reshape(row_blocks * WARPS * 2 * G, along, size), axis=-1, bitorder="little")
    return packed.view(fmt.dtype)[..., 0]


def _fields(fmt: Format, tiles: NDArray[Any]) -> list[tuple[NDArray[Any], Bits]]:
    """Each field of tiles as a view [row_block, tile, warp, g, words of a quad], and the source of each of its bits.

    Sources [words * bits] are numbers of bits of the blocks of rows g and g + 8, one block after the other.
    """
    assert fmt.tile.grid is not None
    size, bits = 8 * fmt.block_bytes, []
    for field in fmt.tile.grid.lanes:
        row = size * np.array(field.rows) + np.array(field.bits)
        for k_block in range(K_BLOCKS):
            source = field.along * k_block + field.apart * np.arange(field.owners)[:, None] + row
            words = tiles["k_blocks"][field.name][:, :, k_block]
            bits.append((words.reshape(*tiles.shape, WARPS, G, field.owners), source.reshape(-1)))
    for block_field in fmt.tile.grid.per_block:
        bits_of_words = np.array(block_field.bits).reshape(-1, 16)
        words = tiles[block_field.name].view(np.uint16)
        source = bits_of_words[:, None] + size * np.arange(2)[:, None]  # word, row
        bits.append((words.reshape(*tiles.shape, WARPS, G, -1), source.reshape(-1)))
    return bits
