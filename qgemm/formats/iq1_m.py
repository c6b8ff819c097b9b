"""iq1_m: super-blocks of 16 groups of 16 weights, two points of a grid of 2048 each; 1.75 bits a weight.

offset  bytes  field
     0     32  qs      byte j: the point of weights 8 j, its low eight bits
    32     16  qh      nibble i of byte g: the high three bits of point i of group g; bit 3: whether delta is -1/8
    48      8  scales  word i: sc of groups 4 i to 4 i + 3 in three bits each; bits 12 to 15: bits 4 i to 4 i + 3 of d,
                       a float16

w = d * (2 sc + 1) * (level + delta), levels -1, 0, 1. Codes are 8 * (level + delta); for kernels that is a grid of 4096
points, whose index has delta as its highest bit.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from qgemm.codec import grids, ternary_grid
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots, unpack_slots

DTYPE = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])
GROUPS = 16
NIBBLES = np.arange(0, 16, 4, dtype=np.uint16)
KIND = ternary_grid.Ternary(GROUPS, parts=2, least=1e-7, fudge=1.1125, refit=True)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/ternary_grid.py)."""
    return ternary_grid.encode(KIND, x, importance, pack)


def scale(blocks: Blocks) -> Halves:
    """Blocks [...] -> d [...]."""
    nibbles = (blocks["scales"] >> 12).astype(np.uint16) << NIBBLES
    scale: Halves = np.bitwise_or.reduce(nibbles, axis=-1).view(np.float16)
    return scale


def set_scale(blocks: Blocks, d: Halves) -> None:
    """Writes d [...] into blocks [...]."""
    nibbles = d.view(np.uint16)[..., None] >> NIBBLES << np.uint16(12)
    blocks["scales"] = blocks["scales"] & np.uint16(0xFFF) | nibbles


def pack(d: Halves, sc: Bytes, points: Indices, minus: ternary_grid.Flags) -> Blocks:
    """d [n], sc [n, 16], points and minus [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["qs"], blocks["qh"] = points & 255, pack_slots((points >> 8 | minus << 3).astype(np.uint8), 4)
    blocks["scales"] = (sc.reshape(-1, 4, 4).astype(np.uint16) << np.arange(0, 12, 3, dtype=np.uint16)).sum(axis=2)
    set_scale(blocks, d)
    return blocks


@cache
def points() -> grids.Levels:
    """8 * level + 1 of all points, then 8 * level - 1, [4096, 8]."""
    eights = grids.levels("IQ1_S") * np.int8(8)
    return np.concatenate([eights + np.int8(1), eights - np.int8(1)])


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> 8 * (level + delta) as codes [n, 16, 16], scale d * (2 sc + 1) / 8 [n, 16]."""
    index = blocks["qs"] | unpack_slots(blocks["qh"], 4).astype(np.uint16) << np.uint16(8)
    sc = blocks["scales"][:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    scales = grids.odd_scales(scale(blocks), sc.reshape(-1, 16).astype(np.uint8), 1 / 8)
    return Levels(points()[index].reshape(-1, 16, 16), scales)


GRID = grid.Grid(
    points, 8, 4, 0,
    (
        grid.points("qs", 2, 8, lambda k, s, o: 8 * (8 * k + 2 * s + o)),
        grid.points("qh", 2, 4, lambda k, s, o: 8 * 32 + 4 * (8 * k + 2 * s + o)),
    ),
    (
        grid.BlockField("d", tuple(8 * 48 + 16 * i + bit for i in range(4) for bit in range(12, 16)), half=True),
        grid.BlockField("sc", tuple(8 * 48 + 16 * (g // 4) + 3 * (g % 4) + bit for bit in range(3) for g in range(16))),
    ),
)  # fmt: skip
FORMAT = Format(
    "iq1_m", 256, DTYPE, encode, levels, ggml_type=29, formula="d * (2 * sc + 1) * (grid[q] + delta)",
    scattered_scale=scale, scatter_scale=set_scale,
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
