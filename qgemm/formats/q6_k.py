"""q6_k: super-blocks of 16 groups of 16 weights, w = d * sc * (q - 32) with q in 0..63, sc in -128..127 a group.

offset  bytes  field
     0    128  ql      byte 64 h + j: the low four bits of weight 128 h + j in the low nibble, of weight 128 h + 64 + j
                       in the high   (j < 64)
   128     64  qh      byte 32 h + j, bits 2i and 2i + 1: the high two bits of weight 128 h + 32 i + j   (j < 32)
   192     16  scales  byte g: sc of group g, signed
   208      2  d       float16 scale of the sc
"""

from __future__ import annotations

from functools import partial

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import unpack_nibbles, unpack_planes

DTYPE = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
SLOTS = {
    "ql": tuple(128 * h + 64 * i + j for h in range(2) for j in range(64) for i in range(2)),
    "qh": tuple(128 * h + 32 * i + j for h in range(2) for j in range(32) for i in range(4)),
}
ZERO = 32


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 16, 16], scale d * sc [n, 16], zero 32."""
    low = unpack_nibbles(blocks["ql"].reshape(-1, 64))
    high = unpack_planes(blocks["qh"].reshape(-1, 32), 2)
    d = blocks["d"].astype(np.float32)[:, None]
    with np.errstate(invalid="ignore"):  # inf * 0 is data here
        return Levels((low | high << np.uint8(4)).reshape(-1, 16, 16), d * blocks["scales"], zero=ZERO)


FORMAT = Format(
    "q6_k", 256, DTYPE, levels=levels, ggml_type=14, formula="d * sc * (q - 32)", slots=SLOTS,
    to_tile=partial(overlapping.to_tile, low="ql"), from_tile=partial(overlapping.from_tile, low="ql"),
)  # fmt: skip
