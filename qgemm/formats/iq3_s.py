"""iq3_s: super-blocks of 8 groups of 32 weights, eight points of a grid of 512 each; 3.44 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     64  qs      byte j: the point of weights 4 j, its low eight bits
    66      8  qh      bit j: the ninth bit of point j
    74     32  signs   byte j: the signs of weights 8 j
   106      4  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

w = d * (2 sc + 1) * level. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import lattice
from qgemm.codec.format import Blocks
from qgemm.codec.grids import Indices
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
KIND = lattice.Lattice(
    "IQ3_S", 32, False, 9, 0.2, least=1e-45, fudge=1.033, means=2, flat=0, all_again=True, gapless=True
)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 8], points [n, 64], signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["signs"], blocks["scales"] = d, points & 255, signs, pack_slots(sc, 4)
    blocks["qh"] = pack_slots((points >> 8).astype(np.uint8), 1)
    return blocks
