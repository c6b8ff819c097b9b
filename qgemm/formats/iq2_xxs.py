"""iq2_xxs: super-blocks of 8 groups of 32 weights, four points of a grid of 256 each; 2.06 bits a weight.

offset  bytes  field
     0      2  d   float16 scale of the sc
     2     64  qs  two words of group g: byte j of the first is the point of weights 8 j; the second has the first seven
                   signs of weights 8 j from bit 7 j on (the eighth makes the number of minuses even), and sc in bits
                   28 to 31

w = d * (sc + 1/2) / 4 * level of the point, with its sign.
qgemm/codec/layouts/grid.py describes the layout of a device tile.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import grids, lattice
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.grids import Indices
from qgemm.codec.layouts import grid
from qgemm.codec.packing import Bytes, Floats, Halves, Words

DTYPE = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
KIND = lattice.Lattice("IQ2_XXS", 32, True, steps=6, step=0.1, least=1e-15, fudge=1, means=1, flat=None, first_fit=True)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 8], points and signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"] = d
    blocks["qs"][:, :, 0] = points.astype(np.uint8).view("<u4")
    blocks["qs"][:, :, 1] = signs_and_scales(signs, sc)
    return blocks


def signs_and_scales(signs: Bytes, sc: Bytes) -> Indices:
    """Signs [n, 32] of seven bits, sc [n, 8] of four -> words [n, 8]."""
    words: Indices = (signs.reshape(-1, 8, 4).astype(np.int64) << np.arange(0, 28, 7)).sum(axis=2)
    return words | sc.astype(np.int64) << 28


def unpack_signs(words: Words) -> tuple[Bytes, Bytes]:
    """The inverse of `signs_and_scales`, with the eighth signs: -> [n, 32], sc [n, 8]."""
    sevens = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return grids.with_parity(sevens.astype(np.uint8)).reshape(-1, 32), (words >> np.uint32(28)).astype(np.uint8)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> levels as codes [n, 8, 32], scale d * (sc + 1/2) / 4 [n, 8]."""
    signs, sc = unpack_signs(blocks["qs"][:, :, 1])
    index = np.ascontiguousarray(blocks["qs"][:, :, 0]).view(np.uint8)
    codes = grids.signed(grids.levels("IQ2_XXS")[index], signs)
    return Levels(codes.reshape(-1, 8, 32), grids.odd_scales(blocks["d"], sc, 1 / 8))


GRID = grid.Grid(
    lambda: grids.levels("IQ2_XXS"), 8, 0, 7,
    (
        grid.points("qs", 2, 8, lambda k, s, o: 16 + 128 * k + 64 * (s // 2) + 8 * (2 * (s % 2) + o)),
        *grid.paired_signs(lambda k, s, o: 48 + 128 * k + 64 * (s // 2) + 7 * (2 * (s % 2) + o)),
    ),
    (
        grid.BlockField("d", grid.bits(0, 16), half=True),
        grid.BlockField("sc", tuple(48 + 64 * g + bit for g in range(8) for bit in range(28, 32))),
    ),
)  # fmt: skip
FORMAT = Format(
    "iq2_xxs", 256, DTYPE, encode, levels, ggml_type=16, formula="d * (sc + 1/2) / 4 * sign * grid[q]",
    tile=TileLayout(grid=GRID, code_exponent=24),
    encoding=Encoding(weighted=encode, needs_importance=True),
)  # fmt: skip
