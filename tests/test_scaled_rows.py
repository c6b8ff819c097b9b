"""x of bf16 as halves with a power of two for each row (kernels/quantize/scaled_rows.cuh), on the host."""

from __future__ import annotations

from functools import cache

import harness
import numpy as np
import pytest
from harness import device_array, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

from qgemm.cuda.kernels.transforms import SCALE_ROWS, SCALE_THREADS
from qgemm.cuda.layout import scaled_rows

pytestmark = [pytest.mark.compiles, harness.needs_compiler]


@cache
def kernel() -> harness.Kernel:
    return harness.Kernel(SCALE_ROWS.name, None, **SCALE_ROWS.types[0])


def scaled(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Halves [m, k] and factors [m] of x [m, k], the bits of bf16."""
    m, k = bits.shape
    rows = device_array((m, scaled_rows.pitch(k)), np.float16)
    kernel()((m, 1), SCALE_THREADS, to_device(bits), rows, k, m)
    return rows[:, :k], np.ascontiguousarray(rows[:, k : k + scaled_rows.FACTOR]).view(np.float32)[:, 0]


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@settings(max_examples=20)
@given(seeds(), st.sampled_from([32, 96, 1032, 16392]), st.integers(-120, 120), st.integers(0, 40))
def test_rows_are_exact_to_a_tiny_share_of_their_largest_value(rng, k, exponent, spread):
    """Values that lie more than 2^32 below the largest of their row are rounded, to at most 2^-40 of it."""
    values = np.ldexp(rng.standard_normal((3, k)), exponent - rng.integers(0, spread + 1, (3, k)))
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    halves, factors = scaled(bits)
    x = floats(bits).astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    error = np.abs(halves.astype(np.float64) * factors[:, None].astype(np.float64) - x)
    assert (np.frexp(factors)[0] == 0.5).all()
    assert (error[np.abs(x) >= largest * 2.0**-31] == 0).all()
    assert (error <= largest * 2.0**-39).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 2.0**-133, 3e38, -3e38, np.inf, -np.inf, np.nan])
def test_zeros_subnormal_numbers_and_what_is_not_finite(value):
    """A row keeps its infinities and NaN, and its finite numbers stay finite beside them."""
    row = np.array([[value] + [1e30] * 31], np.float32)
    bits = np.concatenate([row.view(np.uint32) >> 16, [[row.view(np.uint32)[0, 0] >> 16] * 32]]).astype(np.uint16)
    halves, factors = scaled(bits)
    with np.errstate(over="ignore"):
        restored = halves.astype(np.float32) * factors[:, None]
    x = floats(bits)
    np.testing.assert_array_equal(np.isfinite(restored), np.isfinite(x))
    np.testing.assert_array_equal(restored[1], x[1])  # subnormal bf16 become exact halves
    assert restored[0, 0] == x[0, 0] or np.isnan(x[0, 0]) or abs(x[0, 0]) < 1e-9


def test_rows_start_at_cache_lines():
    """Boxes of a tensor map are lines then: else they load at half the speed."""
    for k in (32, 62, 64, 4096, 14336):
        assert scaled_rows.pitch(k) % scaled_rows.LINE == 0
        assert scaled_rows.pitch(k) >= k + scaled_rows.FACTOR
