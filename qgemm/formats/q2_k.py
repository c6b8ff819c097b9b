"""q2_k: super-blocks of 16 groups of 16 weights, w = d * sc * q - dmin * m with q in 0..3, sc and m in 0..15 a group.

offset  bytes  field
     0     16  scales  byte g: sc of group g in the low nibble, m in the high
    16     64  qs      byte 32 h + j, bits 2i and 2i + 1: weight 128 h + 32 i + j   (j < 32)
    80      2  d       float16 scale of the sc
    82      2  dmin    float16 scale of the m
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, unpack_planes
from qgemm.codec.search import Steps
from qgemm.codec.super_blocks import Affine, with_minimums

DTYPE = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
SLOTS = {"qs": tuple(128 * h + 32 * i + j for h in range(2) for j in range(32) for i in range(4))}
KIND = Affine(3, 16, 15, Steps(-0.5, 0.1, 16, absolute=True), rooted=False, means=1, spills=True)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/super_blocks.py)."""
    return with_minimums(KIND, x, importance, pack)


def pack(d: Halves, dmin: Halves, sc: Bytes, m: Bytes, codes: Bytes) -> Blocks:
    """d, dmin [n], sc and m [n, 16], codes [n, 256] -> blocks [n]."""
    blocks = np.empty(len(codes), DTYPE)
    blocks["d"], blocks["dmin"], blocks["scales"] = d, dmin, sc | m << np.uint8(4)
    blocks["qs"] = pack_planes(codes.reshape(-1, 128), 2).reshape(-1, 64)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 16, 16], scale d * sc and minimum -(dmin * m), [n, 16] each."""
    codes = unpack_planes(blocks["qs"].reshape(-1, 32), 2).reshape(-1, 16, 16)
    d, dmin = (blocks[name].astype(np.float32)[:, None] for name in ("d", "dmin"))
    sc, m = blocks["scales"] & np.uint8(0x0F), blocks["scales"] >> np.uint8(4)
    with np.errstate(invalid="ignore"):  # inf * 0 is data here
        return Levels(codes, d * sc, -(dmin * m))


FORMAT = Format(
    "q2_k", 256, DTYPE, encode, levels, ggml_type=10, formula="d * sc * q - dmin * m",
    tile=TileLayout(slots=SLOTS),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
