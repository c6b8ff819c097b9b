"""The GPU road, against NumPy: decode with ==, products with bounds derived from K and the types involved."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import EXCERPT, assert_a8, cupy, exact, expected_product, poisoned, tame
from hypothesis import given
from hypothesis import strategies as st
from strategies import FORMATS, INTEGER, TILED, each_product, gpu_settings, over_formats, problems

import qgemm
from qgemm.codec.format import float_dtype

M_EDGES = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 16, 33))  # both sides of every route boundary and token tile


@over_formats([fmt for fmt in FORMATS if fmt.plain or fmt.tiled])
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_a16_within_bound(fmt, x_dtype, data):
    x, w = data.draw(problems(fmt, M_EDGES, finite=False))
    x = x.astype(float_dtype(x_dtype))
    on_device = w.to_device()
    y = poisoned((len(x), w.shape[0]), np.float32)
    assert qgemm.matmul(cupy().asarray(x), on_device, out=y) is y
    expected_product(x, w, x_dtype).check(y.get())


@over_formats(INTEGER)
@gpu_settings
@given(data=st.data())
def test_a8_against_its_formula(fmt, data):
    x, w = data.draw(problems(fmt, M_EDGES, finite=False))
    assert_a8(qgemm.matmul(cupy().asarray(x), w.to_device(), "a8").get(), x, w)


@pytest.mark.parametrize("m", [64, 512])
def test_every_tensor_of_a_real_model(m):
    """With float16 x, a16 and a8, against float64: every type that a file may have."""
    rng, multiplied = np.random.default_rng(m), set()
    with qgemm.open(EXCERPT) as file:
        for w in file.values():
            on_device, x = w.to_device(), rng.standard_normal((m, w.shape[1])).astype(np.float16)
            y = poisoned((m, w.shape[0]), np.float32)
            qgemm.matmul(cupy().asarray(x), on_device, out=y)
            expected_product(x, w, x.dtype).check(y.get())
            if w.format.tiled:
                assert_a8(qgemm.matmul(cupy().asarray(x), on_device, "a8").get(), x.astype(np.float32), w)
            multiplied.add(w.format.name)
        assert multiplied == {w.format.name for w in file.values()}


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bias_and_residual(activation, m, dtype):
    """Added in float32 before y is rounded; the residual may be y itself; the second call is the fast path."""
    cp, rng = cupy(), np.random.default_rng(25)
    w = qgemm.quantize(rng.standard_normal((200, 96)).astype(np.float32), "q4_1").to_device()
    x = cp.asarray(rng.standard_normal((m, 96)).astype(np.float16))
    bias = cp.asarray(rng.standard_normal(200).astype(np.float16))
    residual = cp.asarray(rng.standard_normal((m, 200)).astype(np.float32)).astype(float_dtype("bfloat16"))
    sums = qgemm.matmul(x, w, activation)
    want = (sums + bias + residual.astype(np.float32)).astype(float_dtype(dtype))
    for _ in range(2):
        y = poisoned((m, 200), want.dtype)
        qgemm.matmul(x, w, activation, bias=bias, residual=residual, out=y)
        assert (y == want).all()
        y[...] = residual.astype(y.dtype)
        before = y.astype(np.float32)
        qgemm.matmul(x, w, activation, residual=y, out=y)
        assert (y == (sums + before).astype(y.dtype)).all()
    assert (qgemm.matmul(x, w, activation, bias=bias.astype(np.float64)) == sums + bias).all()
    with pytest.raises(qgemm.ShapeError, match="bias has shape"):
        qgemm.matmul(x, w, bias=bias[1:])


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_products_of_all_sizes_in_turn(activation):
    """The launch attributes of a small product do not harm a large product that was launched before."""
    cp, rng = cupy(), np.random.default_rng(27)
    sizes = ((2, 8192), (1, 32), (1, 16384), (2, 64), (8, 2048), (40, 512))
    xs = [cp.asarray(rng.standard_normal(size).astype(np.float16)) for size in sizes]
    ws = [qgemm.quantize(rng.standard_normal((64, k)).astype(np.float32), "q4_0").to_device() for _, k in sizes]
    wants = [qgemm.matmul(x, w, activation).get() for x, w in zip(xs, ws, strict=True)]
    for x, w, want in zip(xs, ws, wants, strict=True):
        assert (qgemm.matmul(x, w, activation).get() == want).all()


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 2, 5, 16, 40])
def test_many_weights_of_one_x(activation, m):
    """Several to a launch, of two formats, one with a bias: the same bits as one by one."""
    cp, rng = cupy(), np.random.default_rng(26)
    sizes = ((130, "q4_0"), (64, "q4_0"), (72, "q8_0"), (8, "q4_0"), (300, "q4_0"), (65, "q4_0"))
    ws = [qgemm.quantize(rng.standard_normal((n, 96)).astype(np.float32), name).to_device() for n, name in sizes]
    x = cp.asarray(rng.standard_normal((m, 96)).astype(np.float16))
    biases = [None, cp.ones(64, np.float32), None, None, None, None]
    wants = [qgemm.matmul(x, w, activation, bias=b) for w, b in zip(ws, biases, strict=True)]
    for _ in range(2):
        outs = [poisoned((m, n), np.float32) for n, _ in sizes]
        assert qgemm.matmul_many(x, ws, activation, biases=biases, outs=outs) == outs
        for y, want in zip(outs, wants, strict=True):
            np.testing.assert_allclose(y.get(), want.get(), rtol=1e-5, atol=1e-4)
    same_format = [w for w in ws if w.format.name == "q4_0"][:3]
    first = [y.get() for y in qgemm.matmul_many(x, same_format, activation)]
    for _ in range(20):
        for y, want in zip(qgemm.matmul_many(x, same_format, activation), first, strict=True):
            assert (y.get() == want).all()


@each_product
@pytest.mark.parametrize("m", [1, 8, 9])
def test_nan_stays_in_its_row(fmt, activation, m):
    """A NaN in one row of x or W reaches no other output."""
    rng = np.random.default_rng(m)
    raw = np.frombuffer(rng.bytes(100 * 4 * fmt.block_bytes), fmt.dtype).reshape(100, 4)
    blocks = tame(fmt, raw, rng)
    shape = 100, 4 * fmt.weights
    x = rng.standard_normal((m, shape[1])).astype(np.float32)
    clean = qgemm.matmul(cupy().asarray(x), qgemm.Tensor(fmt, shape, blocks).to_device(), activation).get()
    if "d" in fmt.scale_fields:  # mxfp4 has no NaN
        blocks["d"][17, 2] = np.nan
    x[m // 2, 5] = np.nan
    y = qgemm.matmul(cupy().asarray(x), qgemm.Tensor(fmt, shape, blocks).to_device(), activation).get()
    touched = np.zeros(y.shape, bool)
    touched[m // 2] = True
    touched[:, 17] |= "d" in fmt.scale_fields
    assert np.isnan(y[touched]).all()
    np.testing.assert_array_equal(y[~touched], clean[~touched])


@over_formats([fmt for fmt in TILED if "d" in fmt.scale_fields and fmt.tile.slots])
def test_large_scales_do_not_overflow_half(fmt):
    """65504 * 127 is finite in float32, not in float16: the panel is scaled by a power of two."""
    k = 2 * fmt.weights
    blocks = np.zeros((64, 2), fmt.dtype)
    blocks["d"] = 65504
    blocks[next(iter(fmt.tile.slots))] = 0x77
    if "scales" in blocks.dtype.names:
        blocks["scales"] = 0x7F
    w = qgemm.Tensor(fmt, (64, k), blocks)
    x = np.full((16, k), 2.0**-10, np.float16)
    y = qgemm.matmul(cupy().asarray(x), w.to_device()).get()
    want = exact(x, w)
    np.testing.assert_allclose(y, want, rtol=2.0**-10)


def test_scales_beyond_half_of_mxfp4():
    """2^(e - 128) k_blocks all of float32: panels in float16 are scaled, products of few tokens need no scaling."""
    fmt = qgemm.FORMATS["mxfp4"]
    for e in (60, 127, 180):
        blocks = np.zeros((64, 2), fmt.dtype)
        blocks["e"], blocks["qs"] = e, 0x27
        w = qgemm.Tensor(fmt, (64, 64), blocks)
        x = np.ones((32, 64), np.float16)
        for m in (1, 16, 32):
            y = qgemm.matmul(cupy().asarray(x[:m]), w.to_device()).get()
            np.testing.assert_allclose(y, exact(x[:m], w), rtol=2.0**-10)
