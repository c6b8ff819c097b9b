"""iq3_xxs: super-blocks of 8 groups of 32 weights, eight points of a grid of 256 each; 3.06 bits a weight.

offset  bytes  field
     0      2  d     float16 scale of the sc
     2     64  qs    byte j: the point of weights 4 j
    66     32  rest  word g: signs and sc of group g as in iq2_xxs

w = d * (sc + 1/2) / 2 * level of the point, with its sign.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import grids, lattice
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves

from .iq2_xxs import signs_and_scales, unpack_signs

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("rest", "<u4", 8)])
KIND = lattice.Lattice("IQ3_XXS", 32, True, steps=15, step=0.2, least=1e-8, fudge=1.0125, means=2, flat=0)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 8], points [n, 64], signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["rest"] = d, points, signs_and_scales(signs, sc)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> levels as codes [n, 8, 32], scale d * (sc + 1/2) / 2 [n, 8]."""
    signs, sc = unpack_signs(blocks["rest"])
    codes = grids.signed(grids.levels("IQ3_XXS")[blocks["qs"]].reshape(-1, 32, 8), signs)
    return Levels(codes.reshape(-1, 8, 32), grids.odd_scales(blocks["d"], sc, 1 / 4))


GRID = grid.Grid(
    lambda: grids.levels("IQ3_XXS"), 4, 0, 7,
    (
        grid.points("qs", 4, 8, lambda k, s, o: 16 + 8 * (16 * k + 4 * s + o)),
        *grid.paired_signs(lambda k, s, o: 8 * 66 + 64 * k + 32 * (s // 2) + 7 * (2 * (s % 2) + o)),
    ),
    (
        grid.BlockField("d", grid.bits(0, 16), half=True),
        grid.BlockField("sc", tuple(8 * 66 + 32 * g + bit for g in range(8) for bit in range(28, 32))),
    ),
)  # fmt: skip
FORMAT = Format(
    "iq3_xxs", 256, DTYPE, encode, levels, ggml_type=18, formula="d * (sc + 1/2) / 2 * sign * grid[q]",
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
