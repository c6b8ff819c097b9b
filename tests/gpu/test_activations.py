"""Activations quantized on the GPU, and products that share them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_a8, cupy, extreme, random_tensor
from hypothesis import given
from hypothesis import strategies as st
from measured_errors import of_integer_dots
from strategies import INTEGER, gpu_settings, over_formats, weights

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.layout import group_activations, q8_1_k_blocks
from qgemm.cuda.layout import tile as tiles


@st.composite
def activations_of(draw, dtype, most_rows, most_blocks):
    """x [M, K] whose rows have magnitudes of every size, in some draws with NaN and infinity."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (draw(st.integers(1, most_rows)), 32 * draw(st.integers(1, most_blocks)))
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 127, (shape[0], 1))
    if draw(st.booleans()):
        x[rng.random(shape) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(float_dtype(dtype))


@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_activations_equal_the_cpu_bit_for_bit(x_dtype, data):
    x = data.draw(activations_of(x_dtype, 40, 9))
    want = qgemm.quantize_activations(x).blocks
    on_gpu = cupy().asarray(x)
    size = -(-x.shape[1] // tiles.K_BLOCK) * len(x) * q8_1_k_blocks.DTYPE.itemsize
    cupy().full(size, 255, np.uint8)  # freed at once: the memory that the blocks will get
    prepared = qgemm.quantize_activations(on_gpu)
    got = prepared.blocks()
    np.testing.assert_array_equal(got["qs"], want["qs"])
    for name in ("d", "s"):
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("activation", GROUP_COLUMNS)
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_activations_of_eight_bits_equal_the_cpu_bit_for_bit(x_dtype, activation, data):
    x = data.draw(activations_of(x_dtype, 140, 19))
    want = qgemm.quantize_activations(x, activation).blocks
    nbytes = group_activations.nbytes(*x.shape, GROUP_COLUMNS[activation])
    cupy().full(nbytes, 255, np.uint8)  # freed at once: the memory that the codes will get
    got = qgemm.quantize_activations(cupy().asarray(x), activation).blocks()
    np.testing.assert_array_equal(got["qs"], want["qs"])
    np.testing.assert_array_equal(got["d"], want["d"])


@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("m", "k"), [(17, 32), (40, 4096), (300, 96)])
def test_a8_of_x_equals_a8_of_its_blocks(x_dtype, m, k):
    """Bit for bit: rounding x in one pass is quantizing and decoding it; half's largest number is no infinity."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)) * 2.0 ** rng.integers(-30, 14, (m, 1))
    x[0, 0], x[1, 1], x[2, 2] = 65504, np.nan, -np.inf
    x = cupy().asarray(x.astype(np.float32)).astype(float_dtype(x_dtype))
    w = qgemm.quantize(rng.standard_normal((72, k)), "q4_0").to_device()
    for rows in (x, x[3:]):
        y = qgemm.matmul(rows, w, "a8").get()
        np.testing.assert_array_equal(y, qgemm.matmul(qgemm.quantize_activations(rows), w, "a8").get())
    assert np.isfinite(y).any()


@over_formats(INTEGER)
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [1, 7, 16, 40, 130])
def test_extreme_activations(fmt, x_dtype, m):
    """x from 1e-30 to 1e30, and spikes, by every kernel of integer dots that these rows reach: their formula.

    A few values are the whole of each product, so that the worst case bounds its error, not the prediction.
    """
    w = random_tensor(fmt, 200, 768, np.random.default_rng(m))
    x = np.resize(np.roll(extreme(768), m, axis=0), (m, 768)).astype(float_dtype(x_dtype))
    on_device, on_gpu = w.to_device(), cupy().asarray(x)
    for activations in (on_gpu, qgemm.quantize_activations(on_gpu)):
        y = qgemm.matmul(activations, on_device, "a8").get()
        expected = of_integer_dots(qgemm.quantize_activations(x).blocks, w)
        assert np.isfinite(y[np.isfinite(expected.y)]).all()
        expected.check_worst_case(y)


@over_formats(INTEGER)
@pytest.mark.parametrize("m", [3, 40])
def test_spikes_of_half(fmt, m):
    """The largest half in one block of a row, whose sum half cannot hold; all over another row."""
    w = random_tensor(fmt, 200, 768, np.random.default_rng(m))
    x = np.random.default_rng(5).standard_normal((m, 768)).astype(np.float16)
    x[0, 32:64], x[1] = 65504, -65504
    y = qgemm.matmul(cupy().asarray(x), w.to_device(), "a8").get()
    assert np.isfinite(y).all()
    assert_a8(y, x.astype(np.float32), w)


@gpu_settings
@given(data=st.data())
def test_prepared_activations_serve_several_weights(data):
    w1, w2 = (data.draw(weights(qgemm.FORMATS[name], most_blocks=4)) for name in ("q4_0", "q8_0"))
    k = min(w1.shape[1], w2.shape[1])
    x = cupy().ones((3, k), np.float16)
    prepared = qgemm.quantize_activations(x)
    for w in (w1, w2):
        if w.shape[1] == k:
            on_device = w.to_device()
            assert (qgemm.matmul(prepared, on_device) == qgemm.matmul(x, on_device, "a8")).all()
