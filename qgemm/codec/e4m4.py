"""E4M4: numbers of one byte without a sign, the absmax of kbit blocks.

    bits 4-7  e  exponent
    bits 0-3  m  mantissa
    value        2^(e - 11) * (1 + m / 16), for e = 0: 2^-10 * m / 16

There is no NaN and no infinity: the values ascend with their codes, from 0 in steps of 2^-14 up to 31.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qgemm.errors import QuantizeError

from .codebook import edges
from .format import floats
from .packing import Bytes, Floats

CODES = np.arange(256)
EXPONENT, MANTISSA = CODES >> 4, CODES & 15
VALUES = np.where(EXPONENT, np.ldexp(16 + MANTISSA, EXPONENT - 15), np.ldexp(MANTISSA, -14)).astype(np.float32)
EDGES = edges(VALUES, CODES[1:] % 2 == 0, np.float64)  # halfway to the even code
LIMIT = 31.5  # halfway between 31 and 32, whose code would be the even one


def encode_e4m4(values: ArrayLike, saturate: bool = False) -> Bytes:
    """Values [...] >= 0 of any float dtype -> codes [...] uint8 of the nearest numbers, ties to even codes.

    Values from 31.5 on raise QuantizeError or, with `saturate`, get the code of 31, infinity included. QuantizeError
    for a negative value or NaN; TypeError for arrays of other types.
    """
    x = floats(values, "values").astype(np.float64)
    wrong = ~(x >= 0)
    if wrong.any():
        raise QuantizeError(f"E4M4 holds numbers from 0 on, got {x[wrong][0]:g}")
    if not saturate and (x >= LIMIT).any():
        raise QuantizeError(f"E4M4 ends at 31, got {x[x >= LIMIT][0]:g}")
    return nearest_e4m4(x)


def nearest_e4m4(values: NDArray[np.floating]) -> Bytes:
    """Values [...] >= 0 -> the codes of the nearest numbers, ties to even codes; that of 31 beyond 31 and for NaN."""
    return np.searchsorted(EDGES, values.astype(np.float64)).astype(np.uint8)


def decode_e4m4(codes: ArrayLike) -> Floats:
    """Codes [...] uint8 -> the numbers [...] they stand for, exact in float32; TypeError for other dtypes."""
    array = np.asarray(codes)
    if array.dtype != np.uint8:
        raise TypeError(f"codes must be of uint8, got {array.dtype}")
    numbers: Floats = VALUES.take(array)
    return numbers
