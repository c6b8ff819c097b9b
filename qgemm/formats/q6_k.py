"""q6_k: super-blocks of 16 groups of 16 weights, w = d * sc * (q - 32) with q in 0..63, sc in -128..127 a group.

offset  bytes  field
     0    128  ql      byte 64 h + j: the low four bits of weight 128 h + j in the low nibble, of weight 128 h + 64 + j
                       in the high   (j < 64)
   128     64  qh      byte 32 h + j, bits 2i and 2i + 1: the high two bits of weight 128 h + 32 i + j   (j < 32)
   192     16  scales  byte g: sc of group g, signed
   208      2  d       float16 scale of the sc
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import Bytes, Floats, Halves, pack_planes, unpack_nibbles, unpack_planes
from qgemm.codec.super_blocks import Symmetric, without_minimums

DTYPE = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
SLOTS = {
    "ql": tuple(128 * h + 64 * i + j for h in range(2) for j in range(64) for i in range(2)),
    "qh": tuple(128 * h + 32 * i + j for h in range(2) for j in range(32) for i in range(4)),
}
ZERO = 32
KIND = Symmetric(ZERO, 16, 128, moved=False, means=None, least=1e-15, empty=0)


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n] (codec/super_blocks.py)."""
    return without_minimums(KIND, x, importance, pack)


def pack(d: Halves, sc: NDArray[np.int8], codes: Bytes) -> Blocks:
    """d [n], sc [n, 16], codes [n, 256] -> blocks [n]."""
    blocks = np.empty(len(codes), DTYPE)
    blocks["d"], blocks["scales"] = d, sc
    blocks["ql"] = pack_planes((codes & np.uint8(0x0F)).reshape(-1, 128), 4).reshape(-1, 128)
    blocks["qh"] = pack_planes((codes >> np.uint8(4)).reshape(-1, 128), 2).reshape(-1, 64)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 16, 16], scale d * sc [n, 16], zero 32."""
    low = unpack_nibbles(blocks["ql"].reshape(-1, 64))
    high = unpack_planes(blocks["qh"].reshape(-1, 32), 2)
    d = blocks["d"].astype(np.float32)[:, None]
    with np.errstate(invalid="ignore"):  # inf * 0 is data here
        return Levels((low | high << np.uint8(4)).reshape(-1, 16, 16), d * blocks["scales"], zero=ZERO)


FORMAT = Format(
    "q6_k", 256, DTYPE, encode, levels, ggml_type=14, formula="d * sc * (q - 32)",
    tile=TileLayout(slots=SLOTS, to_tile=overlapping.to_tile, from_tile=overlapping.from_tile, bytes_are_levels=True),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
