"""How far a product in float32 may lie from the exact one: bounds derived from K and the format, not measured.

A sum of n rounded terms, in any order, is off by at most gamma(n) times the sum of their magnitudes (Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1). x is [M, K], w [N, K], y [M, N], all in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block import Blocks, Format

Doubles = NDArray[np.float64]

U = 2.0**-24  # the relative error of one float32 operation
TINY = 1e-37  # more than K subnormal results can lose, and below what any product of use is made of
LARGEST = float(np.finfo(np.float32).max)


def gamma(operations: int) -> float:
    """The relative error of `operations` roundings in a row."""
    return operations * U / (1 - operations * U)


def a16_bound(x: Doubles, w: Doubles) -> Doubles:
    """Of x @ w.T from exact factors: K products, K - 1 additions, and for blocks a scale and a minimum on the sum."""
    return _bound(x.shape[1] + 4, np.abs(x) @ np.abs(w).T)


def a8_exact(x: Blocks, fmt: Format, w: Blocks) -> tuple[Doubles, Doubles]:
    """The product of Q8_1 blocks x [M, b] and blocks w [N, b] of 32 codes, and the bound of its float32 version.

    Per block dw * (da * sumi - zero * sa) + mw * sa: six roundings, none in the integer dot product sumi. Then a
    sum over blocks.
    """
    n, b = w.shape
    levels = fmt.decode_levels(w.reshape(-1))
    assert levels.scale is not None, "a8 needs a scale a block"
    codes = levels.codes.reshape(n, b, -1).transpose(1, 2, 0).astype(np.float64)  # [b, 32, N]
    sumi = x["qs"].transpose(1, 0, 2).astype(np.float64) @ codes  # [b, M, N]
    da, sa = (x[name].T.astype(np.float64)[:, :, None] for name in ("d", "s"))  # [b, M, 1]
    dw = _by_block(levels.scale, n)
    with np.errstate(invalid="ignore"):  # scales may be infinite or NaN: they are data
        y = dw * (da * sumi - levels.zero * sa)
        size = np.abs(dw) * (np.abs(da * sumi) + np.abs(levels.zero * sa))
        if levels.minimum is not None:
            shift = _by_block(levels.minimum, n) * sa
            y, size = y + shift, size + np.abs(shift)
        return y.sum(axis=0), _bound(b + 6, size.sum(axis=0))


def excess(y: NDArray[Any], exact: Doubles, bound: Doubles) -> float:
    """The largest error as a fraction of its bound, 0 without any: up to 1 all is well. NaN counts as infinite."""
    bounded = np.isfinite(bound)
    error = np.abs(y[bounded] - exact[bounded])
    error[np.isnan(error)] = np.inf
    return float((error / bound[bounded]).max(initial=0))


def _by_block(part: NDArray[np.float32], n: int) -> Doubles:
    """A scale or minimum of n rows of blocks, as float64 [b, 1, N]."""
    return part.reshape(n, -1).T.astype(np.float64)[:, None]


def _bound(operations: int, size: Doubles) -> Doubles:
    """Of a sum of terms whose magnitudes add up to `size`; infinite where float32 overflows or a term is not finite."""
    bounded = size < LARGEST
    return np.where(bounded, gamma(operations) * np.where(bounded, size, 0) + TINY, np.inf)
