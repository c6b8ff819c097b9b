"""q8_0: 32 weights share one scale, w = d * q with q in -127..127.

offset  bytes  field
     0      2  d   float16 scale
     2     32  qs  byte j: weight j, signed
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.layouts import signed_bytes
from qgemm.codec.packing import IN_ORDER, Floats, to_float16
from qgemm.codec.scales import signed_codes

DTYPE = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = absmax / 127, q = x / d rounded half away from zero."""
    return pack(Levels(*signed_codes(x)))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] int8, scale [n] -> blocks [n]."""
    assert levels.scale is not None
    blocks = np.empty(len(levels.codes), DTYPE)
    blocks["d"] = to_float16(levels.scale)
    blocks["qs"] = levels.codes
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1]."""
    return Levels(blocks["qs"][:, None], blocks["d"].astype(np.float32)[:, None])


FORMAT = Format(
    "q8_0", 32, DTYPE, encode, levels, ggml_type=8, formula="d * q", pack=pack,
    tile=TileLayout(slots={"qs": IN_ORDER}, to_tile=signed_bytes.to_tile, from_tile=signed_bytes.from_tile),
)  # fmt: skip
