"""mxfp4: 32 weights share a power of two, w = 2^(e - 128) * v, v being twice the e2m1 number of the code.

offset  bytes  field
     0      1  e   exponent, every value a number (the OCP standard calls 255 NaN, ggml does not)
     1     16  qs  byte j: the code of weight j in the low nibble, of weight j + 16 in the high

code  0  1  2  3  4  5  6   7  8   9  10  11  12  13  14   15
v     0  1  2  3  4  6  8  12  0  -1  -2  -3  -4  -6  -8  -12

The half with the sign of a code at bit 15 and its other bits at 9 to 11 is v / 2^15 (CODE_EXPONENT). So that few
instructions decode them, the eight codes of a word w of a device tile (qgemm/cuda/layout/tile.py) are, as four pairs of
halves,

    w << 9,  w << 6,  w << 2 ^ w >> 3,  w ^ w >> 3    masked by 0x8e008e00:

columns 2t and 2t + 1 of row g, of row g + 8, then columns 2t + 8 and 2t + 9 of both. A layout that only moves bits
needs more instructions: the places of three codes cannot be shifted so that no two overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import HALVES, Bytes, Floats, LaneWords, pack_nibbles, unpack_nibbles
from qgemm.codec.scales import absmax

DTYPE = np.dtype([("e", "u1"), ("qs", "u1", 16)])
MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
CODEBOOK = VALUES.astype(np.float32)
CODEBOOK.flags.writeable = False
CODE_EXPONENT = 15
# 2^(e - 128) as the bits of a float32; the first two are subnormal, which arithmetic may flush to zero.
SCALES = np.array([1 << 21, 1 << 22, *(e - 1 << 23 for e in range(2, 256))], np.int32).view(np.float32)


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: e = floor(log2(absmax)) - 2 + 127, the nearest v, the lower code of two."""
    blocks = np.empty(len(x), DTYPE)
    blocks["e"] = e = exponents(absmax(x))
    with np.errstate(over="ignore"):  # a level beyond float32 is infinite, and so is its edge: it is never the nearest
        levels = SCALES[e][:, None] * MAGNITUDES  # [n, 8]
    edges = levels[:, :-1] / 2 + levels[:, 1:] / 2  # exact, subnormal ones as well
    size, codes = np.abs(x), np.zeros(x.shape, np.uint8)
    for j in range(len(MAGNITUDES) - 1):
        codes += size > edges[:, j, None]
    codes[(x < 0) & (codes > 0)] += 8
    blocks["qs"] = pack_nibbles(codes)
    return blocks


def exponents(largest: Floats) -> Bytes:
    """Largest magnitudes [n] -> e [n], 0 for zero.

    The logarithm is rounded to float32, as C's log2f is, so just below a power of two it may round up to it. Below
    2^-125 e wraps around, as x86 converts it in ggml: such a block decodes to zeros whatever its scale.
    """
    finite = np.where((largest > 0) & np.isfinite(largest), largest, np.float32(2.0**-125))
    logarithm = np.log2(finite.astype(np.float64)).astype(np.float32)
    return (np.floor(logarithm).astype(np.int32) + (127 - 2)).astype(np.uint8)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> signed v as codes [n, 1, 32], scale [n, 1]."""
    return Levels(VALUES.take(unpack_nibbles(blocks["qs"]))[:, None], SCALES[blocks["e"]][:, None])


def to_tile(nibbles: LaneWords) -> LaneWords:
    """Words of eight codes as nibbles -> the words w of a tile.

    Every bit moves to a place of its own; then the xors undo the sums that the last two pairs of halves form.
    """
    words = nibbles["qs"]
    w: NDArray[Any] = words & 0x90079007 | words >> 1 & 0x01B801B8 | words << 2 & 0x22002200
    w = w | words << 3 & 0x00400040 | words >> 3 & 0x0C000C00 | words << 4 & 0x40004000
    w = w ^ w << 3 & 0x10001000 ^ w << 5 & 0x40004000 ^ w >> 3 & 0x80008000 ^ w >> 5 & 0x20002000
    return {"qs": w ^ w >> 3 & 0x0C000C00 ^ w >> 5 & 0x01800180}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    w = words["qs"]
    nibbles = np.zeros_like(w)
    for i, a in enumerate((w << 9, w << 6, w << 2 ^ w >> 3, w ^ w >> 3)):
        nibbles |= (a >> 9 & 0x00070007 | a >> 12 & 0x00080008) << 4 * i
    return {"qs": nibbles}


FORMAT = Format(
    "mxfp4", 32, DTYPE, encode, levels, ggml_type=39, formula="2^(e - 128) * codebook[q]", codebook=CODEBOOK, e4m3=True,
    tile=TileLayout(slots={"qs": HALVES}, to_tile=to_tile, from_tile=from_tile, code_exponent=CODE_EXPONENT),
    encoding=Encoding(ordinary={"e": (118, 123)}),
)  # fmt: skip
