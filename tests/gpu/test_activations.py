"""Activations quantized on the GPU, and products that share them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cupy
from hypothesis import given
from hypothesis import strategies as st
from strategies import gpu_settings, weights

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.layout import activations
from qgemm.cuda.layout import tile as tiles


@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_activations_equal_the_cpu_bit_for_bit(x_dtype, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = (data.draw(st.integers(1, 40)), 32 * data.draw(st.integers(1, 9)))
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 12, (shape[0], 1))
    if data.draw(st.booleans()):
        x[rng.random(shape) < 0.01] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(float_dtype(x_dtype))
    want = qgemm.quantize_activations(x).blocks
    on_gpu = cupy().asarray(x)
    size = -(-shape[1] // tiles.K_BLOCK) * shape[0] * activations.DTYPE.itemsize
    cupy().full(size, 255, np.uint8)  # freed at once: the memory that the blocks will get
    made = qgemm.quantize_activations(on_gpu)
    got = made.blocks()
    assert not made.data.get().reshape(-1).view(activations.DTYPE)["padding"].any()
    np.testing.assert_array_equal(got["qs"], want["qs"])
    for name in ("d", "s"):
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("m", "k"), [(17, 32), (40, 4096), (300, 96)])
def test_a8_of_x_equals_a8_of_its_blocks(x_dtype, m, k):
    """Bit for bit: rounding x in one pass is quantizing and decoding it; half's largest number is no infinity."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)) * 2.0 ** rng.integers(-30, 14, (m, 1))
    x[0, 0], x[1, 1], x[2, 2] = 65504, np.nan, -np.inf
    x = cupy().asarray(x.astype(np.float32)).astype(float_dtype(x_dtype))
    w = qgemm.quantize(rng.standard_normal((72, k)), "q4_0").to_device()
    for some in (x, x[3:]):
        y = qgemm.matmul(some, w, "a8").get()
        np.testing.assert_array_equal(y, qgemm.matmul(qgemm.quantize_activations(some), w, "a8").get())
    assert np.isfinite(y).any()


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
