"""iq3_s: super-blocks of 8 groups of 32 weights, eight points of a grid of 512 each; 3.44 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     64  qs      byte j: the point of weights 4 j, its low eight bits
    66      8  qh      bit j: the ninth bit of point j
    74     32  signs   byte j: the signs of weights 8 j
   106      4  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

w = d * (2 sc + 1) * level of the point, with its sign.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import grids, lattice
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots, unpack_slots

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
KIND = lattice.Lattice(
    "IQ3_S", 32, False, 9, 0.2, least=1e-45, fudge=1.033, means=2, flat=0, refit_all=True, gapless=True
)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 8], points [n, 64], signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["signs"], blocks["scales"] = d, points & 255, signs, pack_slots(sc, 4)
    blocks["qh"] = pack_slots((points >> 8).astype(np.uint8), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> levels as codes [n, 8, 32], scale d * (2 sc + 1) [n, 8]."""
    index = blocks["qs"] | unpack_slots(blocks["qh"], 1).astype(np.uint16) << np.uint16(8)
    codes = grids.signed(grids.levels("IQ3_S")[index].reshape(-1, 32, 8), blocks["signs"])
    return Levels(codes.reshape(-1, 8, 32), grids.odd_scales(blocks["d"], unpack_slots(blocks["scales"], 4)))


GRID = grid.Grid(
    lambda: grids.levels("IQ3_S"), 4, 1, 8,
    (
        grid.points("qs", 4, 8, lambda k, s, o: 16 + 8 * (16 * k + 4 * s + o)),
        grid.points("qh", 4, 1, lambda k, s, o: 8 * 66 + 16 * k + 4 * s + o),
        *grid.signs(lambda k, s, o: 8 * 74 + 64 * k + 16 * s + 4 * o),
    ),
    (grid.BlockField("d", grid.bits(0, 16), half=True), grid.BlockField("sc", grid.bits(8 * 106, 32))),
)  # fmt: skip
FORMAT = Format(
    "iq3_s", 256, DTYPE, encode, levels, ggml_type=21, formula="d * (2 * sc + 1) * sign * grid[q]",
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
