"""Scale search: blocks with a lower weighted error than the encoders' own, byte for byte as ggml finds them.

ggml does this wherever it has an importance matrix. The weight of each squared error is

    importance * sqrt(mean square of the row + x * x)

Symmetric formats try 19 scales around that of the largest magnitude, affine ones 37 around that of the range. Each
scale gives codes, for which least squares give the best scale (and minimum, which must not be positive) in closed form;
the candidate of the least error wins. All is float32, and sums run in the order of the weights, since bytes depend on
it. Arrays are [weight of the block, block], so that a sum over a block is a sum over rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qgemm.errors import ShapeError, UnsupportedError
from qgemm.parallel import for_slices

from .compiled import compilable
from .format import FITTED, Blocks, Format, Levels
from .packing import Floats

MIN_MAGNITUDE = np.float32(1e-15)  # ggml encodes blocks without a larger magnitude as zeros
SHARE = 1024  # blocks searched at a time: they fit in a core's cache

Codes = NDArray[np.int32]


def searched(fmt: Format) -> bool:
    """Whether a format can be searched: it has a search of its own, or packs codes from 0 on with a minimum or with the
    zero in their middle."""
    return fmt.encoding.weighted is not None or (fmt.pack is not None and fmt.code_range[0] == 0)


def quantize(fmt: Format, x: NDArray[Any], importance: ArrayLike) -> Blocks:
    """Values [..., K], the importance of each [K] or [..., K] -> blocks [..., K / weights], on all cores.

    ShapeError for an importance of another shape, UnsupportedError for one that is negative or not finite, TypeError
    for one that is no array of real numbers, and QuantizeError as by Format.quantize.
    """
    imatrix = importance_array(importance)
    check_importance(x.shape, imatrix.shape, bool((np.isfinite(imatrix) & (imatrix >= 0)).all()))
    k = x.shape[-1]
    count = fmt.blocks_in(k)
    rows, row_importance = x.reshape(-1, k), np.broadcast_to(imatrix, x.shape).reshape(-1, k)
    blocks = np.empty((len(rows), count), fmt.dtype)

    def work(part: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the check refuses such blocks
            blocks[part] = search(fmt, rows[part].astype(np.float32, copy=False), row_importance[part]).reshape(
                -1, count
            )
            fmt.check(rows[part].reshape(-1, fmt.weights), blocks[part].reshape(-1), part.start * count, count)

    for_slices(len(rows) if k else 0, max(1, FITTED // max(1, k)), work)
    return blocks.reshape(*x.shape[:-1], count)


def importance_array(importance: ArrayLike) -> Floats:
    """An importance on the host as float32; TypeError for text, complex numbers and the like."""
    imatrix = np.asarray(importance)
    if imatrix.dtype.kind in "cOSUMm":
        raise TypeError(f"imatrix must be of real numbers, got {imatrix.dtype}")
    with np.errstate(over="ignore"):  # `check_importance` refuses infinity
        return imatrix.astype(np.float32, copy=False)


def check_importance(shape: tuple[int, ...], imatrix_shape: tuple[int, ...], fine: bool) -> None:
    """ShapeError for an importance of another shape than values [..., K] or [K], UnsupportedError unless it is `fine`.

    fine: whether it is finite and nowhere negative.
    """
    if not shape or imatrix_shape not in (shape[-1:], shape):
        fitting = " or ".join({str(shape[-1:]): None, str(shape): None})
        raise ShapeError(f"imatrix has shape {imatrix_shape}, x of shape {shape} needs {fitting}")
    if not fine:
        raise UnsupportedError("imatrix has values that are negative or not finite")


def search(fmt: Format, x: Floats, importance: Floats, mean: np.float32 | None = None) -> Blocks:
    """Rows x [n, K], their importance [n, K], [K] or [1] -> blocks [n * K / 32], of a format that is `searched`.

    mean: the mean square of the whole row where x [1, K] is a part of one; None: of each row of x.
    """
    if fmt.encoding.weighted is not None:
        width = x.shape[1] if fmt.encoding.whole_rows else fmt.weights
        return fmt.encoding.weighted(x.reshape(-1, width), np.broadcast_to(importance, x.shape).reshape(-1, width))
    squares = x * x
    mean_squares: Any = mean
    if mean is None:
        mean_squares = np.cumsum(squares, axis=1, dtype=np.float32)[:, -1:] / np.float32(
            x.shape[1]
        )  # one by one, as in C
    weights = (importance * np.sqrt(mean_squares + squares)).reshape(-1, fmt.weights)
    values = x.reshape(-1, fmt.weights)
    blocks = np.empty(len(values), fmt.dtype)
    for start in range(0, len(values), SHARE):
        part = slice(start, start + SHARE)
        blocks[part] = _blocks(fmt, values[part], weights[part])
    return blocks


def sum_of_squares(x: Floats, total: np.float32) -> np.float32:
    """The squares of the next part of a row added one by one to `total`, the sum of the parts before it."""
    with np.errstate(all="ignore"):  # callers refuse values that are not finite
        terms = np.concatenate([[total], x * x])
        return np.float32(np.cumsum(terms, dtype=np.float32)[-1])


def _blocks(fmt: Format, x: Floats, weights: Floats) -> Blocks:
    assert fmt.pack is not None
    return fmt.pack(fitted(x, weights, fmt.code_range[1], fmt.has_minimum))


@compilable
def fitted(x: Floats, weights: Floats, max_code: int, has_minimum: bool) -> Levels:
    """x, weights [n, weights of a block] -> codes [n, weights] uint8 in 0..max_code, scale and perhaps minimum [n]."""
    count = len(x)
    if count == 1:  # NumPy would sum a single column in another order
        x, weights = np.repeat(x, 2, axis=0), np.repeat(weights, 2, axis=0)
    columns, column_weights = np.ascontiguousarray(x.T), np.ascontiguousarray(weights.T)
    with np.errstate(all="ignore"):  # losing candidates may overflow
        fit = (
            affine(columns, column_weights, max_code, WEIGHTED_STEPS)
            if has_minimum
            else symmetric(columns, column_weights, (max_code + 1) // 2)
        )
    codes = np.ascontiguousarray(fit.codes.T[:count]).astype(np.uint8)
    return Levels(codes, fit.scale[:count], None if fit.minimum is None else fit.minimum[:count])


class Fit(NamedTuple):
    """Codes [weights, n] from 0 on, and the scale and minimum (None: there is none) of each column."""

    codes: Codes
    scale: Floats
    minimum: Floats | None = None


class Steps(NamedTuple):
    """The scales that `affine` tries: max_code + first + step * i codes across the range, for i below tries.

    absolute: whether magnitudes of errors count, not their squares.
    """

    first: float
    step: float
    tries: int
    absolute: bool = False


WEIGHTED_STEPS = Steps(-0.9, 0.05, 37)  # with an importance matrix, for every format


def symmetric(x: Floats, weights: Floats, zero: int) -> Fit:
    """x, weights [weights of a group, n], n > 1 -> w = scale * (code - zero), the candidate of the least error."""
    magnitude = np.abs(x)
    largest = _pick(x, magnitude.argmax(axis=0))
    weighted = weights * x

    def fit(step: int) -> tuple[Codes, Floats, Floats]:
        """The codes of a candidate, sum w x l and sum w l l."""
        inverse = -(np.float32(zero) + np.float32(0.1) * np.float32(step)) / largest
        codes = np.clip(nearest_int(inverse * x), -zero, zero - 1)
        levels = codes.astype(np.float32)
        return codes, total(weighted * levels), total(weights * levels * levels)

    codes, products, norms = fit(0)
    scale = np.where(norms != 0, products / norms, np.float32(0))
    best = scale * products
    for step in (*range(-9, 0), *range(1, 10)):
        tried, products, norms = fit(step)
        better = (norms > 0) & (products * products > best * norms)
        codes = np.where(better, tried, codes)
        scale = np.where(better, products / norms, scale)
        best = np.where(better, scale * products, best)
    zeros = magnitude.max(axis=0) < MIN_MAGNITUDE
    codes = np.where(zeros, 0, codes + zero)
    return Fit(codes, np.where(zeros, np.float32(0), scale))


def affine(x: Floats, weights: Floats, max_code: int, steps: Steps) -> Fit:
    """x, weights [weights of a group, n], n > 1 -> w = scale * code + minimum, minimum <= 0, of the least error."""
    least, greatest = _pick(x, x.argmin(axis=0)), x.max(axis=0)  # the first of -0 and +0 counts as the least
    sum_w, sum_x = total(weights), total(weights * x)
    sum_x = np.where(
        np.signbit(weights * x).all(axis=0) & (sum_x == 0), np.float32(-0.0), sum_x
    )  # in C -0 and -0 is -0
    least = np.where(least > 0, np.float32(0), least)

    def tried(inverse: Floats, minimum: Floats) -> Codes:
        return np.clip(nearest_int(inverse * (x - minimum)), 0, max_code)

    def error(scale: NDArray[Any], minimum: NDArray[Any], levels: Floats) -> Floats:
        difference = scale * levels + minimum - x
        return total(weights * (np.abs(difference) if steps.absolute else difference * difference))

    inverse = np.float32(max_code) / (greatest - least)
    codes, scale, minimum = tried(inverse, least), np.float32(1) / inverse, least
    best = error(scale, minimum, codes.astype(np.float32))
    for step in range(steps.tries):  # around the best minimum so far
        more = np.float32(steps.first) + np.float32(steps.step) * np.float32(step)
        inverse = (more + np.float32(max_code)) / (greatest - minimum)
        new = tried(inverse, minimum)
        levels = new.astype(np.float32)
        weighted = weights * levels
        sum_l, sum_l2, sum_xl = total(weighted), total(weighted * levels), total(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_minimum > 0
        new_scale[positive] = (sum_xl / sum_l2)[positive]
        new_minimum[positive] = 0
        new_error = error(new_scale, new_minimum, levels)
        better = (determinant > 0) & (new_error < best)
        codes = np.where(better, new, codes)
        scale, minimum = np.where(better, new_scale, scale), np.where(better, new_minimum, minimum)
        best = np.where(better, new_error, best)
    flat = greatest <= least
    return Fit(np.where(flat, 0, codes), np.where(flat, np.float32(0), scale), np.where(flat, least, minimum))


def _pick(x: Floats, index: NDArray[np.intp]) -> Floats:
    """The value of each column at its index."""
    picked: Floats = np.take_along_axis(x, index[None], 0)[0]
    return picked


def nearest_int(values: Floats) -> Codes:
    """To nearest, ties to even, by adding 1.5 * 2^23; too large numbers become the same integers as in ggml."""
    bits: Codes = (values + np.float32(12582912)).view(np.int32)
    return (bits & 0x007FFFFF) - 0x00400000


def total(terms: NDArray[Any]) -> Floats:
    """The sum of each column of [32, n], n > 1: NumPy adds row by row."""
    sums: Floats = np.add.reduce(terms, axis=0)
    return sums
