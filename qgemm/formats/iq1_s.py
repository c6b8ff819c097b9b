"""iq1_s: super-blocks of 8 groups of 32 weights, four points of a grid of 2048 each; 1.56 bits a weight.

offset  bytes  field
     0      2  d   float16 scale of the sc
     2     32  qs  byte j: the point of weights 8 j, its low eight bits
    34     16  qh  word g: the high three bits of point i of group g from bit 3 i on, sc in bits 12 to 14, in bit 15
                   whether delta is -1/8

w = d * (2 sc + 1) * (level + delta), levels -1, 0, 1. Codes are 8 * level, with an eighth of the scale,
and the minimum is plus or minus that; where d is zero or infinite codes are 8 * (level + delta) and the minimum is -0.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from qgemm.codec import grids, ternary_grid
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
GROUPS = 8
KIND = ternary_grid.Ternary(GROUPS, parts=1, least=1e-12, fudge=1.125)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/ternary_grid.py)."""
    return ternary_grid.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, minus: ternary_grid.Flags) -> Blocks:
    """d [n], sc [n, 8], points and minus [n, 32], alike in a group -> blocks [n]."""
    blocks, high = np.empty(len(d), DTYPE), (points >> 8).reshape(-1, GROUPS, 4)
    blocks["d"], blocks["qs"] = d, points & 255
    blocks["qh"] = (high << np.arange(0, 12, 3)).sum(axis=2) | sc.astype(np.int64) << 12
    blocks["qh"] |= minus[:, ::4].astype(np.uint16) << np.uint16(15)
    return blocks


@cache
def points() -> grids.Levels:
    """8 * level [2048, 8]."""
    return grids.levels("IQ1_S") * np.int8(8)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> 8 * level as codes [n, 8, 32], scale d * (2 sc + 1) / 8 and minimum, plus or minus that, [n, 8]."""
    qh = blocks["qh"][:, :, None]
    index = blocks["qs"].reshape(-1, 8, 4) | (qh >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)) << np.uint16(8)
    sc = (blocks["qh"] >> np.uint16(12) & np.uint16(7)).astype(np.uint8)
    scale = grids.odd_scales(blocks["d"], sc, 1 / 8)
    codes, sign = points()[index].reshape(-1, 8, 32), np.where(blocks["qh"] >> np.uint16(15), np.int8(-1), np.int8(1))
    # An infinite scale times a level of 0 would be NaN, and a zero would lose its sign in the sum with the minimum: in
    # these cases codes include the sign.
    alone = np.isinf(scale) | (scale == 0)
    codes = codes + (sign * alone)[:, :, None] if alone.any() else codes
    return Levels(codes, scale, np.where(alone, np.float32(-0.0), sign * scale))


GRID = grid.Grid(
    points, 8, 3, 0,
    (
        grid.points("qs", 2, 8, lambda k, s, o: 16 + 8 * (8 * k + 2 * s + o)),
        grid.points("qh", 2, 2, lambda k, s, o: 8 * 34 + 32 * k + 16 * (s // 2) + 3 * (2 * (s % 2) + o)),
        grid.points("qt", 2, 1, lambda k, s, o: 8 * 34 + 32 * k + 16 * (s // 2) + 3 * (2 * (s % 2) + o) + 2),
    ),
    (
        grid.BlockField("d", grid.bits(0, 16), half=True),
        grid.BlockField("sc", tuple(8 * 34 + 16 * g + bit for g in range(8) for bit in range(12, 16))),
    ),
)  # fmt: skip
FORMAT = Format(
    "iq1_s", 256, DTYPE, encode, levels, ggml_type=19, formula="d * (2 * sc + 1) * (grid[q] + delta)",
    tile=TileLayout(grid=GRID, code_exponent=0),
    encoding=Encoding(weighted=encode, needs_importance=True),
)  # fmt: skip
