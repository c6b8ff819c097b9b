"""q1_0: 128 weights share one scale, w = d * (2 q - 1) with q in 0..1.

offset  bytes  field
     0      2  d   float16 scale
     2     16  qs  byte j, bit i: weight 8 j + i

Kernels have no code for them: they are decoded on the CPU, for `a16`.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats, pack_slots, to_float16, unpack_slots
from qgemm.codec.search import total

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
WEIGHTS = 128


def encode(x: Floats) -> Blocks:
    """Values [n, 128] -> blocks [n]: d the mean magnitude, summed in order, q whether a value is not negative."""
    blocks = np.empty(len(x), DTYPE)
    wide = np.repeat(x, 2, axis=0) if len(x) == 1 else x  # NumPy would sum a single column in another order
    blocks["d"] = to_float16(total(np.ascontiguousarray(np.abs(wide).T))[: len(x)] / np.float32(WEIGHTS))
    blocks["qs"] = pack_slots((x >= 0).astype(np.uint8), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> their weights [n, 1, 128] float32, as they are."""
    codes = 2 * unpack_slots(blocks["qs"], 1).astype(np.int8) - 1
    return Levels(codes[:, None], blocks["d"].astype(np.float32)[:, None]).decoded()


FORMAT = Format(
    "q1_0", 128, DTYPE, encode, levels, ggml_type=41, formula="d * (2 * q - 1)", decoded_by="NumPy"
)  # fmt: skip
