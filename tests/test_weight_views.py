"""Weights derived from others: a stack of matrices of several formats."""

from __future__ import annotations

import numpy as np
from helpers import random_tensor
from numpy.testing import assert_array_equal

from qgemm.converter.weight import weight_from_tensor
from qgemm.converter.weight_views import stack_matrices
from qgemm.formats import format_named

FORMATS = "u2z_g32", "u4z_g32", "u3_g32"


def test_a_stack_of_formats_has_codes_in_the_range_of_all():
    """Whichever comes first; values are read in any range of rows."""
    tensors = [random_tensor(format_named(name), 8, 64, np.random.default_rng(i)) for i, name in enumerate(FORMATS)]
    for order in ((0, 1, 2), (2, 1, 0)):
        parts = [weight_from_tensor(tensors[i]) for i in order]
        stack = stack_matrices("w", parts)
        assert stack.shape == (3, 8, 64)
        assert stack.codes is not None
        codes = [part.codes for part in parts]
        assert (stack.codes.least, stack.codes.greatest) == (0, 15)
        assert stack.codes.low == min(source.low for source in codes)
        assert stack.codes.high == max(source.high for source in codes)
        want = np.concatenate([tensors[i].dequantize().reshape(-1) for i in order])
        for start, stop in ((0, 3 * 512), (512 - 64, 512 + 64), (1024, 1536), (64, 128)):
            assert_array_equal(stack.values(start, stop), want[start:stop])
            assert_array_equal(stack.codes.read(start, stop).values(), want[start:stop])
