"""Codes of eight bits, signed: in a device tile (qgemm/cuda/layout/tile.py) byte q is q + 128.

As bits that is a positive integer, which kernels take for a half without further ado.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.packing import LaneWords


def to_tile(words: LaneWords) -> LaneWords:
    """Words of four codes q -> of q + 128."""
    return {name: codes ^ np.uint32(0x80808080) for name, codes in words.items()}


from_tile = to_tile
