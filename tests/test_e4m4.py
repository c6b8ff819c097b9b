"""E4M4 numbers and bit planes, against exact arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from strategies import seeds

import qgemm
from qgemm.codec.packing import pack_bit_planes, unpack_bit_planes

BITS = (2, 3, 4, 5)
every_bits = pytest.mark.parametrize("bits", BITS)

E4M4_VALUES = [Fraction(m, 2**14) if e == 0 else Fraction(2) ** (e - 11) * (1 + Fraction(m, 16))
               for e in range(16) for m in range(16)]  # fmt: skip


# ---------------------------------------------------------------- E4M4


def test_e4m4_of_every_code():
    codes = np.arange(256, dtype=np.uint8)
    numbers = qgemm.decode_e4m4(codes)
    assert numbers.dtype == np.float32
    assert [Fraction(float(number)) for number in numbers] == E4M4_VALUES
    assert (np.diff(numbers) > 0).all()
    assert (numbers[0], numbers[1], numbers[16], numbers[255]) == (0, 2.0**-14, 2.0**-10, 31)
    np.testing.assert_array_equal(qgemm.encode_e4m4(numbers), codes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_e4m4_rounds_to_the_nearest_and_ties_to_even(dtype):
    """Around the middle between every two numbers, subnormal ones included, which is exact in both types."""
    low, high = E4M4_VALUES[:-1], E4M4_VALUES[1:]
    middle = np.array([float((a + b) / 2) for a, b in zip(low, high, strict=True)], dtype)
    lower = np.arange(255)
    np.testing.assert_array_equal(qgemm.encode_e4m4(middle), lower + lower % 2)
    np.testing.assert_array_equal(qgemm.encode_e4m4(np.nextafter(middle, 0, dtype=dtype)), lower)
    np.testing.assert_array_equal(qgemm.encode_e4m4(np.nextafter(middle, 99, dtype=dtype)), lower + 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_e4m4_of_every_16_bit_number(dtype):

    numbers = np.arange(2**15, dtype=np.uint16).view(bfloat16 if dtype == "bfloat16" else dtype)
    numbers = numbers[numbers < 31.5]
    distance = np.abs(numbers.astype(np.float64)[:, None] - np.array(E4M4_VALUES, np.float64))  # exact
    even_first = np.argsort(np.arange(256) % 2, kind="stable")
    np.testing.assert_array_equal(qgemm.encode_e4m4(numbers), even_first[distance[:, even_first].argmin(axis=1)])


@given(raw=st.lists(st.floats(0, 31.4375, width=32), min_size=1, max_size=50))
@example(raw=[0.0, -0.0, 1e-45, 2.0**-15, 31.25, 31.4375])
def test_e4m4_against_brute_force(raw):
    codes = qgemm.encode_e4m4(np.array(raw, np.float32))
    for number, code in zip(raw, codes, strict=True):
        distance = [abs(value - Fraction(number)) for value in E4M4_VALUES]
        assert code == min(range(256), key=lambda c: (distance[c], c % 2))
    order = np.argsort(raw)
    assert (np.diff(codes[order].astype(int)) >= 0).all()


def test_e4m4_ends_at_31():
    below = np.nextafter(np.float32(31.5), np.float32(0))
    assert qgemm.encode_e4m4(np.array([below, 31.0], np.float32)).tolist() == [255, 255]
    for beyond in (31.5, 32.0, 1e30, np.inf):
        with pytest.raises(qgemm.QuantizeError, match=re.escape(f"E4M4 ends at 31, got {beyond:g}")):
            qgemm.encode_e4m4(np.array([1.0, beyond]))
        assert qgemm.encode_e4m4(np.array([1.0, beyond]), saturate=True).tolist() == [176, 255]
    for bad in (-1.0, -1e-300, np.nan, -np.inf):
        for saturate in (False, True):
            with pytest.raises(qgemm.QuantizeError, match=f"E4M4 holds numbers from 0 on, got {bad:g}"):
                qgemm.encode_e4m4(np.array([1.0, bad]), saturate)


def test_e4m4_shapes_and_types():

    for dtype in (np.float16, np.float32, np.float64, bfloat16):
        codes = qgemm.encode_e4m4(np.ones((2, 0, 3), dtype))
        assert (codes.shape, codes.dtype) == ((2, 0, 3), np.uint8)
        assert qgemm.encode_e4m4(np.full((2, 3), 1.5, dtype)).tolist() == [[184] * 3] * 2
    assert qgemm.decode_e4m4(np.uint8(184)) == 1.5
    with pytest.raises(TypeError, match="int64"):
        qgemm.encode_e4m4(np.ones(3, np.int64))
    for codes in (np.zeros(3, np.int8), [1, 2], np.zeros(3)):
        with pytest.raises(TypeError, match="codes must be of uint8"):
            qgemm.decode_e4m4(codes)


# ---------------------------------------------------------------- bit planes


@every_bits
@given(rng=seeds(), n=st.integers(0, 40))
def test_planes_hold_the_bits_of_codes(bits, rng, n):
    codes = rng.integers(0, 2**bits, (n, 32)).astype(np.uint8)
    planes = pack_bit_planes(codes, bits)
    assert (planes.shape, planes.dtype) == ((n, bits), np.uint32)
    for row, b in np.ndindex(planes.shape):
        assert int(planes[row, b]) == sum((int(code) >> b & 1) << j for j, code in enumerate(codes[row]))
    np.testing.assert_array_equal(unpack_bit_planes(planes), codes)


@every_bits
@given(rng=seeds())
def test_any_planes_are_codes(bits, rng):
    planes = np.frombuffer(rng.bytes(4 * bits * 9), "<u4").reshape(9, bits)
    np.testing.assert_array_equal(pack_bit_planes(unpack_bit_planes(planes), bits), planes)
