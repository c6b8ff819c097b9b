"""q1_0: 128 weights share one scale, w = d * (2 q - 1) with q in 0..1.

offset  bytes  field
     0      2  d   float16 scale
     2     16  qs  byte j, bit i: weight 8 j + i
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import Floats, pack_slots, to_float16, unpack_slots
from qgemm.codec.search import total

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
WEIGHTS = 128
VALUES = np.array([-1, 1], np.int8)
CODEBOOK = VALUES.astype(np.float32)
CODEBOOK.flags.writeable = False


def encode(x: Floats) -> Blocks:
    """Values [n, 128] -> blocks [n]: d the mean magnitude, summed in order, q whether a value is not negative."""
    blocks = np.empty(len(x), DTYPE)
    wide = np.repeat(x, 2, axis=0) if len(x) == 1 else x  # NumPy would sum a single column in another order
    blocks["d"] = to_float16(total(np.ascontiguousarray(np.abs(wide).T))[: len(x)] / np.float32(WEIGHTS))
    blocks["qs"] = pack_slots((x >= 0).astype(np.uint8), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> 2 q - 1 as codes [n, 1, 128], scale [n, 1]."""
    return Levels(VALUES.take(unpack_slots(blocks["qs"], 1))[:, None], blocks["d"].astype(np.float32)[:, None])


FORMAT = Format(
    "q1_0", WEIGHTS, DTYPE, encode, levels, ggml_type=41, formula="d * (2 * q - 1)", codebook=CODEBOOK,
    tile=TileLayout(slots={"qs": tuple(range(WEIGHTS))}),
)  # fmt: skip
