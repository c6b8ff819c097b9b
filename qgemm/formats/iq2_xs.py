"""iq2_xs: super-blocks of 16 groups of 16 weights, two points of a grid of 512 each; 2.31 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     64  qs      word j: the point of weights 8 j in nine bits, then seven signs, as in iq2_xxs
    66      8  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

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

DTYPE = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
KIND = lattice.Lattice("IQ2_XS", 16, True, steps=9, step=0.1, least=1e-15, fudge=1, means=1, flat=None)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 16], points and signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["scales"] = d, points | signs.astype(np.int64) << 9, pack_slots(sc, 4)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> levels as codes [n, 16, 16], scale d * (sc + 1/2) / 4 [n, 16]."""
    signs = grids.with_parity((blocks["qs"] >> np.uint16(9)).astype(np.uint8))
    codes = grids.signed(grids.levels("IQ2_XS")[blocks["qs"] & np.uint16(511)], signs)
    return Levels(codes.reshape(-1, 16, 16), grids.odd_scales(blocks["d"], unpack_slots(blocks["scales"], 4), 1 / 8))


GRID = grid.Grid(
    lambda: grids.levels("IQ2_XS"), 8, 1, 7,
    (
        grid.points("qs", 2, 8, lambda k, s, o: 16 + 16 * (8 * k + 2 * s + o)),
        grid.points("qh", 2, 1, lambda k, s, o: 24 + 16 * (8 * k + 2 * s + o)),
        *grid.paired_signs(lambda k, s, o: 25 + 16 * (8 * k + 2 * s + o)),
    ),
    (grid.BlockField("d", grid.bits(0, 16), half=True), grid.BlockField("sc", grid.bits(8 * 66, 64))),
)  # fmt: skip
FORMAT = Format(
    "iq2_xs", 256, DTYPE, encode, levels, ggml_type=17, formula="d * (sc + 1/2) / 4 * sign * grid[q]",
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode, needs_importance=True),
)  # fmt: skip
