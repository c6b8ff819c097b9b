"""Products in float64 on the GPU, of weights that NumPy decodes: references of tests/gpu/.

What is checked independently is how weights are decoded, which stays with NumPy, once for all products of a tensor; a
float64 product of what it gives is left to cuBLAS, since NumPy takes most of a test's time for it. Everything here is
on the GPU, where a test compares it with y.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from helpers import cupy, level_loss_of, level_magnitudes, random_tensor, subnormal_loss

import qgemm
from qgemm.codec.error_bound import a8_exact, magnitudes
from qgemm.codec.format import Format

EVERY_ROW = slice(None)


class Reference:
    """A tensor here and on the GPU, with what references of its products take, made when first asked for.

    rows: those of W [N, K] whose products are computed; all, or an array of their numbers.
    """

    def __init__(self, w: qgemm.Tensor, rows: Any = EVERY_ROW) -> None:
        self.whole, self.rows = w, rows
        self.w = w if isinstance(rows, slice) else w[rows]
        self.on_device = w.to_device()

    @cached_property
    def dense(self) -> Any:
        """The exactly decoded weights, [N, K] float64."""
        return cupy().asarray(self.w.dequantize(np.float64))

    @cached_property
    def magnitudes(self) -> Any:
        """What is summed for each weight: error_bound.magnitudes."""
        return cupy().asarray(magnitudes(self.w.format, self.w.blocks))

    @cached_property
    def level_magnitudes(self) -> Any:
        """Of a codebook: helpers.level_magnitudes."""
        return cupy().asarray(level_magnitudes(self.w))

    @cached_property
    def subnormal_loss(self) -> Any:
        """Of each row: helpers.subnormal_loss."""
        return cupy().asarray(subnormal_loss(self.w))

    def exact(self, x: Any) -> Any:
        """x [M, K] of the GPU @ W.T, [M, N] float64."""
        return x.astype(np.float64) @ self.dense.T

    def level_loss(self, x: Any, dtype: str) -> Any:
        """What rounding a codebook's levels to x's type costs a product of x [M, K], of the GPU."""
        lost = level_loss_of(self.w.format, dtype)
        return lost * (abs(x.astype(np.float64)) @ self.level_magnitudes.T) if lost else 0.0

    def a8_exact(self, x: Any) -> tuple[Any, Any]:
        """error_bound.a8_exact of x [M, K], of the GPU, rounded to blocks by NumPy."""
        blocks = qgemm.quantize_activations(x.get()).blocks
        return a8_exact(blocks, self.w.format, self.w.blocks, cupy().asarray)


@lru_cache(maxsize=8)
def reference(fmt: Format, n: int, k: int, seed: int = 0) -> Reference:
    """That of random weights [N, K'], shared by the tests of a format, which follow each other; nobody changes it."""
    return Reference(random_tensor(fmt, n, k, np.random.default_rng([n, k, seed])))
