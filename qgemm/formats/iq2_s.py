"""iq2_s: super-blocks of 16 groups of 16 weights, two points of a grid of 1024 each; 2.56 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     32  qs      byte j: the point of weights 8 j, its low eight bits
    34     32  signs   byte j: the signs of weights 8 j
    66      8  qh      bits 2 j and 2 j + 1: the high two bits of point j
    74      8  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

w = d * (sc + 1/2) / 4 * level of the point, with its sign.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import grids, lattice
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots, unpack_slots

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
KIND = lattice.Lattice("IQ2_S", 16, False, steps=9, step=0.1, least=1e-8, fudge=0.9875, means=2, flat=0.25)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 16], points and signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["signs"] = d, points & 255, signs
    blocks["qh"], blocks["scales"] = pack_slots((points >> 8).astype(np.uint8), 2), pack_slots(sc, 4)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> levels as codes [n, 16, 16], scale d * (sc + 1/2) / 4 [n, 16]."""
    index = blocks["qs"] | unpack_slots(blocks["qh"], 2).astype(np.uint16) << np.uint16(8)
    codes = grids.signed(grids.levels("IQ2_S")[index], blocks["signs"])
    return Levels(codes.reshape(-1, 16, 16), grids.odd_scales(blocks["d"], unpack_slots(blocks["scales"], 4), 1 / 8))


GRID = grid.Grid(
    lambda: grids.levels("IQ2_S"), 8, 2, 8,
    (
        grid.points("qs", 2, 8, lambda k, s, o: 16 + 8 * (8 * k + 2 * s + o)),
        grid.points("qh", 2, 2, lambda k, s, o: 8 * 66 + 2 * (8 * k + 2 * s + o)),
        *grid.signs(lambda k, s, o: 8 * 34 + 64 * k + 16 * s + 4 * o),
    ),
    (grid.BlockField("d", grid.bits(0, 16), half=True), grid.BlockField("sc", grid.bits(8 * 74, 64))),
)  # fmt: skip
FORMAT = Format(
    "iq2_s", 256, DTYPE, encode, levels, ggml_type=22, formula="d * (sc + 1/2) / 4 * sign * grid[q]",
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
