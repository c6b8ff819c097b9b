"""e4m3: floats of eight bits, 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN.

code & 127     number
0 to 7         code * 2^-9, subnormal
8 to 126       (8 + code % 8) * 2^(code / 8 - 10), up to 448
"""

from __future__ import annotations

import numpy as np

from .packing import Bytes, Floats

LARGEST = 448.0
LARGEST_CODE, NAN = 0x7E, 0x7F
LEAST_NORMAL, SUBNORMAL = np.float32(2.0**-6), np.float32(2.0**-9)


def _numbers() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    size[code & 127 == NAN] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


NUMBERS = _numbers()  # by code
NUMBERS.flags.writeable = False


def encode(x: Floats) -> Bytes:
    """Values -> the codes of the nearest numbers, ties to even codes; larger values become the largest number.

    The code of a normal number is the upper bits of the float, with another bias of the exponent.
    """
    bits, size = x.view(np.uint32), np.abs(x)
    half = np.uint32(0x7FFFF) + (bits >> 20 & 1)  # just below half of the last kept digit, ties to even
    normal = ((bits & 0x7FFFFFFF) + half >> 20) - np.uint32(120 << 3)
    with np.errstate(invalid="ignore"):  # NaN is data
        subnormal = np.rint(np.minimum(size, LEAST_NORMAL) / SUBNORMAL).astype(np.uint32)
        code = np.where(size < LEAST_NORMAL, subnormal, np.minimum(normal, LARGEST_CODE))
    code = np.where(np.isnan(x), NAN, code)
    signed: Bytes = (code | bits >> 24 & 128).astype(np.uint8)
    return signed
