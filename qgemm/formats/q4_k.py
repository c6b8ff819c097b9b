"""q4_k: super-blocks of 8 groups of 32 weights, w = d * sc * q - dmin * m with q in 0..15, sc and m in 0..63 a group.

offset  bytes  field
     0      2  d       float16 scale of the sc
     2      2  dmin    float16 scale of the m
     4     12  scales  sc and m of groups 0..7, 6 bits each:
                       byte i      bits 0-5 sc of group i,  bits 6-7 the high bits of sc of group i + 4
                       byte i + 4  bits 0-5 m of group i,   bits 6-7 the high bits of m of group i + 4
                       byte i + 8  low nibble: low bits of sc of group i + 4, high nibble: of its m   (i = 0..3)
    16    128  qs      byte 32 p + j: weight 64 p + j in the low nibble, weight 64 p + 32 + j in the high   (j < 32)
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, pack_sixes, unpack_nibbles, unpack_sixes
from qgemm.codec.search import Steps
from qgemm.codec.super_blocks import Affine, with_minimums

DTYPE = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
SLOTS = {"qs": tuple(64 * p + 32 * h + j for p in range(4) for j in range(32) for h in range(2))}


KIND = Affine(15, 8, 63, Steps(-1.0, 0.1, 21), rooted=True, means=2, spills=True)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/super_blocks.py)."""
    return with_minimums(KIND, x, importance, pack)


def pack(d: Halves, dmin: Halves, sc: Bytes, m: Bytes, codes: Bytes) -> Blocks:
    """d, dmin [n], sc and m [n, 8], codes [n, 256] -> blocks [n]."""
    blocks = np.empty(len(codes), DTYPE)
    blocks["d"], blocks["dmin"], blocks["scales"] = d, dmin, pack_sixes(sc, m)
    blocks["qs"] = pack_planes(codes.reshape(-1, 64), 4).reshape(-1, 128)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 8, 32], scale d * sc and minimum -(dmin * m), [n, 8] each."""
    codes = unpack_nibbles(blocks["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    d, dmin = (blocks[name].astype(np.float32)[:, None] for name in ("d", "dmin"))
    sc, m = unpack_sixes(blocks["scales"])
    with np.errstate(invalid="ignore"):  # inf * 0 is data here
        return Levels(codes, d * sc, -(dmin * m))


FORMAT = Format(
    "q4_k", 256, DTYPE, encode, levels, ggml_type=12, formula="d * sc * q - dmin * m",
    tile=TileLayout(slots=SLOTS),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
