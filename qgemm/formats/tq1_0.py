"""tq1_0: super-blocks of 256 weights of -1, 0, 1 times a scale, w = d * (q - 1), five q of 0..2 in a byte.

offset  bytes  field
     0     48  qs  byte j: weights j + 32 i of the first 160 (j < 32); byte 32 + j: 160 + j + 16 i (j < 16); i < 5
    48      4  qh  byte j: weights 240 + j + 4 i, i < 4
    52      2  d   float16 scale

A byte is ceil(256 / 243 * number), the number having the q as its digits to the base 3, the first of them the highest;
of qh the last digit is 0. Three times a byte has the next digit above eight bits: nothing is divided.

Five codes in a byte lie in no k_block of a device tile: these weights stay on the host.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels
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


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 256], scale [n, 1], zero 1."""
    qs = blocks["qs"]
    parts = _digits(qs[:, :32], 5), _digits(qs[:, 32:], 5), _digits(blocks["qh"], 4)
    return Levels(np.hstack(parts)[:, None], blocks["d"].astype(np.float32)[:, None], zero=1)


def _digits(numbers: Bytes, count: int) -> Bytes:
    """Bytes [n, b] -> their first digits [n, count * b], digit by digit."""
    rests = numbers[:, None] * DIGITS[::-1][:count, None].astype(np.uint8)  # modulo 256: what later digits say
    found: Bytes = (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return found.reshape(len(numbers), -1)


FORMAT = Format("tq1_0", 256, DTYPE, encode, levels, ggml_type=34, formula="d * (q - 1)")
