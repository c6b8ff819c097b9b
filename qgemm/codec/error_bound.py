"""How far a product in float32 may lie from the exact one: bounds derived from K and the format, not measured.

A sum of n rounded terms, in any order, is off by at most gamma(n) times the sum of their magnitudes (Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1). x is [M, K], w [N, K], y [M, N], all in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .e4m3 import NUMBERS
from .eight_bits import COLUMNS, E4m3Weights, EightBits
from .format import Blocks, Format
from .group_activations import GROUP
from .q8_1_f32 import UNIT, scale_and_sum

Doubles = NDArray[np.float64]

U = 2.0**-24  # the relative error of one float32 operation
TINY = 1e-37  # above the loss of K subnormal results, below any useful product
STEP = 32  # e4m3 products that a tensor core adds at a time
LARGEST = float(np.finfo(np.float32).max)


def gamma(operations: int) -> float:
    """The relative error of `operations` roundings in a row."""
    return operations * U / (1 - operations * U)


def magnitudes(fmt: Format, blocks: Blocks) -> Doubles:
    """Blocks [N, b] -> the magnitudes of the terms of each weight, [N, K]: scale * |code - zero| + |minimum|.

    Where the terms cancel, this may be far above the weight itself. Kernels treat a zero of each group as a minimum:
    scale * |code| + |scale * zero|.
    """
    codes, scale, minimum, zero = fmt.decode_levels(blocks.reshape(-1))
    if isinstance(zero, np.ndarray):
        sizes = np.abs(codes.astype(np.float64)) + np.abs(zero.astype(np.float64))[..., None]
    else:
        sizes = np.abs(codes.astype(np.float64) - zero)
    with np.errstate(invalid="ignore"):  # scales may be infinite or NaN: they are data
        if scale is not None:
            sizes *= np.abs(scale.astype(np.float64))[..., None]
        if minimum is not None:
            sizes += np.abs(minimum.astype(np.float64))[..., None]
    return sizes.reshape(len(blocks), blocks.shape[1] * fmt.weights)


def a16_bound(x: Doubles, w: Doubles) -> Doubles:
    """Error bound of x @ w.T from exact factors: K products, K - 1 additions, a scale and a minimum on a block's sum.

    With a codebook the decoded weight of the reference is itself a rounded product of scale and level. w: the
    `magnitudes` of the weights; for formats without a minimum those of the weights themselves.
    """
    return _bound(x.shape[1] + 4, np.abs(x) @ np.abs(w).T)


def a8_exact(x: Blocks, fmt: Format, w: Blocks, partial_dots: bool = False) -> tuple[Doubles, Doubles]:
    """The product of blocks x [M, K / 32] and w [N, b] of codes, and the bound of its float32 version: see `a8_terms`.

    Per block of x, within a group of weights, dw * (da * sumi - zero * sa) + mw * sa: six roundings, none in the
    integer dot product sumi. A group of 16 has no sum sa of its own: dw * da * sumi + mw * da * sum(q), sumi being of
    codes - zero. Then a sum over all blocks or groups.
    """
    parts, size = a8_terms(x, fmt, w, np.asarray, False, partial_dots)
    return sum(part.sum(axis=0) for part in parts), a8_bound(size)


def a8_bound(size: Doubles) -> Doubles:
    """The bound of a8_exact from the magnitudes of each group's terms [groups, M, N]."""
    return _bound(len(size) + 6, size.sum(axis=0), UNIT)


