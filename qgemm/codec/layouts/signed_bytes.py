"""Signed codes of eight bits: a device tile (qgemm/cuda/layout/tile.py) holds q + 128.

The bits of q + 128 are a subnormal half, so kernels use them without decoding.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.packing import LaneWords


def to_tile(words: LaneWords) -> LaneWords:
    """Words of four codes q -> words of q + 128."""
    return {name: codes ^ np.uint32(0x80808080) for name, codes in words.items()}


from_tile = to_tile
