"""s7_1of2: 2:1 sparsity: one of two neighbours is stored in 7 bits, and a bit tells which; 128 weights share a scale.

offset  bytes  field
     0      2  d   float16 scale
     2     64  qs  byte j: bits 0 to 6 the code q of weight 2 j or, if bit 7 is set, of 2 j + 1; the other weight is 0

w = d * (q - 64) with q in 0..127: 4 bits a weight of the dense matrix, 4.125 with its scale. No GGUF file has such
blocks: FORMATS finds the format by name, and does not list it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import Floats, LaneWords, Words, reciprocal, to_codes, to_float16
from qgemm.codec.scales import signed_absmax

WEIGHTS = 128
DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", WEIGHTS // 2)])
ZERO = 64


def encode(x: Floats) -> Blocks:
    """Values [n, 128] -> blocks [n]: d = signed absmax / -64, q nearest to the larger of two neighbours over d."""
    pairs = x.reshape(len(x), -1, 2)
    second = np.abs(pairs[..., 1]) > np.abs(pairs[..., 0])
    nonzero = np.where(second, pairs[..., 1], pairs[..., 0])
    d = signed_absmax(x) / np.float32(-ZERO)
    blocks = np.empty(len(x), DTYPE)
    blocks["d"] = to_float16(d)
    codes = to_codes(nonzero * reciprocal(d)[:, None] + np.float32(ZERO + 0.5), 2 * ZERO - 1)
    blocks["qs"] = codes | second.astype(np.uint8) << np.uint8(7)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> q - 64 or 0 as codes [n, 1, 128] int8, scale [n, 1]."""
    nonzero = (blocks["qs"] & np.uint8(127)).astype(np.int8) - np.int8(ZERO)
    second = blocks["qs"] >> 7 != 0
    codes = np.stack([np.where(second, np.int8(0), nonzero), np.where(second, nonzero, np.int8(0))], axis=-1)
    return Levels(codes.reshape(len(blocks), 1, WEIGHTS), blocks["d"].astype(np.float32)[:, None])


# Side by side (qgemm/cuda/layout/tile.py) the bytes of a lane's word of a step are columns 2t, 2t + 8, 2t + 1 and
# 2t + 9, row g in the low nibble, row g + 8 in the high one. In a tile the bytes are those of a block: row g in columns
# 2t and 2t + 1, then in columns 2t + 8 and 2t + 9, and the same for row g + 8.


def to_tile(words: LaneWords) -> LaneWords:
    """Words of nibbles -> words of whole codes."""
    ((name, word),) = words.items()
    return {name: np.bitwise_or(_joined(word), _joined(np.right_shift(word, 4)) << 16)}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    ((name, word),) = words.items()
    return {name: np.bitwise_or(_apart(word), _apart(np.right_shift(word, 16)) << 4)}


def _joined(word: Words) -> Words:
    low: Words = np.bitwise_and(word, np.uint32(0x0F0F0F0F))
    joined: Words = np.bitwise_and(low | low >> 12, np.uint32(0xFFFF))
    return joined


def _apart(word: Words) -> Words:
    apart: Words = np.bitwise_and(word, np.uint32(0x0F0F)) | np.bitwise_and(word, np.uint32(0xF0F0)) << 12
    return apart


def named(name: str) -> Format | None:
    """The format if it has this name, else None."""
    return s7_1of2() if name.lower() == "s7_1of2" else None


@cache
def s7_1of2() -> Format:
    """The format."""
    return Format(
        "s7_1of2", WEIGHTS, DTYPE, encode, levels, formula="d * (q - 64), of one of two", family="one_of_two",
        declared_max_level=float(ZERO),
        tile=TileLayout(slots={"qs": tuple(range(WEIGHTS))}, to_tile=to_tile, from_tile=from_tile, code_exponent=0),
    )  # fmt: skip
