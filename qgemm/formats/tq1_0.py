"""tq1_0: super-blocks of 256 weights of -1, 0, 1 times a scale, w = d * (q - 1), five q of 0..2 in a byte.

offset  bytes  field
     0     48  qs  byte j: weights j + 32 i of the first 160 (j < 32); byte 32 + j: 160 + j + 16 i (j < 16); i < 5
    48      4  qh  byte j: weights 240 + j + 4 i, i < 4
    52      2  d   float16 scale

qgemm/codec/layouts/ternary.py has the digits of a byte. A device tile has as many bytes, each with five weights of a
lane (qgemm/cuda/layout/ternary.py).
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.layouts.ternary import Part, Ternary
from qgemm.codec.packing import Floats
from qgemm.codec.scales import ternary

DTYPE = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
DIGITS = Ternary((Part("qs", 0, 32, 5, 0), Part("qs", 32, 16, 5, 160), Part("qh", 0, 4, 4, 240)))


def encode(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: d the largest magnitude, q - 1 = x / d, halves away from 0."""
    blocks = np.empty(len(x), DTYPE)
    codes, blocks["d"] = ternary(x, lost=1)
    DIGITS.pack(codes, blocks)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 256], scale [n, 1], zero 1."""
    return Levels(DIGITS.unpack(blocks)[:, None], blocks["d"].astype(np.float32)[:, None], zero=1)


FORMAT = Format(
    "tq1_0", 256, DTYPE, encode, levels, ggml_type=34, formula="d * (q - 1)",
    tile=TileLayout(digits=DIGITS),
)  # fmt: skip
