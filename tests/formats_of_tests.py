"""Formats that no file has: what the record of a format can say beyond the registry's.

Products, decoding and device tiles of these run through the tests of the registry's formats; `qgemm.FORMATS` does not
know them. They are given as Format, wherever a name would do.

w4_g128: groups of 128 weights with a zero each, w = d * (q - z) with q in 0..15

offset  bytes  field
     0      2  d   float16 scale
     2      1  z   zero, an integer
     3     64  qs  byte j: weight j in the low nibble, weight j + 64 in the high

w8_g256: groups of 256 weights, w = d * (q - 128) with q in 0..255

offset  bytes  field
     0      2  d   float16 scale
     2    256  qs  byte j: weight j

q6_0: 32 weights share one scale, w = d * (q - 32) with q in 0..63

offset  bytes  field
     0      2  d   float16 scale
     2      8  qh  byte j: the high two bits of weights j, j + 16, j + 8, j + 24, from bit 0 on
    10     16  qs  byte j: the low four bits of weight j in the low nibble, of weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import (
    HALVES,
    Floats,
    pack_nibbles,
    pack_slots,
    reciprocal,
    round_away,
    to_codes,
    to_float16,
    unpack_nibbles,
    unpack_slots,
)
from qgemm.codec.scales import absmax, blocks_of, extremes, signed_absmax

# ---------------------------------------------------------------- w4_g128

U4 = np.dtype([("d", "<f2"), ("z", "u1"), ("qs", "u1", 64)])


def encode_u4(x: Floats) -> Blocks:
    """Values [n, 128] -> blocks [n]: d = (max - min) / 15, z = -min / d and q = (x - min) / d, each to the nearest.

    The range is widened to hold 0, so that z is a code.
    """
    least, greatest = extremes(x)
    least, greatest = np.minimum(least, np.float32(0)), np.maximum(greatest, np.float32(0))
    d = (greatest - least) / np.float32(15)
    inverse, half = reciprocal(d), np.float32(0.5)
    codes = to_codes((x - least[:, None]) * inverse[:, None] + half, 15)
    blocks = np.empty(len(x), U4)
    blocks["d"], blocks["z"] = to_float16(d), to_codes(-least * inverse + half, 15)
    blocks["qs"] = codes[:, :64] | codes[:, 64:] << np.uint8(4)
    return blocks


def levels_u4(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 128], scale and zero [n, 1]."""
    scale = blocks["d"].astype(np.float32)[:, None]
    return Levels(unpack_nibbles(blocks["qs"])[:, None], scale, zero=blocks["z"][:, None])


W4_G128 = Format(
    "w4_g128", 128, U4, encode_u4, levels_u4, formula="d * (q - z)",
    slots={"qs": tuple(weight for j in range(64) for weight in (j, j + 64))}, number_bytes=("z",),
)  # fmt: skip

# ---------------------------------------------------------------- w8_g256

U8 = np.dtype([("d", "<f2"), ("qs", "u1", 256)])


def encode_u8(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: d = absmax / 127, q = 128 + x / d rounded half away from zero."""
    d = absmax(x) / np.float32(127)
    blocks = np.empty(len(x), U8)
    blocks["d"] = to_float16(d)
    blocks["qs"] = to_codes(round_away(x * reciprocal(d)[:, None]), 127, np.int8).view(np.uint8) ^ np.uint8(128)
    return blocks


def levels_u8(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 256], scale [n, 1], zero 128."""
    return Levels(blocks["qs"][:, None], blocks["d"].astype(np.float32)[:, None], zero=128)


W8_G256 = Format("w8_g256", 256, U8, encode_u8, levels_u8, formula="d * (q - 128)", slots={"qs": tuple(range(256))})

# ---------------------------------------------------------------- q6_0

Q6 = np.dtype([("d", "<f2"), ("qh", "u1", 8), ("qs", "u1", 16)])
HIGH = tuple(weight for j in range(8) for weight in (j, j + 16, j + 8, j + 24))


def encode_q6(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = signed absmax / -32, q = min(63, trunc(x / d + 32.5))."""
    d = signed_absmax(x) / np.float32(-32)
    return pack_q6(Levels(to_codes(x * reciprocal(d)[:, None] + np.float32(32.5), 63), d, zero=32))


def pack_q6(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale [n] -> blocks [n]."""
    blocks = blocks_of(levels, Q6)
    blocks["qs"] = pack_nibbles(levels.codes & np.uint8(15))
    blocks["qh"] = pack_slots(levels.codes[:, HIGH] >> np.uint8(4), 2)
    return blocks


def levels_q6(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1], zero 32."""
    codes = unpack_nibbles(blocks["qs"])
    codes[:, HIGH] |= unpack_slots(blocks["qh"], 2) << np.uint8(4)
    return Levels(codes[:, None], blocks["d"].astype(np.float32)[:, None], zero=32)


Q6_0 = Format(
    "q6_0", 32, Q6, encode_q6, levels_q6, formula="d * (q - 32)", slots={"qs": HALVES, "qh": HIGH}, pack=pack_q6,
    to_tile=overlapping.to_tile, from_tile=overlapping.from_tile,
)  # fmt: skip

TEST_FORMATS = [W4_G128, W8_G256, Q6_0]
