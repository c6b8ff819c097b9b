"""iq2_xs: super-blocks of 16 groups of 16 weights, two points of a grid of 512 each; 2.31 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     64  qs      word j: the point of weights 8 j in nine bits, then seven signs, as in iq2_xxs
    66      8  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

w = d * (sc + 1/2) / 4 * level. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import lattice
from qgemm.codec.format import Blocks
from qgemm.codec.grids import Indices
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots

DTYPE = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
KIND = lattice.Lattice("IQ2_XS", 16, True, steps=9, step=0.1, least=1e-15, fudge=1, means=1, flat=None)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 16], points and signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["scales"] = d, points | signs.astype(np.int64) << 9, pack_slots(sc, 4)
    return blocks
