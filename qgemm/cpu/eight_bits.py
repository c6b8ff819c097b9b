"""Products of "a8_g256" and "e4m3_g256" by NumPy: eight bits of both factors, exact sums of 256 columns, scaled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.e4m3 import NUMBERS
from qgemm.codec.eight_bits import E4m3Weights, EightBits, e4m3_weights, eight_bits
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import BLOCKS, E4M3, FORMATS, GROUP, INTEGER, encode_rows
from qgemm.errors import UnsupportedError
from qgemm.parallel import for_slices
from qgemm.tensor import Tensor

from . import native

PANEL_BYTES = 1 << 23  # size of the weights that are decoded at a time
ROWS = 16  # rows of x that a core quantizes at a time


def quantize(x: NDArray[Any], activation: str) -> Tensor:
    """Values [..., K] -> a Tensor [..., K] of activations "a8_g256" or "e4m3_g256".

    A group with NaN or infinity becomes NaN.
    """
    fmt, group = FORMATS[activation], INTEGER.get(activation)
    count = fmt.blocks_in(x.shape[-1], "activations")
    rows = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(0, x.shape[-1])
    if group and rows.size and not native.reason():
        with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite
            compiled = native.quantize_groups(rows, group)
        if compiled is not None:
            return Tensor(fmt, x.shape, compiled.reshape(*x.shape[:-1], count))
    blocks = np.empty((len(rows), count), fmt.dtype)

    def work(part: slice) -> None:
        with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite
            blocks[part] = encode_rows(rows[part].astype(np.float32), activation)

    for_slices(len(rows), ROWS, work)
    return Tensor(fmt, x.shape, blocks.reshape(*x.shape[:-1], count))


def multiply(x: Blocks, w: Tensor, y: NDArray[Any], activation: str) -> None:
    """y [M, N] = sum over groups g of sw[n, g] * dx[m, g] * sum(q_x * q_w): x [M, K / 32] as blocks, w [N, K].

    BLAS computes the sums of a group exactly: of integers, below 127 * 127 * 256 < 2^24, in float32; of e4m3 numbers,
    multiples of 2^-18 below 2^26, in float64, from where they are rounded to float32 once.
    """
    weights_of: Callable[..., EightBits | E4m3Weights]
    exact: Callable[[NDArray[Any]], NDArray[Any]]
    if activation == E4M3:
        weights_of, exact = e4m3_weights, _numbers
    elif w.format.integer:
        weights_of, exact = eight_bits, partial(np.asarray, dtype=np.float32)
    else:
        reason = f"{w.format} has no integer codes for activations of eight bits a group"
        raise UnsupportedError(f"{w!r}: {reason}; use 'a16'")
    (n, k), m = w.shape, len(x)
    qx = exact(x["qs"]).reshape(m, k)
    dx = np.ascontiguousarray(x["d"][:, ::BLOCKS].T)  # [groups, M]
    height = max(1, PANEL_BYTES // qx.itemsize // max(1, k))
    for start in range(0, n, height):
        part = slice(start, min(start + height, n))
        weights = weights_of(w.format, w.blocks[part], k)
        qw = exact(weights.codes)
        total = np.zeros((m, len(qw)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
            for g, first in enumerate(range(0, k, GROUP)):
                columns = slice(first, first + GROUP)
                sums = (qx[:, columns] @ qw[:, columns].T).astype(np.float32, copy=False)
                total += sums * (dx[g][:, None] * weights.scale[:, g])
            y[:, part] = total


def _numbers(codes: NDArray[Any]) -> NDArray[np.float64]:
    """The numbers of e4m3 codes."""
    return NUMBERS.astype(np.float64)[codes.view(np.uint8)]
