"""Quantized activations on a device: Q8_1 blocks in the order in which kernels read them.

    offset  bytes  field
         0     64  qs  [block of 32][t][step][j]: columns 2t, 2t + 8, 2t + 1, 2t + 9 of a 16-wide step, as the weights
        64      8  ds  [block of 32]: float16 scale d, float16 sum s = d * sum(q)
        72      8      zero, so that rows of x start on 16 bytes

One element is one token's share of one tile of 64 columns; the elements of all tokens of a tile lie together.
"""

from __future__ import annotations

import numpy as np

from qgemm.formats.q8_1 import FORMAT as Q8_1

from .tile import K_BLOCK

BLOCKS = K_BLOCK // Q8_1.weights
DTYPE = np.dtype([("qs", "i1", (BLOCKS, 32)), ("ds", "<f2", (BLOCKS, 2)), ("padding", "u1", 8)])
ORDER = [16 * step + 2 * t + (0, 8, 1, 9)[j] for t in range(4) for step in range(2) for j in range(4)]
