"""Quantized activations on a device: blocks of qgemm/codec/q8_1_f32.py in the order that kernels read.

    offset  bytes  field
         0     64  qs  [block of 32][t][step][j]: columns 2t, 2t + 8, 2t + 1, 2t + 9 of a 16-wide step, as the weights
        64     16  ds  [block of 32]: float32 scale d, float32 sum s = d * sum(q), in UNIT

One element is one token's share of one tile of 64 columns; the elements of all tokens of a tile lie together.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec import q8_1_f32

from .tile import K_BLOCK

WEIGHTS, UNIT = q8_1_f32.FORMAT.weights, q8_1_f32.UNIT
BLOCKS = K_BLOCK // WEIGHTS
DTYPE = np.dtype([("qs", "i1", (BLOCKS, WEIGHTS)), ("ds", "<f4", (BLOCKS, 2))])
ORDER = [16 * step + 2 * t + (0, 8, 1, 9)[j] for t in range(4) for step in range(2) for j in range(4)]


def nbytes(m: int, k: int) -> int:
    """Bytes of M rows of K activations."""
    return -(-k // K_BLOCK) * m * DTYPE.itemsize
