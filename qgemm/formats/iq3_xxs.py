"""iq3_xxs: super-blocks of 8 groups of 32 weights, eight points of a grid of 256 each; 3.06 bits a weight.

offset  bytes  field
     0      2  d     float16 scale of the sc
     2     64  qs    byte j: the point of weights 4 j
    66     32  rest  of group g a word: signs and sc as in iq2_xxs

w = d * (sc + 1/2) / 2 * level. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import lattice
from qgemm.codec.format import Blocks
from qgemm.codec.grids import Indices
from qgemm.codec.packing import Bytes, Floats, Halves

from .iq2_xxs import signs_and_scales

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("rest", "<u4", 8)])
KIND = lattice.Lattice("IQ3_XXS", 32, True, steps=15, step=0.2, least=1e-8, fudge=1.0125, means=2, flat=0)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/lattice.py)."""
    return lattice.encode(KIND, x, importance, pack)


def pack(d: Halves, sc: Bytes, points: Indices, signs: Bytes) -> Blocks:
    """d [n], sc [n, 8], points [n, 64], signs [n, 32] -> blocks [n]."""
    blocks = np.empty(len(d), DTYPE)
    blocks["d"], blocks["qs"], blocks["rest"] = d, points, signs_and_scales(signs, sc)
    return blocks
