"""Activations of GROUP_COLUMNS on a device: bytes in the order of TMA and wgmma, followed by scales.

codes   bytes [rows, columns]   whole token tiles and groups of 256 columns, zeros beyond M and K; columns 2t, 2t + 1,
                                2t + 8, 2t + 9 of each 16 lie together, because lane t holds these columns of W
scales  float32 [groups, rows]  tokens 2t, 2t + 1, 2t + 8, 2t + 9 of each 16 lie together, because lane t holds their
                                sums
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import E4M3, FORMAT

ROWS = 16, 128  # rows are multiples of 16, whose scales lie together, and at least a token tile
ORDER = [2 * t + (0, 1, 8, 9)[j] for t in range(4) for j in range(4)]  # columns or tokens of 16 in memory
SCALE_OFFSET_CPP = "i % 8 / 2 * 4 + i / 8 * 2 + i % 2"  # the index of number i of 16 in this order
SCALE = 4  # bytes


def byte_template(activation: str) -> dict[str, str | int]:
    """The template constant for the type of a byte: an integer or an e4m3 number."""
    return {"E4M3": int(activation == E4M3)}


def rows_of(m: int) -> int:
    """Rows of the codes of M rows of x."""
    return max(-(-m // ROWS[0]) * ROWS[0], ROWS[1])


def columns_of(k: int) -> int:
    """Columns of the codes of K columns of x."""
    return -(-k // COLUMNS) * COLUMNS


def scales_at(m: int, k: int) -> int:
    """The offset of the scales, which is the number of bytes of the codes."""
    return rows_of(m) * columns_of(k)


def nbytes(m: int, k: int, group: int) -> int:
    """Bytes of M rows of K activations with a scale for `group` columns."""
    return scales_at(m, k) + columns_of(k) // group * rows_of(m) * SCALE


def blocks_of(data: NDArray[Any], m: int, k: int, group: int) -> Blocks:
    """The bytes of M rows of K activations -> blocks [M, K / 32] of qgemm/codec/group_activations.py."""
    rows, columns, offset = rows_of(m), columns_of(k), scales_at(m, k)
    codes = np.empty((rows, columns // 16, 16), np.int8)
    codes[..., ORDER] = data[:offset].view(np.int8).reshape(codes.shape)
    scales = np.empty((columns // group, rows // 16, 16), np.float32)
    scales[..., ORDER] = data[offset:].view(np.float32).reshape(scales.shape)
    blocks = np.empty((m, k // FORMAT.weights), FORMAT.dtype)
    blocks["qs"] = codes.reshape(rows, -1)[:m, :k].reshape(m, -1, FORMAT.weights)
    blocks["d"] = scales.reshape(-1, rows).T.repeat(group // FORMAT.weights, axis=1)[:m, : k // FORMAT.weights]
    return blocks
