"""Products of "e4m3_g256" by NumPy: numbers of e4m3 on either side, exact sums of 256 columns, scaled in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.e4m3 import NUMBERS
from qgemm.codec.eight_bits import COLUMNS, e4m3_weights
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import E4M3, FORMATS
from qgemm.tensor import Tensor

PANEL_WEIGHTS = 1 << 20  # weights that are decoded at a time


def multiply(x: Blocks, w: Tensor, y: NDArray[Any]) -> None:
    """y [M, N] = sum over groups g of sw[n, g] * dx[m, g] * sum(q_x * q_w): x [M, K / 32] as blocks, w [N, K].

    Products of a group are multiples of 2^-18 whose sum is below 2^26, so that BLAS computes it exactly in float64;
    it is rounded to float32 once.
    """
    (n, k), m = w.shape, len(x)
    numbers = NUMBERS.astype(np.float64)
    qx = numbers[x["qs"].view(np.uint8)].reshape(m, k)
    dx = x["d"][:, :: COLUMNS // FORMATS[E4M3].weights]  # [M, groups]
    height = max(1, PANEL_WEIGHTS // max(1, k))
    for start in range(0, n, height):
        part = slice(start, min(start + height, n))
        weights = e4m3_weights(w.format, w.blocks[part], k)
        qw = numbers[weights.codes]
        total = np.zeros((m, len(qw)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
            for g, first in enumerate(range(0, k, COLUMNS)):
                columns = slice(first, first + COLUMNS)
                sums = (qx[:, columns] @ qw[:, columns].T).astype(np.float32)
                total += sums * (dx[:, g, None] * weights.scale[:, g])
            y[:, part] = total
