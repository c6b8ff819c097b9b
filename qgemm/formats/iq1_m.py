"""iq1_m: super-blocks of 16 groups of 16 weights, two points of a grid of 2048 each; 1.75 bits a weight.

offset  bytes  field
     0     32  qs      byte j: the point of weights 8 j, its low eight bits
    32     16  qh      of group g a nibble for each of its points: the high three bits; bit 3: whether delta is -1/8
    48      8  scales  of groups 4 i word i: three bits of sc each, and in bits 12 to 15 those from 4 i on of d, float16

w = d * (2 sc + 1) * (level + delta), levels -1, 0, 1. The gguf package decodes them (through_gguf.py); here they are
written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import ternary_grid
from qgemm.codec.format import Blocks
from qgemm.codec.packing import Floats, Halves, pack_slots, to_float16
from qgemm.codec.super_blocks import in_shares, spread_of, to_columns

DTYPE = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])
GROUPS = 16
FUDGE = np.float32(1.1125)  # d is that much larger
LEAST = 1e-7  # groups with no larger magnitude are zeros to ggml


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256], and what each weighs -> blocks [n] (codec/ternary_grid.py)."""
    return in_shares(x, importance, _encoded)


def scale(blocks: Blocks) -> Halves:
    """Blocks [n] -> d [n]."""
    nibbles = (blocks["scales"] >> 12).astype(np.uint16) << np.arange(0, 16, 4, dtype=np.uint16)
    found: Halves = np.bitwise_or.reduce(nibbles, axis=1).view(np.float16)
    return found


def _encoded(x: Floats, importance: Floats | None) -> Blocks:
    n, columns = len(x), to_columns(x, GROUPS)
    weights = columns * columns
    if importance is not None:
        weights = to_columns(importance, GROUPS) * spread_of(x, columns, GROUPS, 2)
    fit = ternary_grid.fitted(columns, weights, LEAST, 2)
    d, sc = ternary_grid.rounded(fit.scale.reshape(n, GROUPS))
    half = to_float16(ternary_grid.refitted(x, weights, fit, d, sc) * FUDGE).view(np.uint16).astype(np.int64)
    points, minus = fit.points.T.reshape(n, 32), fit.minus.T.reshape(n, 32)
    blocks = np.empty(n, DTYPE)
    blocks["qs"], blocks["qh"] = points & 255, pack_slots((points >> 8 | minus << 3).astype(np.uint8), 4)
    three = (sc.reshape(n, 4, 4).astype(np.int64) << np.arange(0, 12, 3)).sum(axis=2)
    blocks["scales"] = three | (half[:, None] >> np.arange(0, 16, 4) & 15) << 12
    return blocks
