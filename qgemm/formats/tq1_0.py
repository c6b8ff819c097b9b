"""tq1_0: super-blocks of 256 weights of -1, 0, 1 times a scale, w = d * (q - 1), five q of 0..2 in a byte.

offset  bytes  field
     0     48  qs  byte j: weights j + 32 i of the first 160 (j < 32); byte 32 + j: 160 + j + 16 i (j < 16); i < 5
    48      4  qh  byte j: weights 240 + j + 4 i, i < 4
    52      2  d   float16 scale

A byte is ceil(256 / 243 * number), the number having the q as its digits to the base 3, the first of them the highest;
of qh the last digit is 0. The gguf package decodes them (through_gguf.py); here they are written.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Bytes, Floats
from qgemm.codec.scales import ternary

DTYPE = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
DIGITS = 3 ** np.arange(4, -1, -1, dtype=np.uint16)


def encode(x: Floats) -> Blocks:
    """Values [n, 256] -> blocks [n]: d the largest magnitude, q - 1 = x / d, halves away from 0."""
    blocks = np.empty(len(x), DTYPE)
    codes, blocks["d"] = ternary(x)
    first, second, rest = codes[:, :160], codes[:, 160:240], codes[:, 240:]
    blocks["qs"] = np.hstack([_bytes(first.reshape(-1, 5, 32)), _bytes(second.reshape(-1, 5, 16))])
    blocks["qh"] = _bytes(rest.reshape(-1, 4, 4))
    return blocks


def _bytes(digits: Bytes) -> Bytes:
    """Digits [n, up to 5, b] -> [n, b]."""
    numbers = (digits * DIGITS[: digits.shape[1], None]).sum(axis=1, dtype=np.uint32)
    found: Bytes = ((numbers * 256 + 242) // 243).astype(np.uint8)
    return found
