"""iq4_nl: 32 weights share one scale, w = d * codebook[q] with q in 0..15; the values lie closer together near 0.

offset  bytes  field
     0      2  d   float16 scale
     2     16  qs  byte j: weight j in the low nibble, weight j + 16 in the high

q        0     1    2    3    4    5    6    7  8   9  10  11  12  13  14   15
value -127  -104  -83  -65  -49  -35  -22  -10  1  13  25  38  53  69  89  113

In a word of a device tile (qgemm/cuda/layout/tile.py) the codes of row g are the lower half, the codes of row g + 8 the
upper half, in the order of their columns: four codes side by side select four bytes of a table at once.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.compiled import compilable
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import HALVES, Bytes, Floats, LaneWords, pack_nibbles, reciprocal, to_float16, unpack_nibbles
from qgemm.codec.scales import absmax, signed_absmax
from qgemm.codec.search import total

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
CODEBOOK = VALUES.astype(np.float32)
CODEBOOK.flags.writeable = False
MIN_MAGNITUDE = np.float32(1e-15)  # ggml encodes blocks without a larger magnitude as zeros
TRIALS = 7  # on either side
PAIRED = (0, 2, 1, 3)  # the nibble in a tile of columns 2t, 2t + 8, 2t + 1, 2t + 9 of a row


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 32] and their importance -> blocks [n]: the d of least error of 16 tries, q nearest to x / d.

    Each try maps the value of largest magnitude to 127 or to one of -134 to -120, which gives the codes; their d
    follows from least squares. Squares of errors are weighted by x^2, with an importance by
    importance * sqrt(2 mean(x^2) + x^2), and summed in the order of the weights, since bytes depend on it.
    """
    d, codes = fitted(x, importance)
    blocks = np.empty(len(x), DTYPE)
    blocks["d"] = to_float16(d)
    blocks["qs"] = pack_nibbles(codes)
    return blocks


@compilable
def fitted(x: Floats, importance: Floats | None) -> tuple[Floats, Bytes]:
    """Blocks [n, 32] and their importance -> d [n], codes [n, 32]."""
    with np.errstate(all="ignore"):  # candidates may overflow
        weights = x * x
        if importance is not None:
            means = total(_columns(weights))[: len(x)] * np.float32(2 / 32)
            weights = importance * np.sqrt(means[:, None] + weights)
        d = scales(x, weights)
        return d, nearest(reciprocal(d)[:, None] * x)


def scales(x: Floats, weights: Floats) -> Floats:
    """Blocks [n, 32], weights of squared errors [n, 32] -> scales [n], 0 for blocks of zeros."""
    zeros, columns, squares = absmax(x) < MIN_MAGNITUDE, _columns(x), _columns(weights)
    largest = np.broadcast_to(signed_absmax(x), columns.shape[1:])
    products, norms = _sums(np.float32(1) / (largest / np.float32(127)), columns, squares)
    d = np.where(norms > 0, products / norms, np.float32(0))  # 0 where all weights are 0
    best = d * products
    for step in range(-TRIALS, TRIALS + 1):
        products, norms = _sums((CODEBOOK[0] + np.float32(step)) / largest, columns, squares)
        better = (norms > 0) & (products * products > best * norms)
        d = np.where(better, products / norms, d)
        best = np.where(better, d * products, best)
    return np.where(zeros, np.float32(0), d[: len(x)])


def _columns(values: Floats) -> Floats:
    """Blocks [n, 32] -> [32, n], n > 1: NumPy sums a block row by row, but a single column in another order."""
    return np.ascontiguousarray((np.repeat(values, 2, axis=0) if len(values) == 1 else values).T)


def _sums(inverse: Floats, x: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """For x [32, n] and 1 / d [n]: the sums of weight * value * x and of weight * value * value, [n] each."""
    values = CODEBOOK.take(nearest(inverse * x))
    weighted = weights * values
    return np.float32(0) + total(weighted * x), total(weighted * values)  # C returns +0, not -0


def nearest(x: Floats) -> Bytes:
    """Values [...] -> the codes of the nearest values, ties of float32 differences go up. NaN gets any code."""
    below = np.zeros(x.shape, np.uint8)
    for value in CODEBOOK[1:-1]:
        below += x >= value
    lower, upper = CODEBOOK.take(below), CODEBOOK.take(below + np.uint8(1))
    return below + ~(x - lower < upper - x)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codebook[q] as codes [n, 1, 32], scale [n, 1]."""
    return Levels(VALUES.take(unpack_nibbles(blocks["qs"]))[:, None], blocks["d"].astype(np.float32)[:, None])


def to_tile(nibbles: LaneWords) -> LaneWords:
    """Words of eight codes, both rows in each byte -> a row in each half, adjacent columns in a byte."""
    words = nibbles["qs"]
    tiled = np.zeros_like(words)
    for j, to in enumerate(PAIRED):
        tiled |= (words >> 8 * j & 15) << 4 * to | (words >> 8 * j + 4 & 15) << 16 + 4 * to
    return {"qs": tiled}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    tiled = words["qs"]
    nibbles = np.zeros_like(tiled)
    for j, nibble in enumerate(PAIRED):
        nibbles |= (tiled >> 4 * nibble & 15) << 8 * j | (tiled >> 16 + 4 * nibble & 15) << 8 * j + 4
    return {"qs": nibbles}


FORMAT = Format(
    "iq4_nl", 32, DTYPE, encode, levels, ggml_type=20, formula="d * codebook[q]", codebook=CODEBOOK,
    tile=TileLayout(slots={"qs": HALVES}, to_tile=to_tile, from_tile=from_tile, code_exponent=0, pair_lookup=True),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