def a8_terms(
    x: Blocks, fmt: Format, w: Blocks, place: Callable[[NDArray[Any]], Any], levels_first: bool, partial_dots: bool
) -> tuple[list[Doubles], Doubles]:
    """The terms of `a8_exact` from dots, zeros and minimums [groups, M, N] each, and the magnitude of each group's.

    x: blocks of qgemm/codec/q8_1_f32.py, or of q8_1. place: cupy.asarray to multiply on a GPU and to return arrays
    there. levels_first: for kernels whose integer dots use codes - zero (TileLayout.bytes_are_levels). partial_dots:
    for kernels that scale the integer dots of parts of a group and add them in float32 (kernels/cpu/lane_rows.h): where
    parts cancel, the group's sum is zero but its error is not.
    """
    n, (m, sums) = len(w), x.shape
    width = min(fmt.group, x.dtype["qs"].itemsize)
    levels = fmt.decode_levels(w.reshape(-1))
    assert levels.scale is not None, "a8 needs a scale a block"
    codes = place(levels.codes.reshape(n, -1, width).transpose(1, 2, 0)).astype(np.float64)  # [groups, width, N]
    q = place(x["qs"].reshape(m, -1, width).transpose(1, 0, 2)).astype(np.float64)  # [groups, M, width]
    da, sa = (place(part.T[:, :, None]) for part in scale_and_sum(x))  # [K / 32, M, 1]
    da = da.repeat(len(q) // max(1, sums), axis=0)
    shared = fmt.group // width  # blocks of x within a group
    dw = place(_by_group(levels.scale, n, shared))
    zero = place(_by_group(np.broadcast_to(levels.zero, levels.scale.shape), n, shared))
    if levels_first or len(q) != sums:
        codes, zero = codes - zero, np.zeros_like(zero)
    if len(q) != sums:
        with np.errstate(invalid="ignore"):
            sa = da * q.sum(axis=2, keepdims=True)
    with np.errstate(invalid="ignore"):  # scales may be infinite or NaN: they are data
        parts = [dw * (da * (q @ codes))]  # [groups, M, N]
        size = abs(dw * (da * (abs(q) @ abs(codes)))) if partial_dots else abs(parts[0])
        if zero.any():  # 0 times an infinite sum sa would be NaN
            parts.append(-dw * (zero * sa))
        if levels.minimum is not None:
            parts.append(place(_by_group(levels.minimum, n, shared)) * sa)
        return parts, sum((abs(part) for part in parts[1:]), size)


def a8_g256_exact(x: Blocks, w: EightBits) -> tuple[Doubles, Doubles]:
    """The product of blocks x [M, K / 32] of codec/group_activations.py and weights of eight bits [N, K]; its bound.

    The float32 version has two roundings per group of columns, none in the integer sum, then a sum over groups.
    """
    terms = a8_g256_terms(x, w)
    with np.errstate(invalid="ignore"):  # scales may be NaN: they are data
        return terms.sum(axis=0), a8_g256_bound(terms)


def a8_g256_bound(terms: Doubles) -> Doubles:
    """The bound of a8_g256_exact from its terms."""
    return _bound(len(terms) + 3, abs(terms).sum(axis=0))


def a8_g256_terms(x: Blocks, w: EightBits) -> Doubles:
    """The terms of `a8_g256_exact`, one a group of columns. [groups, M, N]"""
    (m, n), k = (len(x), len(w.codes)), w.codes.shape[1]
    q, d = x["qs"].reshape(m, k).astype(np.float64), x["d"].astype(np.float64)
    terms = np.zeros((-(-k // GROUP), m, n))
    for group, term in enumerate(terms):
        first = group * GROUP
        columns = slice(first, first + GROUP)
        sums = q[:, columns] @ w.codes[:, columns].T.astype(np.float64)
        with np.errstate(invalid="ignore"):  # scales may be NaN: they are data
            term[:] = d[:, first // x["qs"].shape[2], None] * w.scale[:, first // COLUMNS].astype(np.float64) * sums
    return terms


def e4m3_exact(x: Blocks, w: E4m3Weights) -> tuple[Doubles, Doubles]:
    """The product of blocks x [M, K / 32] of "e4m3_g256" and weights of e4m3 [N, K], and the bound of a tensor core's.

    An instruction adds STEP products to the accumulator. All terms are shifted to the exponent of the largest and cut
    after 14 bits (DeepSeek-V3 technical report, section 3.5.2), which include the two before the point of a product of
    two significands: STEP + 1 terms, and the stored sum, each lose at most 2^-12 of the largest term. Sums that are
    multiples of that lose nothing; the order of the STEP products does not matter. Each group adds two roundings, then
    follows a sum over groups.
    """
    m, k = len(x), w.codes.shape[1]
    q, d = NUMBERS[x["qs"].view(np.uint8)].reshape(m, k).astype(np.float64), x["d"].astype(np.float64)
    numbers, lost = NUMBERS[w.codes].astype(np.float64), (STEP + 2) * 2.0**-12
    y, size, cut = np.zeros((3, m, len(numbers)))
    for first in range(0, k, COLUMNS):
        acc, off = np.zeros((2, m, len(numbers)))
        for step in range(first, min(first + COLUMNS, k), STEP):
            products = q[:, None, step : step + STEP] * numbers[None, :, step : step + STEP]
            before, acc = np.abs(acc), acc + products.sum(axis=2)
            largest = np.maximum(np.maximum(before, np.abs(acc)), np.abs(products).max(axis=2))
            off = (off + lost * (largest + off)) / (1 - lost)
        with np.errstate(invalid="ignore"):  # scales may be NaN: they are data
            scale = d[:, first // x["qs"].shape[2], None] * w.scale[:, first // COLUMNS].astype(np.float64)
            y, size, cut = y + scale * acc, size + np.abs(scale * acc), cut + np.abs(scale) * off
    return y, _bound(-(-k // COLUMNS) + 3, size + cut) + cut


def excess(y: NDArray[Any], exact: Doubles, bound: Doubles) -> float:
    """The largest error as a fraction of its bound, at most 1 where y is right. NaN counts as infinite."""
    bounded = np.isfinite(bound)
    error = np.abs(y[bounded] - exact[bounded])
    error[np.isnan(error)] = np.inf
    return float((error / bound[bounded]).max(initial=0))


def _by_group(part: NDArray[Any], n: int, shared: int) -> Doubles:
    """Scales, minimums or zeros of n rows of groups, each `shared` times, as float64 [groups, 1, N]."""
    return part.reshape(n, -1).T.repeat(shared, axis=0).astype(np.float64)[:, None]


def _bound(operations: int, size: Doubles, unit: float = 1.0) -> Doubles:
    """Error bound of a sum of terms whose magnitudes add up to `size`; infinite where float32 overflows.

    unit: the unit of the sum. A subnormal result is off by 2^-150 units, in each of three steps of a term.
    """
    bounded, tiny = size < LARGEST, max(TINY, 3 * operations * unit * 2.0**-150)
    return np.where(bounded, gamma(operations) * np.where(bounded, size, 0) + tiny, np.inf)
