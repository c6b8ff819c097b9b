"""iq2_s: super-blocks of 16 groups of 16 weights, two points of a grid of 1024 each; 2.56 bits a weight.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2     32  qs      byte j: the point of weights 8 j, its low eight bits
    34     32  signs   byte j: the signs of weights 8 j
    66      8  qh      bits 2 j and 2 j + 1: the high two bits of point j
    74      8  scales  byte g: sc of group 2 g in the low nibble, of group 2 g + 1 in the high

w = d * (sc + 1/2) / 4 * level. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import lattice
from qgemm.codec.format import Blocks
from qgemm.codec.grids import Indices
from qgemm.codec.packing import Bytes, Floats, Halves, pack_slots

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
KIND = lattice.Lattice("IQ2_S", 16, False, steps=9, step=0.1, least=1e-8, fudge=0.9875, means=2, flat=0.25)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 16], points and signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["signs"] = d, points & 255, signs
    blocks["qh"], blocks["scales"] = pack_slots((points >> 8).astype(np.uint8), 2), pack_slots(sc, 4)
    return blocks
