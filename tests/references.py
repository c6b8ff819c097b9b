"""Products in float64 on the GPU, of weights that NumPy decodes: references of tests/gpu/.

NumPy decodes the weights, independently of the kernels and once for all products of a tensor. cuBLAS multiplies the
decoded weights in float64, because NumPy would spend most of a test's time on the product. All results are arrays on
the GPU, where a test compares them with y.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from helpers import cupy, level_loss_of, level_magnitudes, random_tensor, subnormal_loss
from measured_errors import Expected, noise_of, of_integer_dots, weight_loss

import qgemm
from qgemm.codec.error_bound import magnitudes
from qgemm.codec.format import Format

EVERY_ROW = slice(None)


class Reference:
    """A tensor on the host and on the GPU, with the operands of its reference products, computed at their first use.

    rows: those of W [N, K] whose products are computed; all, or an array of their numbers.
    """

    def __init__(self, w: qgemm.Tensor, rows: Any = EVERY_ROW) -> None:
        self.whole, self.rows = w, rows
        self.w = w if isinstance(rows, slice) else w[rows]
        self.on_device = w.to_device()
        self.losses: dict[tuple[str, bool], Any] = {}

    @cached_property
    def dense(self) -> Any:
        """The exactly decoded weights, [N, K] float64."""
        return cupy().asarray(self.w.dequantize(np.float64))

    @cached_property
    def magnitudes(self) -> Any:
        """The sum of the magnitudes of each weight's terms, by error_bound.magnitudes. [N, K]"""
        return cupy().asarray(magnitudes(self.w.format, self.w.blocks))

    @cached_property
    def level_magnitudes(self) -> Any:
        """The magnitudes of a codebook's weights, by helpers.level_magnitudes. [N, K]"""
        return cupy().asarray(level_magnitudes(self.w))

    @cached_property
    def subnormal_loss(self) -> Any:
        """The rounding error of each row's subnormal halves, by helpers.subnormal_loss. [N]"""
        return cupy().asarray(subnormal_loss(self.w))

    def weight_loss(self, dtype: str, levels_alone: bool) -> Any:
        """The relative error of each row's weights, by measured_errors.weight_loss. [N]"""
        key = dtype, levels_alone
        if key not in self.losses:
            self.losses[key] = cupy().asarray(weight_loss(self.w.format, self.w.blocks, *key))
        return self.losses[key]

    def expected(self, x: Any, bound: Any, dtype: str, sizes: Any = None, levels_alone: bool = False) -> Expected:
        """The product of x [M, K], on the GPU, by weights of a type; sizes [N, K]: magnitudes of what kernels sum."""
        sizes = self.magnitudes if sizes is None else sizes
        x = x.astype(np.float64)
        return Expected(self.exact(x), bound, noise_of(x, sizes, self.weight_loss(dtype, levels_alone)))

    def exact(self, x: Any) -> Any:
        """x [M, K] of the GPU @ W.T, [M, N] float64."""
        return x.astype(np.float64) @ self.dense.T

    def level_loss(self, x: Any, dtype: str) -> Any:
        """The error of a product of x [M, K], on the GPU, from rounding a codebook's levels to x's type."""
        lost = level_loss_of(self.w.format, dtype)
        return lost * (abs(x.astype(np.float64)) @ self.level_magnitudes.T) if lost else 0.0

    def a8(self, x: Any) -> Expected:
        """measured_errors.of_integer_dots of x [M, K], on the GPU, rounded to blocks by NumPy."""
        return of_integer_dots(qgemm.quantize_activations(x.get()).blocks, self.w, place=cupy().asarray)


@lru_cache(maxsize=8)
def reference(fmt: Format, n: int, k: int, seed: int = 0) -> Reference:
    """The reference of random weights [N, K'], cached for consecutive tests of a format, which must not change it."""
    return Reference(random_tensor(fmt, n, k, np.random.default_rng([n, k, seed])))
