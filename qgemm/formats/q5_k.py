"""q5_k: q4_k with a fifth bit, w = d * sc * q - dmin * m with q in 0..31, sc and m in 0..63 a group of 32.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2      2  dmin    float16 scale of the m
     4     12  scales  sc and m of groups 0..7, 6 bits each, as in q4_k
    16     32  qh      byte j, bit g: the fifth bit of weight 32 g + j
    48    128  qs      byte 32 p + j: the low four bits of weight 64 p + j in the low nibble, of weight 64 p + 32 + j
                       in the high   (j < 32)
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, unpack_planes
from qgemm.codec.search import Steps
from qgemm.codec.super_blocks import Affine, with_minimums

from . import q4_k

DTYPE = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
SLOTS = {"qs": q4_k.SLOTS["qs"], "qh": tuple(32 * g + j for j in range(32) for g in range(8))}


KIND = Affine(31, 8, 63, Steps(-0.5, 0.1, 16), rooted=True, means=2, spills=False)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/super_blocks.py)."""
    return with_minimums(KIND, x, importance, pack)


def pack(d: Halves, dmin: Halves, sc: Bytes, m: Bytes, codes: Bytes) -> Blocks:
    """d, dmin [n], sc and m [n, 8], codes [n, 256] -> blocks [n]."""
    blocks, low = np.empty(len(codes), DTYPE), q4_k.pack(d, dmin, sc, m, codes & np.uint8(0x0F))
    for name in low.dtype.names or ():
        blocks[name] = low[name]
    blocks["qh"] = pack_planes(codes >> np.uint8(4), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 8, 32], scale d * sc and minimum -(dmin * m), [n, 8] each."""
    low = q4_k.levels(blocks)
    fifth = unpack_planes(blocks["qh"], 1).reshape(-1, 8, 32)
    return low._replace(codes=low.codes | fifth << np.uint8(4))


FORMAT = Format(
    "q5_k", 256, DTYPE, encode, levels, ggml_type=13, formula="d * sc * q - dmin * m",
    tile=TileLayout(slots=SLOTS, to_tile=overlapping.to_tile, from_tile=overlapping.from_tile),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
