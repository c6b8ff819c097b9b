"""q5_1: 32 weights share a scale and a minimum, w = d * q + m with q in 0..31.

offset  bytes  field
     0      2  d   float16 scale
     2      2  m   float16 minimum
     4      4  qh  bit j: the fifth bit of weight j (little-endian)
     8     16  qs  byte j: the low four bits of weight j in the low nibble, of weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import HALVES, IN_ORDER, Floats, pack_fives, unpack_fives
from qgemm.codec.scales import blocks_of, with_minimum

DTYPE = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = (max - min) / 31, m = min, q = trunc((x - m) / d + 0.5)."""
    return pack(with_minimum(x, 31))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale and minimum [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"], blocks["qh"] = pack_fives(levels.codes)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale and minimum [n, 1]."""
    d, m = (blocks[name].astype(np.float32)[:, None] for name in ("d", "m"))
    return Levels(unpack_fives(blocks["qs"], blocks["qh"])[:, None], d, m)


FORMAT = Format(
    "q5_1", 32, DTYPE, encode, levels, ggml_type=7, formula="d * q + m", pack=pack,
    tile=TileLayout(slots={"qs": HALVES, "qh": IN_ORDER}, to_tile=overlapping.to_tile, from_tile=overlapping.from_tile),
)  # fmt: skip
