"""tq2_0: super-blocks of 256 weights of -1, 0, 1 times a scale, w = d * (q - 1) with q in 0..2.

offset  bytes  field
     0     64  qs  byte 32 h + j, bits 2i and 2i + 1: weight 128 h + 32 i + j   (j < 32)
    64      2  d   float16 scale

The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Floats, pack_planes
from qgemm.codec.scales import ternary

DTYPE = np.dtype([("qs", "u1", 64), ("d", "<f2")])


def encode(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: d the largest magnitude, q - 1 = x / d, halves away from 0."""
    blocks = np.empty(len(x), DTYPE)
    codes, blocks["d"] = ternary(x)
    blocks["qs"] = pack_planes(codes.reshape(-1, 128), 2).reshape(-1, 64)
    return blocks
