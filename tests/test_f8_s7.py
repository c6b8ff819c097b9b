"""f8_e4m3, f8_e5m2 and s7_1of2: codecs and products."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
from harness import Lanes
from helpers import normal, random_tensor
from hypothesis import given
from strategies import each, seeds

import qgemm
from qgemm.codec.format import Levels
from qgemm.formats import format_of

S7 = format_of("s7_1of2")
F8 = [format_of(name) for name in ("f8_e4m3_g128", "f8_e5m2_g32", "f8_e4m3_g256")]
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
lanes = cache(Lanes)


def kind_of(fmt):
    return TYPES[fmt.name.split("_")[1]]


# ---------------------------------------------------------------- codecs


@each(F8)
@given(rng=seeds())
def test_numbers_of_eight_bits_are_those_of_ml_dtypes(fmt, rng):
    codes = rng.integers(0, 256, (3, fmt.weights)).astype(np.uint8)
    blocks = fmt.pack(Levels(codes, np.ones(3, np.float32)))
    with np.errstate(invalid="ignore"):
        want = codes.view(kind_of(fmt)).astype(np.float32)
    np.testing.assert_array_equal(fmt.decode(blocks), want)


@each(F8)
@given(rng=seeds())
def test_values_go_to_the_nearest_number(fmt, rng):
    """As ml_dtypes rounds x / d, to nearest even; values on the grid stay."""
    most = float(ml_dtypes.finfo(kind_of(fmt)).max)
    d = 2.0 ** rng.integers(-20, 20)
    x = (rng.standard_normal((4, fmt.weights)) * 2.0 ** rng.integers(-12, 4, (4, fmt.weights))).astype(np.float32)
    x = np.clip(x, -most, most)
    x[:, 0] = most
    want = (x.astype(kind_of(fmt)).astype(np.float64) * d).astype(np.float32)
    found = fmt.dequantize(fmt.quantize((x * d).astype(np.float32)))
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(fmt.dequantize(fmt.quantize(found)), found)


@given(rng=seeds())
def test_the_larger_of_two_neighbours_is_kept(rng):
    x = rng.standard_normal((5, 256)).astype(np.float16).astype(np.float32)
    w = S7.dequantize(S7.quantize(x))
    pairs, made = x.reshape(5, -1, 2), w.reshape(5, -1, 2)
    second = np.abs(pairs[..., 1]) > np.abs(pairs[..., 0])
    assert (np.take_along_axis(made, (~second)[..., None].astype(int), 2) == 0).all()
    kept = np.take_along_axis(pairs, second[..., None].astype(int), 2)
    step = np.abs(x).reshape(5, 2, -1).max(axis=2).repeat(64, axis=1)[..., None] / 64
    error = np.abs(np.take_along_axis(made, second[..., None].astype(int), 2) - kept)
    assert (error <= step * (1 + 2.0**-9)).all()
    np.testing.assert_array_equal(S7.dequantize(S7.quantize(w)), w)
    assert S7.bpw == 4.125


@each([S7, F8[0]])
def test_products_on_the_host(fmt):
    w, x = random_tensor(fmt, 40, 512, np.random.default_rng(1)), normal(7, 512)
    want = x.astype(np.float64) @ w.dequantize(np.float64).T
    np.testing.assert_allclose(qgemm.matmul(x, w), want, rtol=0, atol=np.abs(want).max() * 2.0**-18)
