"""q2_0: 64 weights share one scale, w = d * (q - 1) with q in 0..3.

offset  bytes  field
     0      2  d   float16 scale
     2     16  qs  byte j, bits 2i and 2i + 1: weight 4 j + i
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import Floats, pack_slots, unpack_slots
from qgemm.codec.scales import ternary

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 16)])


def encode(x: Floats) -> Blocks:
    """Values [n, 64] -> blocks [n]: d the largest magnitude, q - 1 = x / d, halves away from 0; never 3."""
    blocks = np.empty(len(x), DTYPE)
    codes, blocks["d"] = ternary(x, lost=0)
    blocks["qs"] = pack_slots(codes, 2)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 64], scale [n, 1], zero 1."""
    return Levels(unpack_slots(blocks["qs"], 2)[:, None], blocks["d"].astype(np.float32)[:, None], zero=1)


FORMAT = Format(
    "q2_0", 64, DTYPE, encode, levels, ggml_type=42, formula="d * (q - 1)",
    tile=TileLayout(slots={"qs": tuple(range(64))}),
)  # fmt: skip
