"""q3_k: super-blocks of 16 groups of 16 weights, w = d * (sc - 32) * (q - 4) with q in 0..7, sc in 0..63 a group.

offset  bytes  field
     0     32  hmask   byte j, bit i: the high bit of weight 32 i + j
    32     64  qs      byte 32 h + j, bits 2i and 2i + 1: the low two bits of weight 128 h + 32 i + j   (j < 32)
    96     12  scales  byte i: low four bits of sc of group i in the low nibble, of group i + 8 in the high  (i < 8)
                       byte 8 + i, bits 2j and 2j + 1: the high two bits of sc of group i + 4 j   (i, j < 4)
   108      2  d       float16 scale of the sc

The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes
from qgemm.codec.super_blocks import Symmetric, without_minimums

DTYPE = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
ZERO, ZERO_SCALE = 4, 32
KIND = Symmetric(ZERO, 16, ZERO_SCALE, moved=True, means=2, least=1e-45, empty=-ZERO_SCALE)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/super_blocks.py)."""
    return without_minimums(KIND, x, importance, pack)


def pack(d: Halves, sc: NDArray[np.int8], codes: Bytes) -> Blocks:
    """d [n], sc [n, 16] in -32..31, codes [n, 256] -> blocks [n]."""
    blocks, biased = np.empty(len(codes), DTYPE), (sc + np.int8(ZERO_SCALE)).astype(np.uint8)
    low, high = biased & np.uint8(0x0F), biased >> np.uint8(4)
    blocks["d"] = d
    blocks["scales"] = np.hstack([low[:, :8] | low[:, 8:] << np.uint8(4), pack_planes(high, 2)])
    blocks["qs"] = pack_planes((codes & np.uint8(3)).reshape(-1, 128), 2).reshape(-1, 64)
    blocks["hmask"] = pack_planes(codes >> np.uint8(2), 1)
    return blocks
