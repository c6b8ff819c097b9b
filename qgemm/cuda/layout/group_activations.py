"""Activations of GROUPS on a device: bytes as TMA and wgmma read them, scales behind them.

codes   bytes [rows, columns]  whole token tiles and groups of 256 columns, zeros beyond M and K; of each 16 columns
                               2t, 2t + 1, 2t + 8, 2t + 9 lie together, as lane t has those of W
scales  float32 [groups, rows] of each 16 tokens 2t, 2t + 1, 2t + 8, 2t + 9 lie together, as lane t has their sums
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import E4M3, FORMAT

ROWS = 16, 128  # whole sixteens, whose scales lie together; a token tile at least
ORDER = [2 * t + (0, 1, 8, 9)[j] for t in range(4) for j in range(4)]  # of columns, and of scales
SCALE_OFFSET_CPP = "i % 8 / 2 * 4 + i / 8 * 2 + i % 2"  # where number i of 16 lies in that order
SCALE = 4  # bytes


def byte_template(activation: str) -> dict[str, str | int]:
    """The constant that tells kernels what a byte is."""
    return {"E4M3": int(activation == E4M3)}


def rows_of(m: int) -> int:
    """Rows of the codes of M rows of x."""
    return max(-(-m // ROWS[0]) * ROWS[0], ROWS[1])


def columns_of(k: int) -> int:
    """Columns of the codes of K columns of x."""
    return -(-k // COLUMNS) * COLUMNS


def scales_at(m: int, k: int) -> int:
    """Bytes of the codes, behind which the scales lie."""
    return rows_of(m) * columns_of(k)


def nbytes(m: int, k: int, group: int) -> int:
    """Bytes of M rows of K activations with a scale for so many columns."""
    return scales_at(m, k) + columns_of(k) // group * rows_of(m) * SCALE


def blocks_of(data: NDArray[Any], m: int, k: int, group: int) -> Blocks:
    """The bytes of M rows of K activations -> blocks [M, K / 32] of qgemm/codec/group_activations.py."""
    rows, columns, at = rows_of(m), columns_of(k), scales_at(m, k)
    codes = np.empty((rows, columns // 16, 16), np.int8)
    codes[..., ORDER] = data[:at].view(np.int8).reshape(codes.shape)
    scales = np.empty((columns // group, rows // 16, 16), np.float32)
    scales[..., ORDER] = data[at:].view(np.float32).reshape(scales.shape)
    blocks = np.empty((m, k // FORMAT.weights), FORMAT.dtype)
    blocks["qs"] = codes.reshape(rows, -1)[:m, :k].reshape(m, -1, FORMAT.weights)
    blocks["d"] = scales.reshape(-1, rows).T.repeat(group // FORMAT.weights, axis=1)[:m, : k // FORMAT.weights]
    return blocks
