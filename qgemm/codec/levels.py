"""Levels: blocks as codes, scales, minimums and zeros, which kernels multiply separately."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .packing import Floats, flushes, times


class Levels(NamedTuple):
    """Blocks as w = scale * (codes - zero) + minimum, computed in float32 in this order.

    codes [n, groups, weights of a group], any numeric dtype; the values of the codes for formats with a codebook. scale
    and minimum [n, groups] float32; None for formats that have none. zero: one for all groups, or an array of integers
    [n, groups]. The device headers in kernels/formats/ expose the same parts; their minimum includes the zero that a
    group has of its own.
    """

    codes: NDArray[Any]
    scale: Floats | None = None
    minimum: Floats | None = None
    zero: int | NDArray[Any] = 0

    def values(self) -> Floats:
        """The weights [n, groups * weights of a group], bit for bit as ggml's C reference decodes them."""
        w = self.codes.astype(np.float32, copy=self.scale is not None)
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be any bit pattern: inf * 0 is data here
            if isinstance(self.zero, np.ndarray):
                w -= self.zero[..., None].astype(np.float32)
            elif self.zero:
                w -= np.float32(self.zero)
            if self.scale is not None:
                w = times(w, self.scale) if flushes() else np.multiply(w, self.scale[..., None], out=w)
            if self.minimum is not None:
                w += self.minimum[..., None]
        return w.reshape(len(w), prod(w.shape[1:]))  # reshape(0, -1) would fail

    def decoded(self) -> Levels:
        """The weights as codes [n, 1, weights] float32 without a scale, for formats without a kernel."""
        return Levels(self.values()[:, None])

    def zeros_as_minimums(self) -> Levels:
        """These levels with the zero of each group moved into its minimum; equal but for rounding."""
        if not isinstance(self.zero, np.ndarray) or self.scale is None:
            return self
        with np.errstate(invalid="ignore", over="ignore"):
            shift = -self.scale * self.zero
            return self._replace(minimum=shift if self.minimum is None else self.minimum + shift, zero=0)
