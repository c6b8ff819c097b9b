"""Expected products: y in float64, the worst error that the arithmetic allows, and the RMS error that it predicts.

The worst case adds up all roundings. It grows with K, while the RMS error of a correct kernel grows with the square
root of K: at K = 4096 a y that is a third too large is within the worst case. `Expected.check` therefore also compares
the RMS of all errors, each relative to its prediction, with SLACK. A prediction follows from the data: the weights are
rounded as the kernel rounds them, and the error of those weights is measured (weight_loss); float32 sums are modelled
(sum_loss). Errors of independent terms add up in squares.

x is [M, K], W [N, K], y [M, N]. Arrays are NumPy's or, with W placed on a GPU, CuPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qgemm import Tensor
from qgemm.codec.e4m3 import NUMBERS
from qgemm.codec.eight_bits import COLUMNS, E4m3Weights, EightBits
from qgemm.codec.error_bound import (
    STEP,
    TINY,
    U,
    a8_bound,
    a8_g256_bound,
    a8_g256_terms,
    a8_terms,
    e4m3_exact,
    magnitudes,
)
from qgemm.codec.format import Blocks, Format, float_dtype
from qgemm.cuda.layout import row_scale
from qgemm.cuda.layout import tile as tiles

# Largest measured RMS error of float32 sums, relative to sum_loss: kernels sum codes with a bias and subtract it, and
# short sums have few roundings.
SUMS = 4
FEW_OUTPUTS = 64  # an RMS of fewer says little
SLACK = 1.5  # largest measured RMS error, relative to the predicted one
SIGNIFICAND = {"float16": 11, "bfloat16": 8, "float32": 24}  # bits
# RMS error of rounding to p bits, in units of 2^-p: half a unit of the last place times sqrt(1 / 3), and
# sqrt(3 / (8 ln 2)) for significands in [1, 2) whose logarithms are spread evenly.
ROUNDING_RMS = (1 / 3) ** 0.5 * (3 / 8 / np.log(2)) ** 0.5
ROUNDINGS = 6  # roundings of a group's term by integer dots
FLOAT32_RMS = 2.0**-17  # relative RMS error of float32 sums of a few thousand terms, or of a few such products in a row
A8_RMS = 0.006  # relative RMS error of a product from normal activations in blocks of eight bits, with 2.5 sigma of 127
TENSOR_CORE_TERMS = 16  # products that a tensor core adds in one step; it truncates the sum after each step


def check_rms(got: Any, want: Any, dtype: str, roundings: int = 4) -> None:
    """AssertionError if the RMS error, relative to that of want, exceeds SLACK times what roundings to a type give.

    For products whose bound is only the worst case. dtype: "float32", "float16", "bfloat16", or "a8" for activations of
    eight bits. Kernels may round scale, level and weight, and y: four roundings.
    """
    got, want = (part.astype(np.float64) for part in (got, want))
    expected = max(FLOAT32_RMS, {"a8": A8_RMS}.get(dtype) or ROUNDING_RMS * 2.0 ** -SIGNIFICAND[dtype] * roundings**0.5)
    ratio = float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean())) / expected if want.size else 0.0
    assert ratio <= SLACK * (1 + 2 / max(1, want.size) ** 0.5), f"RMS error / that of roundings = {ratio:.3g}"


class Expected(NamedTuple):
    """A product y, its error bound and its predicted RMS error, [M, N] float64 each."""

    y: Any
    bound: Any
    noise: Any

    def check(self, got: Any) -> None:
        """AssertionError if an error exceeds its bound, or the RMS error exceeds the prediction by more than SLACK.

        Where y is NaN or infinite, `got` must not be finite either.
        """
        got, finite = got.astype(np.float64), np.isfinite(self.y)
        assert not bool(np.isfinite(got[~finite]).any()), "a number where y is not finite"
        assert not bool(np.isnan(self.bound[finite]).any()), "no bound where y is finite"
        bounded = self.bounded()
        error = abs(got[bounded] - self.y[bounded])
        assert bool((error <= self.bound[bounded]).all()), "an error exceeds its bound"
        if self.y.size >= FEW_OUTPUTS:
            ratio = self.ratio(got)
            assert ratio <= SLACK * self.sampling(), f"RMS error / prediction = {ratio:.3g}"

    def check_worst_case(self, got: Any) -> None:
        """`check` without the RMS, for outputs that are single weights: the errors of a row's weights are no sample."""
        Expected(self.y, self.bound, self.bound).check(got)

    def ratio(self, got: Any) -> float:
        """RMS of all errors and that of all predictions, each relative to its bound, divided.

        Not the RMS of the quotients: where the few levels of a row happen to be exact, its prediction is near zero.
        """
        bounded = self.bounded()
        bound = self.bound[bounded] + TINY
        errors, predictions = (got.astype(np.float64)[bounded] - self.y[bounded]) / bound, self.noise[bounded] / bound
        return float(np.sqrt((errors**2).mean() / (predictions**2).mean())) if bound.size else 0.0

    def bounded(self) -> Any:
        """The elements of y that have a finite bound."""
        return np.isfinite(self.bound) & np.isfinite(self.y)

    def sampling(self) -> float:
        """How far the RMS of this number of samples may exceed that of the whole population."""
        return 1 + 2 / max(1, self.y.size) ** 0.5

    def only(self, rows: Any) -> Expected:
        """Some rows of y."""
        return Expected(*(part[rows] for part in self))

    def plus(self, *addends: Any) -> Expected:
        """With bias or residual, added in float32."""
        total = sum((part.astype(np.float64) for part in addends), self.y)
        size = abs(total) + sum(abs(part.astype(np.float64)) for part in addends)
        noise = np.sqrt(self.noise**2 + (ROUNDING_RMS * U * size) ** 2)
        return Expected(total, self.bound + 2 * len(addends) * U * size, noise)

    def times(self, factor: Any) -> Expected:
        """Multiplied by a float32 factor, or by that of each column, in float32."""
        y = self.y * factor
        noise = np.sqrt((self.noise * factor) ** 2 + (ROUNDING_RMS * U * y) ** 2)
        return Expected(y, self.bound * abs(factor) + 2 * U * abs(y), noise)

    def rounded(self, dtype: Any) -> Expected:
        """With y rounded to a type; the smallest half is 2^-24."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        unit = 0.0 if name == "float32" else 2.0 ** -SIGNIFICAND[name]
        least = 2.0**-25 if name == "float16" else 0.0
        noise = np.sqrt(self.noise**2 + (ROUNDING_RMS * unit * self.y) ** 2 + least**2)
        return Expected(self.y, self.bound + unit * (abs(self.y) + self.bound) + least, noise)


def of_terms(parts: Sequence[Any], size: Any, bound: Any) -> Expected:
    """Sums in float32 of terms [groups, M, N] from integer dots; each part is summed in order, then all are added.

    size: the magnitudes of a group's terms, of which each has a few roundings. A sum of several accumulators has less.
    """
    square = ROUNDINGS * (size * size).sum(axis=0) + sum((part.cumsum(axis=0) ** 2).sum(axis=0) for part in parts)
    return Expected(sum(part.sum(axis=0) for part in parts), bound, ROUNDING_RMS * U * np.sqrt(square) + TINY)


@np.errstate(invalid="ignore")  # scales may be infinite or NaN: they are data
def of_integer_dots(
    x: Blocks,
    w: Tensor,
    levels_first: bool = False,
    partial_dots: bool = False,
    place: Callable[..., Any] = np.asarray,
) -> Expected:
    """error_bound.a8_exact of blocks x [M, K / 32]; twice its bound, since kernels sum codes and zeros separately."""
    parts, size = a8_terms(x, w.format, w.blocks, place, levels_first, partial_dots)
    return of_terms(parts, size, 2 * a8_bound(size))


@np.errstate(invalid="ignore")  # scales may be NaN: they are data
def of_groups(x: Blocks, w: EightBits) -> Expected:
    """error_bound.a8_g256_exact of blocks x [M, K / 32]; twice its bound, as above."""
    terms = a8_g256_terms(x, w)
    return of_terms([terms], terms, 2 * a8_g256_bound(terms))


def of_e4m3(x: Blocks, w: E4m3Weights) -> Expected:
    """error_bound.e4m3_exact of blocks x [M, K / 32].

    A tensor core cuts each term of a step to a multiple of 2^-12 of the largest term's power of two: errors are evenly
    spread below that unit, so that their mean square is a third of its square.
    """
    y, bound = e4m3_exact(x, w)
    m, k = len(x), w.codes.shape[1]
    q, d = NUMBERS[x["qs"].view(np.uint8)].reshape(m, k).astype(np.float64), x["d"].astype(np.float64)
    numbers = NUMBERS[w.codes].astype(np.float64)
    square = np.zeros(y.shape)
    for first in range(0, k, COLUMNS):
        with np.errstate(invalid="ignore"):  # scales may be NaN: they are data
            scale = d[:, first // x["qs"].shape[2], None] * w.scale[:, first // COLUMNS].astype(np.float64)
        total = np.zeros(y.shape)
        for start in range(first, min(first + COLUMNS, k), STEP):
            products = q[:, None, start : start + STEP] * numbers[None, :, start : start + STEP]
            largest = np.maximum(np.abs(total), np.abs(products).max(axis=2))
            unit = 2.0**-12 * np.exp2(np.floor(np.log2(np.maximum(largest, TINY))))
            square += scale**2 * unit**2 * (STEP + 1) / 3
            total += products.sum(axis=2)
    return Expected(y, bound, np.sqrt(square) + TINY)


def weight_loss(fmt: Format, blocks: Blocks, dtype: str, levels_alone: bool = False) -> np.ndarray:
    """The RMS error of weights that are rounded to multiply x of this type, by row of blocks [N, b]. [N]

    Relative to the RMS of the weights' magnitudes (error_bound.magnitudes). Prefill kernels round level, scale and
    minimum to half, then the weight (tests/test_operand_a.py compares this bit for bit). levels_alone: decode kernels,
    which round only the levels of a codebook, to the type of x.
    """
    if dtype == "float32" or (levels_alone and not fmt.needs_table):
        return np.zeros(len(blocks))
    size = magnitudes(fmt, blocks)
    with np.errstate(over="ignore", invalid="ignore"):  # scales may be any bit pattern
        error = rounded_weights(fmt, blocks, dtype, levels_alone) - fmt.dequantize(blocks, np.float64)
        square, total = (np.nansum(part * part, axis=1) for part in (error, size))
    return np.sqrt(np.divide(square, total, out=np.zeros_like(square), where=total > 0))


def rounded_weights(fmt: Format, blocks: Blocks, dtype: str, levels_alone: bool) -> np.ndarray:
    """The weights [N, K] that kernels multiply by x of float16 or bfloat16."""
    n, kind = len(blocks), float_dtype(dtype)
    if fmt.plain:
        return fmt.dequantize(blocks, np.float64).astype(kind).astype(np.float64)
    unit = row_scale.range_of(fmt)
    row = np.array([unit.weight(bound) for bound in tiles.row_absmax(fmt, blocks)])[:, None]
    codes, scale, minimum, zero = fmt.decode_levels(blocks.reshape(-1)).zeros_as_minimums()
    level = np.ldexp(codes.astype(np.float64).reshape(n, -1) - zero, unit.level)
    scale, minimum = (
        np.repeat(part.astype(np.float64).reshape(n, -1), fmt.group, axis=1)
        for part in (scale, np.zeros_like(scale) if minimum is None else minimum)
    )
    scale, minimum = np.ldexp(scale, -row - unit.level), np.ldexp(minimum, -row)
    if levels_alone:
        return np.ldexp(level.astype(kind).astype(np.float64) * scale + minimum, row)
    level, scale, minimum = (part.astype(np.float16).astype(np.float64) for part in (level, scale, minimum))
    return np.ldexp((level * scale + minimum).astype(np.float16).astype(np.float64), row)


def sum_loss(terms: int, tensor_cores: bool = True) -> float:
    """The RMS error of a float32 sum of `terms` products, relative to the root of the sum of their squares.

    Partial sums grow with the root of the number of their terms, and each addition rounds: this is the error of one sum
    in order, which several partial sums only lessen. A tensor core truncates toward zero once a step: its sum, which
    gives an error of one sign, and the products of the step, with one bit more than the sum has.
    """
    steps = tensor_cores * terms / TENSOR_CORE_TERMS
    return U * (ROUNDING_RMS * (3 + terms / 2) ** 0.5 + steps + 2 * steps**0.5)


def noise_of(x: Any, size: Any, loss: Any, tensor_cores: bool = True, summed: Any = None) -> Any:
    """The predicted RMS error [M, N] of sums of x [M, K] times weights of magnitudes size [N, K], float64 both.

    loss [N]: relative error of the weights, by weight_loss. summed [N, K]: the magnitudes of the terms that a kernel
    adds, if these are not the weights: it may sum codes with an offset and subtract that after the sum.
    """
    with np.errstate(invalid="ignore"):  # x may be NaN or infinite
        square = x * x
        weights = square @ (size * size).T
        sums = weights if summed is None else square @ (summed * summed).T
    return np.sqrt(weights * loss**2 + sums * (SUMS * sum_loss(x.shape[1], tensor_cores)) ** 2) + TINY
