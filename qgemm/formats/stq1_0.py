"""stq1_0: super-blocks of 256 weights, three of every four of which are -d or d, the fourth 0; 1.31 bits a weight.

offset  bytes  field
     0     32  qs    byte j: the slot of group 2 j in the low nibble, of group 2 j + 1 in the high
    32      8  sign  byte b, bit i: whether group 8 b + i is negated
    40      2  d     float16 scale

Group 16 c + j holds weights 64 c + j + 16 p, p in 0..3. Bits 2 and 3 of its slot are the p of the zero. Of the three
other weights the first is d, bit 0 of the slot negates the second, bit 1 the third; w = d * (q - 1) with q in 0..2.

These are the models of Sherry (arXiv 2601.07892). Device tiles are those of tq2_0, which has the same scale and codes.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, DeviceForm, Format, Levels
from qgemm.codec.packing import Bytes, Floats, pack_slots, to_float16, unpack_slots

from . import tq2_0

DTYPE = np.dtype([("qs", "u1", 32), ("sign", "u1", 8), ("d", "<f2")])


def _patterns() -> Bytes:
    """The codes q of the four weights of a group, by 16 * its sign + its slot, [32, 4]."""
    zero, negated = np.divmod(np.arange(16), 4)
    levels = np.zeros((16, 4), np.int8)
    for slot in range(16):
        signs = 1, 1 - 2 * (negated[slot] & 1), 1 - 2 * (negated[slot] >> 1)
        levels[slot, np.arange(4) != zero[slot]] = signs
    return (np.concatenate([levels, -levels]) + 1).astype(np.uint8)


PATTERNS = _patterns()


def encode(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: the least of each four is 0, d is the mean magnitude of all others."""
    groups = np.moveaxis(x.reshape(-1, 4, 4, 16), 2, 3)  # [n, c, j, p]
    size = np.abs(groups)
    zero = size.argmin(axis=3)[..., None]
    nonzero = np.arange(3) + (np.arange(3) >= zero)  # [n, c, j, 3]: the p of the three others
    minus = ~(np.take_along_axis(groups, nonzero, 3) >= 0)
    first, second, third = np.moveaxis(minus, 3, 0)
    slots = 4 * zero[..., 0] | (second ^ first) | (third ^ first) * 2
    blocks = np.empty(len(x), DTYPE)
    nonzeros = np.take_along_axis(size, nonzero, 3).astype(np.float64)
    blocks["d"] = to_float16(nonzeros.mean(axis=(1, 2, 3)).astype(np.float32))
    blocks["qs"] = pack_slots(slots.reshape(len(x), 64).astype(np.uint8), 4)
    blocks["sign"] = np.packbits(first.reshape(len(x), 64), axis=1, bitorder="little")
    return blocks


def codes_of(blocks: Blocks) -> Bytes:
    """Blocks [n] -> q [n, 256]."""
    sign = np.unpackbits(blocks["sign"], axis=1, bitorder="little")
    patterns = PATTERNS[unpack_slots(blocks["qs"], 4) | sign << np.uint8(4)]  # [n, group, p]
    return np.moveaxis(patterns.reshape(-1, 4, 16, 4), 3, 2).reshape(-1, 256)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 256], scale [n, 1], zero 1."""
    return Levels(codes_of(blocks)[:, None], blocks["d"].astype(np.float32)[:, None], zero=1)


def to_tq2_0(blocks: Blocks) -> Blocks:
    """Blocks [n] -> blocks [n] of tq2_0 with the same weights."""
    return tq2_0.pack(codes_of(blocks), blocks["d"])


FORMAT = Format(
    "stq1_0", 256, DTYPE, encode, levels, ggml_type=43, formula="d * (q - 1)",
    device=DeviceForm(tq2_0.FORMAT, to_tq2_0),
)  # fmt: skip
