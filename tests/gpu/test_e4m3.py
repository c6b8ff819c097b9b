"""Products of e4m3 numbers on a GPU: exact sums bit for bit, bounds, every tile, NaN, repeats; both kernels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from e4m3_operands import exact_in_any_order
from helpers import assert_same_bits, cupy, guarded, normal, random_tensor
from measured_errors import of_e4m3

import qgemm
from qgemm.codec.eight_bits import e4m3_weights
from qgemm.codec.group_activations import E4M3
from qgemm.cuda.kernels import gemm_sm90_s8 as gemm
from qgemm.cuda.kernels import prefill_sm80_eight_bits as prefill
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels.prefill_sm80 import Plan
from qgemm.cuda.layout import group_activations
from qgemm.cuda.problem import EIGHT_BITS, Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

pytestmark = pytest.mark.skipif("not on_sm_89()", reason="e4m3 takes sm_89")
MXFP4 = qgemm.FORMATS["mxfp4"]


def on_sm_89() -> bool:
    cuda = qgemm.backends()["cuda"]
    return bool(cuda.available) and int(cupy().cuda.Device().compute_capability) >= 89


def problem(w, m, **output_fields):
    on, (n, k) = gpu_of(cupy().cuda.Device().id), w.shape
    return Problem(w.format, E4M3, m, n, k, on.sm, EIGHT_BITS, (Output(n, **output_fields),), 0, on.device, on.sms)


def ways(w, m):
    """Every way to multiply by w: a kernel and its config."""
    p = problem(w, m)
    plans = itertools.product(prefill.fitting(p), (1, 3))
    candidates = [(prefill.PREFILL_SM80_EIGHT_BITS, Plan(config, split_k)) for config, split_k in plans]
    if routes.can_serve(gemm.GEMM_SM90_S8, p) and group_activations.rows_of(m) >= gemm.BLOCK_TOKENS:
        candidates += [(gemm.GEMM_SM90_S8, config) for config in gemm.configs(p)]
    return candidates


def product(w, prepared, way):
    """y [m, n] of prepared activations by a kernel; rows beside y stay NaN."""
    (kernel, config), m = way, prepared.shape[0]
    rows, y = guarded(m, w.shape[0])
    run = kernel.launch(problem(w, m), config)
    run(cupy().cuda.get_current_stream().ptr, prepared.pointer, w.pointer, y.data.ptr, 0, 0)
    got = rows.get()
    assert np.isnan(got[[0, -1]]).all()
    return got[1:-1]


def prepared_of(x):
    return qgemm.quantize_activations(cupy().asarray(x), E4M3)


@pytest.mark.parametrize("m", [1, 16, 17, 64, 130, 241, 256, 300, 777])
def test_sums_that_lose_nothing_are_those_of_numpy(m, monkeypatch):
    """Bit for bit; M, N and K end inside a tile; W whole and in slices."""
    x, w = exact_in_any_order(m, 600, 1120, np.random.default_rng(m))
    want, on_device, prepared = qgemm.matmul(x, w, E4M3), w.to_device(), prepared_of(x)
    for way in ways(on_device, m):
        np.testing.assert_array_equal(product(on_device, prepared, way), want)
    monkeypatch.setattr(gemm, "WORKSPACE", 1)
    np.testing.assert_array_equal(product(on_device, prepared, ways(on_device, m)[-1]), want)


@pytest.mark.parametrize("m", [5, 77, 300])
def test_products_are_within_the_bound(m):
    """Exponents of a row up to 16 apart among them, and rows of x of NaN and infinity."""
    rng = np.random.default_rng(m)
    w, x = random_tensor(MXFP4, 150, 800, rng), normal(m, 800)
    blocks = w.blocks.copy()
    blocks["e"][::5] -= rng.integers(0, 17, blocks["e"][::5].shape).astype(np.uint8)
    w = qgemm.Tensor(MXFP4, w.shape, blocks)
    x[1, 7], x[m - 1, 300] = np.nan, -np.inf
    on_device, prepared = w.to_device(), prepared_of(x)
    expected = of_e4m3(prepared.blocks(), e4m3_weights(MXFP4, w.blocks, 800))
    rows = [row for row in range(m) if row not in (1, m - 1)]
    for way in ways(on_device, m):
        y = product(on_device, prepared, way)
        assert np.isnan(y[[1, m - 1]]).all()
        expected.only(rows).check(y[rows])


def test_identity_gives_back_the_weights():
    """448 of x times a weight, whose product has seven bits: exact but for the scale 1 / 448 of x."""
    w = random_tensor(MXFP4, 300, 512, np.random.default_rng(0))
    prepared, on_device = prepared_of(np.eye(512, dtype=np.float32)), w.to_device()
    for way in ways(on_device, 512):
        np.testing.assert_allclose(product(on_device, prepared, way).T, w.dequantize(), rtol=2.0**-22)


def test_several_tiles_of_y_for_each_cluster():
    """More tiles than the GPU has clusters, bit for bit what NumPy makes."""
    x, w = exact_in_any_order(2100, 9000, 512, np.random.default_rng(4))
    y = qgemm.matmul(cupy().asarray(x), w.to_device(), E4M3).get()
    columns = np.random.default_rng(5).integers(0, 9000, 300)
    np.testing.assert_array_equal(y[:, columns], qgemm.matmul(x, w[columns], E4M3))


@pytest.mark.parametrize(("m", "repeats"), [(30, 30), (2048, 200)])
def test_many_repeats_prepared_and_epilogues_give_the_same_bits(m, repeats):
    """By `matmul`; other weights in between, whose bytes take the same workspace."""
    rng, cp = np.random.default_rng(5), cupy()
    w, other = (random_tensor(MXFP4, 4000, 1024, rng).to_device() for _ in range(2))
    x = cp.asarray(normal(m, 1024).astype(np.float16))
    first, between = (qgemm.matmul(x, weights, E4M3) for weights in (w, other))
    prepared = qgemm.quantize_activations(x, E4M3)
    for repeat in range(repeats):
        assert bool((qgemm.matmul(x if repeat % 2 else prepared, w, E4M3) == first).all())
        assert bool((qgemm.matmul(prepared, other) == between).all())
    bias, residual = cp.asarray(normal(4000)), cp.asarray(normal(m, 4000, seed=1))
    added = qgemm.matmul(prepared, w, bias=bias, residual=residual)
    np.testing.assert_array_equal(added.get(), (first + bias + residual).get())
    half = qgemm.matmul(x, w, E4M3, dtype="float16")
    np.testing.assert_array_equal(half.get(), first.get().astype(np.float16))


def test_same_bits_by_split_k():
    w = random_tensor(MXFP4, 320, 2048, np.random.default_rng(3)).to_device()
    prepared, way = prepared_of(normal(77, 2048)), ways(w, 77)[1]
    assert_same_bits(cupy().asarray(product(w, prepared, way)), lambda: cupy().asarray(product(w, prepared, way)))


def test_gated_and_many():
    rng, cp = np.random.default_rng(7), cupy()
    ws = [random_tensor(MXFP4, 512, 512, rng) for _ in range(2)]
    x, on_device = cp.asarray(normal(260, 512).astype(np.float16)), [w.to_device() for w in ws]
    ys = qgemm.matmul_many(x, on_device, E4M3)
    for y, w in zip(ys, on_device, strict=True):
        np.testing.assert_array_equal(y.get(), qgemm.matmul(x, w, E4M3).get())
    gated = qgemm.gated(x, *on_device, activation=E4M3).get()
    np.testing.assert_allclose(gated, (ys[0] / (1 + cp.exp(-ys[0])) * ys[1]).get(), rtol=1e-5, atol=1e-5)
    other = qgemm.quantize(normal(64, 512), "q4_0").to_device()
    with pytest.raises(qgemm.UnsupportedError, match="is for MXFP4"):
        qgemm.matmul(qgemm.quantize_activations(x, E4M3), other)
