"""iq2_xxs: super-blocks of 8 groups of 32 weights, four points of a grid of 256 each; 2.06 bits a weight.

offset  bytes  field
     0      2  d   float16 scale of the sc
     2     64  qs  of group g two words: the points of weights 8 j in byte j of the first; in the second seven signs
                   of weights 8 j from bit 7 j on, the eighth of which makes the minuses even, and sc in bits 28 to 31

w = d * (sc + 1/2) / 4 * level. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import lattice
from qgemm.codec.format import Blocks
from qgemm.codec.grids import Indices
from qgemm.codec.packing import Bytes, Floats, Halves

DTYPE = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
KIND = lattice.Lattice("IQ2_XXS", 32, True, steps=6, step=0.1, least=1e-15, fudge=1, means=1, flat=None, first_fit=True)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/lattice.py)."""
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
