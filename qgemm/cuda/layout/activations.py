"""Quantized activations on a device: Q8_1 blocks in the order in which kernels read them.

    offset  bytes  field
         0     64  qs  [block of 32][t][step][j]: columns 2t, 2t + 8, 2t + 1, 2t + 9 of a 16-wide step, as the weights
        64      8  ds  [block of 32]: float16 scale d, float16 sum s = d * sum(q)
        72      8      zero, so that rows of x start on 16 bytes

One element is one token's share of one tile of 64 columns; the elements of all tokens of a tile lie together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.formats.q8_1 import FORMAT as Q8_1

from .tile import SPAN

BLOCKS = SPAN // Q8_1.weights
DTYPE = np.dtype([("qs", "i1", (BLOCKS, 32)), ("ds", "<f2", (BLOCKS, 2)), ("padding", "u1", 8)])
ORDER = [16 * step + 2 * t + (0, 8, 1, 9)[j] for t in range(4) for step in range(2) for j in range(4)]


class DeviceActivations:
    """Activations [..., K] as Q8_1 blocks on a GPU; made by `quantize_activations`.

    data: a CuPy array of bytes [tiles along K, rows, bytes of DTYPE]. like: an array of the library that asked, for
    the product's kind. dtype: float16 if that can hold the activations, as it held those they come from; else float32.
    """

    def __init__(self, shape: tuple[int, ...], data: Any, like: Any, dtype: np.dtype[Any]) -> None:
        self.shape, self.data, self.like = shape, data, like
        self.dtype = np.dtype(np.float16 if dtype == np.float16 else np.float32)

    def blocks(self) -> Blocks:
        """The Q8_1 blocks [rows, K / 32] on the host, byte for byte as the CPU quantizes."""
        along, rows = self.data.shape[:2]
        tiles = self.data.get().reshape(-1).view(DTYPE).reshape(along, rows).T
        blocks = np.empty((rows, along, BLOCKS), Q8_1.dtype)
        codes = np.empty((*blocks.shape, Q8_1.weights), np.int8)
        codes[..., ORDER] = tiles["qs"]
        blocks["qs"], blocks["d"], blocks["s"] = codes, tiles["ds"][..., 0], tiles["ds"][..., 1]
        return blocks.reshape(rows, -1)[:, : Q8_1.blocks_in(self.shape[-1])]
