"""q4_1: 32 weights share a scale and a minimum, w = d * q + m with q in 0..15.

offset  bytes  field
     0      2  d   float16 scale
     2      2  m   float16 minimum
     4     16  qs  byte j: weight j in the low nibble, weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import HALVES, Floats, pack_nibbles, unpack_nibbles
from qgemm.codec.scales import blocks_of, with_minimum

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = (max - min) / 15, m = min, q = min(15, trunc((x - m) / d + 0.5))."""
    return pack(with_minimum(x, 15))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale and minimum [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"] = pack_nibbles(levels.codes)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale and minimum [n, 1]."""
    d, m = (blocks[name].astype(np.float32)[:, None] for name in ("d", "m"))
    return Levels(unpack_nibbles(blocks["qs"])[:, None], d, m)


FORMAT = Format(
    "q4_1", 32, DTYPE, encode, levels, ggml_type=3, formula="d * q + m", pack=pack,
    tile=TileLayout(slots={"qs": HALVES}),
)  # fmt: skip
