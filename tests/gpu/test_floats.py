"""Weights of F16, BF16 and F32 on a GPU: epilogues, gates, mixed calls, graphs, the mode of other cuBLAS handles."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cupy, random_tensor
from strategies import FORMATS, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.gating import gated_by

FLOATS = [fmt for fmt in FORMATS if fmt.plain]
TYPES = ("float16", "bfloat16", "float32")
LOSS = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def operands(fmt, m, n, k, dtype):
    rng = np.random.default_rng(m)
    w = qgemm.quantize(rng.standard_normal((n, k)).astype(np.float32), fmt.name)
    return cupy().asarray(rng.standard_normal((m, k)).astype(np.float32)).astype(float_dtype(dtype)), w


def exact(x, w):
    return x.get().astype(np.float64) @ w.dequantize(np.float64).T


@over_formats(FLOATS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m", [1, 8, 9, 300])
def test_bias_residual_and_types_of_y(fmt, dtype, m):
    """The second and third calls are replays, one of them with an output that is its own residual."""
    cp, rng = cupy(), np.random.default_rng(0)
    x, w = operands(fmt, m, 150, 96, dtype)
    bias = cp.asarray(rng.standard_normal(150).astype(np.float32))
    residual = cp.asarray(rng.standard_normal((m, 150)).astype(np.float16))
    want, on_device = exact(x, w), w.to_device()
    for y_type in TYPES:
        for _ in range(3):
            y = qgemm.matmul(x, on_device, bias=bias, residual=residual, dtype=y_type)
            total = want + bias.get() + residual.get()
            np.testing.assert_allclose(y.get().astype(np.float64), total, rtol=LOSS[y_type] + 1e-5, atol=1e-4)
    y = residual.copy()
    assert qgemm.matmul(x, on_device, residual=y, out=y) is y
    np.testing.assert_allclose(y.get(), want + residual.get(), rtol=1e-3, atol=1e-4)


@over_formats(FLOATS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m", [1, 40])
def test_a_call_of_packed_and_float_weights(fmt, dtype, m):
    cp = cupy()
    x, w = operands(fmt, m, 128, 96, dtype)
    packed = random_tensor(qgemm.FORMATS["q8_0"], 64, 96, np.random.default_rng(2))
    first, second = w.to_device(), packed.to_device()
    for _ in range(2):
        ys = qgemm.matmul_many(x, [first, second, first])
        for y, weights in zip(ys, (first, second, first), strict=True):
            assert (y == qgemm.matmul(x, weights)).all()
        up = operands(fmt, m + 1, 128, 96, dtype)[1]
        y = qgemm.gated(x, first, up.to_device(), activation="a16")
        want = gated_by("silu", exact(x, w), exact(x, up))
        np.testing.assert_allclose(y.get(), want, rtol=1e-4, atol=1e-3)
    assert cp.isfinite(y).all()


@over_formats(FLOATS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m", [1, 40])
def test_in_a_graph(fmt, dtype, m):
    """Scratch memory of a captured product is nobody else's between replays."""
    cp = cupy()
    x, w = operands(fmt, m, 150, 96, dtype)
    on_device, bias, y = w.to_device(), cp.ones(150, np.float32), cp.empty((m, 150), np.float16)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        qgemm.matmul(x, on_device, bias=bias, out=y)
        stream.begin_capture()
        for _ in range(3):
            qgemm.matmul(x, on_device, bias=bias, out=y)
        graph = stream.end_capture()
    for seed in range(3):
        x[...] = cp.asarray(np.random.default_rng(seed).standard_normal(x.shape)).astype(x.dtype)
        junk = [cp.full(1 << 20, np.nan, np.float32) for _ in range(8)]
        y.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_allclose(y.get(), exact(x, w) + 1, rtol=1e-3, atol=1e-3)
        del junk


def test_panels_of_packed_weights_in_a_graph():
    """float32 x of many rows decodes panels for cuBLAS."""
    cp, rng = cupy(), np.random.default_rng(3)
    w = random_tensor(qgemm.FORMATS["q4_0"], 128, 256, rng)
    x, on_device = cp.asarray(rng.standard_normal((40, 256)).astype(np.float32)), w.to_device()
    stream, y = cp.cuda.Stream(non_blocking=True), cp.empty((40, 128), np.float32)
    cp.cuda.Device().synchronize()
    with stream:
        qgemm.matmul(x, on_device, out=y)
        want = y.get()
        stream.begin_capture()
        qgemm.matmul(x, on_device, out=y)
        graph = stream.end_capture()
        y.fill(np.nan)
        graph.launch(stream)
    stream.synchronize()
    assert (y.get() == want).all()


@pytest.mark.parametrize("m", [1, 64])
def test_no_tf32(m, monkeypatch):
    """Where CuPy's own products may use TF32, those of float32 weights keep float32: its error is 2^-11 for each."""
    monkeypatch.setenv("CUPY_TF32", "1")
    rng = np.random.default_rng(4)
    w = rng.standard_normal((64, 4096)).astype(np.float32)
    x = cupy().asarray(rng.standard_normal((m, 4096)).astype(np.float32))
    y = qgemm.matmul(x, qgemm.quantize(w, "f32").to_device()).get()
    want = x.get().astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(y - want).max() < 1e-6 * np.sqrt(4096) * 8
