"""Levels: decoded blocks as codes, scales, minimums and zeros, the parts that kernels multiply separately."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .packing import Floats, flushes, times


class Levels(NamedTuple):
    """Blocks as w = scale * (codes - zero) + minimum, computed in float32 in this order.

    codes [n, groups, weights of a group], any numeric dtype, for formats with a codebook the values that the codes
    stand for; scale and minimum [n, groups] float32, None for formats that have none. zero: of every group, or an array
    of integers [n, groups]. The device headers in kernels/formats/ expose the same parts; a zero that each group has of
    its own is part of the minimum there.
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
        return w.reshape(len(w), prod(w.shape[1:]))  # of no blocks, too

    def decoded(self) -> Levels:
        """The weights as codes [n, 1, weights] float32 without a scale, of formats that no kernel knows."""
        return Levels(self.values()[:, None])

    def zeros_as_minimums(self) -> Levels:
        """These levels with each group's own zero moved into its minimum; equal but for rounding."""
        if not isinstance(self.zero, np.ndarray) or self.scale is None:
            return self
        with np.errstate(invalid="ignore", over="ignore"):
            shift = -self.scale * self.zero
            return self._replace(minimum=shift if self.minimum is None else self.minimum + shift, zero=0)
