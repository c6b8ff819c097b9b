"""q8_1: q8_0 with the sum of its weights, w = d * q with q in -127..127: ggml's format of activations.

    offset  bytes  field
         0      2  d   float16 scale
         2      2  s   float16 sum of the 32 weights: d * sum(q), from the unrounded d
         4     32  qs  byte j: weight j, signed

36 bytes, as in ggml's C struct; the gguf package 0.19 counts 40.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, TileLayout
from qgemm.codec.layouts import signed_bytes
from qgemm.codec.packing import IN_ORDER, Floats, to_float16
from qgemm.codec.scales import signed_codes

from .q8_0 import levels

DTYPE = np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)])


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d and q as in q8_0, s = d * sum(q)."""
    q, d = signed_codes(x)
    blocks = np.empty(len(x), DTYPE)
    blocks["d"] = to_float16(d)
    blocks["s"] = to_float16(d * q.sum(axis=1, dtype=np.int32).astype(np.float32))
    blocks["qs"] = q
    return blocks


FORMAT = Format(
    "q8_1", 32, DTYPE, encode, levels, ggml_type=9, formula="d * q",
    tile=TileLayout(slots={"qs": IN_ORDER}, to_tile=signed_bytes.to_tile, from_tile=signed_bytes.from_tile),
)  # fmt: skip
