"""q3_k: super-blocks of 16 groups of 16 weights, w = d * sc * (q - 4) with q in 0..7, sc in -32..31 a group.

offset  bytes  field
     0     32  hmask   byte j, bit i: the high bit of weight 32 i + j
    32     64  qs      byte 32 h + j, bits 2i and 2i + 1: the low two bits of weight 128 h + 32 i + j   (j < 32)
    96     12  scales  byte i: low four bits of sc + 32 of group i in the low nibble, of i + 8 in the high  (i < 8)
                       byte 8 + i, bits 2j and 2j + 1: the high two bits of sc + 32 of group i + 4 j   (i, j < 4)
   108      2  d       float16 scale of the sc
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, unpack_planes
from qgemm.codec.super_blocks import Symmetric, without_minimums

DTYPE = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
SLOTS = {
    "qs": tuple(128 * h + 32 * i + j for h in range(2) for j in range(32) for i in range(4)),
    "hmask": tuple(32 * i + j for j in range(32) for i in range(8)),
}
ZERO, ZERO_SCALE = 4, 32
KIND = Symmetric(ZERO, 16, ZERO_SCALE, moved=True, means=2, least=1e-45, empty=-ZERO_SCALE)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/super_blocks.py)."""
    return without_minimums(KIND, x, importance, pack)


def pack(d: Halves, sc: NDArray[np.int8], codes: Bytes) -> Blocks:
    """d [n], sc [n, 16] in -32..31, codes [n, 256] -> blocks [n]."""
    blocks, biased = np.empty(len(codes), DTYPE), (sc + np.int8(ZERO_SCALE)).astype(np.uint8)
    low, high = biased & np.uint8(0x0F), biased >> np.uint8(4)
    blocks["d"] = d
    blocks["scales"] = np.hstack([low[:, :8] | low[:, 8:] << np.uint8(4), pack_planes(high, 2)])
    blocks["qs"] = pack_planes((codes & np.uint8(3)).reshape(-1, 128), 2).reshape(-1, 64)
    blocks["hmask"] = pack_planes(codes >> np.uint8(2), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 16, 16], scale d * sc [n, 16], zero 4."""
    low = unpack_planes(blocks["qs"].reshape(-1, 32), 2).reshape(-1, 256)
    high = unpack_planes(blocks["hmask"], 1)
    packed = blocks["scales"]
    upper = packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    nibbles = np.hstack([packed[:, :8] & np.uint8(0x0F), packed[:, :8] >> np.uint8(4)])
    sc = (nibbles | upper.reshape(-1, 16) << np.uint8(4)).astype(np.float32) - np.float32(ZERO_SCALE)
    with np.errstate(invalid="ignore"):  # inf * 0 is data here
        scale = blocks["d"].astype(np.float32)[:, None] * sc
    return Levels((low | high << np.uint8(2)).reshape(-1, 16, 16), scale, zero=ZERO)


FORMAT = Format(
    "q3_k", 256, DTYPE, encode, levels, ggml_type=11, formula="d * sc * (q - 4)",
    tile=TileLayout(slots=SLOTS, bytes_are_levels=True),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
