"""mxfp4: 32 weights share a power of two, w = 2^(e - 128) * v with v twice the e2m1 number that a code stands for.

offset  bytes  field
     0      1  e   exponent, every value a number (the OCP standard calls 255 NaN, ggml does not)
     1     16  qs  byte j: the code of weight j in the low nibble, of weight j + 16 in the high

code  0  1  2  3  4  5  6   7  8   9  10  11  12  13  14   15
v     0  1  2  3  4  6  8  12  0  -1  -2  -3  -4  -6  -8  -12
"""

from __future__ import annotations

import numpy as np

from ..bits import HALVES, Bytes, Floats, pack_nibbles, unpack_nibbles
from ..block import Blocks, Format, Levels
from .scales import absmax

DTYPE = np.dtype([("e", "u1"), ("qs", "u1", 16)])
MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
SCALES = np.ldexp(np.ones(256, np.float32), np.arange(256) - 128)  # the first two are subnormal


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: e = floor(log2(absmax)) - 2 + 127, the nearest v, the lower code of two."""
    blocks = np.empty(len(x), DTYPE)
    blocks["e"] = e = exponents(absmax(x))
    with np.errstate(over="ignore"):  # a level beyond float32 is infinite, so its edge is too: it is never the nearest
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
    known = np.where((largest > 0) & np.isfinite(largest), largest, np.float32(2.0**-125))
    logarithm = np.log2(known.astype(np.float64)).astype(np.float32)
    return (np.floor(logarithm).astype(np.int32) + (127 - 2)).astype(np.uint8)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> signed v as codes [n, 1, 32], scale [n, 1]."""
    return Levels(VALUES.take(unpack_nibbles(blocks["qs"]))[:, None], SCALES[blocks["e"]][:, None])


FORMAT = Format("mxfp4", 32, DTYPE, encode, levels, ggml_type=39, slots={"qs": HALVES})
