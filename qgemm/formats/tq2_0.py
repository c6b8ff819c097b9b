"""tq2_0: super-blocks of 256 weights of -1, 0, 1 times a scale, w = d * (q - 1) with q in 0..2.

offset  bytes  field
     0     64  qs  byte 32 h + j, bits 2i and 2i + 1: weight 128 h + 32 i + j   (j < 32)
    64      2  d   float16 scale
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, unpack_planes
from qgemm.codec.scales import ternary

DTYPE = np.dtype([("qs", "u1", 64), ("d", "<f2")])
SLOTS = {"qs": tuple(128 * h + 32 * i + j for h in range(2) for j in range(32) for i in range(4))}


def encode(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: d the largest magnitude, q - 1 = x / d, halves away from 0."""
    return pack(*ternary(x, lost=1))


def pack(codes: Bytes, d: Halves) -> Blocks:
    """Codes q [n, 256], d [n] -> blocks [n]."""
    blocks = np.empty(len(codes), DTYPE)
    blocks["d"], blocks["qs"] = d, pack_planes(codes.reshape(-1, 128), 2).reshape(-1, 64)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 256], scale [n, 1], zero 1."""
    codes = unpack_planes(blocks["qs"].reshape(-1, 32), 2).reshape(-1, 1, 256)
    return Levels(codes, blocks["d"].astype(np.float32)[:, None], zero=1)


FORMAT = Format(
    "tq2_0", 256, DTYPE, encode, levels, ggml_type=35, formula="d * (q - 1)",
    tile=TileLayout(slots=SLOTS),
)  # fmt: skip
