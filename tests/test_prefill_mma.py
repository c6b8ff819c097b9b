"""prefill_mma: every cut of y on both sides of its edges, against float64; how a plan is chosen."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from strategies import TILED, each, exact, tame

import qgemm
from qgemm import jit, prefill_mma, routes, tiles
from qgemm.bounds import a16_bound, magnitudes

# What a weight is off by, relative to its magnitude: scale (or minimum) and weight rounded to half; weight to bf16.
LOSS = {"float16": 2 * 2.0**-11, "bfloat16": 2.0**-8}
each_cut = pytest.mark.parametrize("cut", prefill_mma.CUTS, ids=lambda cut: f"{cut.tokens}x{cut.strips}")


def drawn(fmt, n, blocks, seed):
    """Weights [n, blocks * weights] with tame scales."""
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(rng.bytes(n * blocks * fmt.block_bytes), fmt.dtype).reshape(n, blocks)
    return qgemm.Tensor(fmt, (n, blocks * fmt.weights), tame(fmt, raw, rng))


def bound(x, w, dtype, exponent):
    """Sums in float32, weights off by LOSS, or by what half loses where it is subnormal: its least number is 2^-24.

    Levels of a codebook are rounded to half as well.
    """
    sizes = magnitudes(w.format, w.blocks)
    lost = (LOSS[dtype] + (w.format.codebook is not None) * 2.0**-11) * (np.abs(x) @ sizes.T)
    if dtype == "float16":  # half of the least number: of the scale, times a level, of the minimum, and of the weight
        lost += 2.0 ** (exponent - 25) * (tiles.largest_code(w.format) + 2) * np.abs(x).sum(axis=1, keepdims=True)
    return 2 * a16_bound(x, sizes) + lost


def multiply(x, w, dtype="float32", plan=None):
    """x times w by the kernel, into an output full of NaN."""
    import cupy

    y = cupy.full((len(x), w.shape[0]), np.nan, np.float32).astype(dtype)
    names = (routes.c_type(a.dtype) for a in (x, y))
    prefill_mma.multiply(x, w, y, *names, cupy.cuda.get_current_stream().ptr, plan)
    return y


def on_gpu(x, dtype):
    """A CuPy array of float16 or bfloat16."""
    import cupy
    from ml_dtypes import bfloat16

    return cupy.asarray(x.astype(bfloat16 if dtype == "bfloat16" else dtype))


@pytest.mark.gpu
@each(TILED)
@each_cut
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_within_bound(fmt, cut, dtype):
    """Rows of x and W on both sides of a tile's edges; K of fewer spans than stages, of more, and ragged."""
    rows, columns = cut.strips * 64, tiles.columns(fmt) // fmt.weights
    shapes = (rows + 24, 1), (rows - 8, 11 * columns - columns // 2)
    for seed, (n, blocks) in enumerate(shapes):
        w = drawn(fmt, n, blocks, seed)
        on_device = w.to_device()
        for m, slices in itertools.product((1, cut.tokens, cut.tokens + 1), (1, 3)):
            x = on_gpu(np.random.default_rng(m).standard_normal((m, w.shape[1])), dtype)
            wide = x.astype(np.float64).get()
            y = multiply(x, on_device, plan=prefill_mma.Plan(cut, slices)).get()
            assert (np.abs(y - exact(wide, w)) <= bound(wide, w, dtype, on_device.exponent)).all()


@pytest.mark.gpu
@each(TILED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_identity_gives_the_weights(fmt, dtype):
    """Each weight alone: rounded to half or bf16 (twice, with its scale), then to y's type, which may be subnormal."""
    w = drawn(fmt, 200, 3, 7)
    on_device = w.to_device()
    want = w.dequantize(np.float64).T
    for source in ("float16", "bfloat16"):
        x = on_gpu(np.eye(w.shape[1]), source)
        y = multiply(x, on_device, dtype).get().astype(np.float64)
        relative, least = {"float32": (0, 0), "float16": (2**-11, 2**-25), "bfloat16": (2**-8, 0)}[dtype]
        rounding = np.maximum(relative * np.abs(want), least)
        assert (np.abs(y - want) <= bound(np.eye(w.shape[1]), w, source, on_device.exponent) * 1.01 + rounding).all()


@pytest.mark.gpu
@each_cut
@pytest.mark.parametrize("slices", [1, 4])
def test_same_bits_again_and_in_a_graph(cut, slices):
    import cupy as cp

    plan = prefill_mma.Plan(cut, slices)
    w = drawn(qgemm.FORMATS["q5_1"], 320, 20, 3).to_device()
    x = on_gpu(np.random.default_rng(3).standard_normal((77, 640)), "float16")
    first = multiply(x, w, "float16", plan)
    for _ in range(100):
        assert (multiply(x, w, "float16", plan) == first).all()
    y = cp.empty_like(first)
    with cp.cuda.Stream(non_blocking=True) as stream:
        run = partial(prefill_mma.multiply, x, w, y, "half", "half", stream.ptr, plan)
        run()  # takes its memory
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        for _ in range(3):
            y.fill(cp.nan)
            graph.launch(stream)
            assert (y == first).all()
    cp.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64, 130])
def test_nan_stays_in_its_row_and_guards_stay(m):
    import cupy as cp

    blocks = drawn(qgemm.FORMATS["q4_1"], 100, 9, m).blocks.copy()
    x = np.random.default_rng(m).standard_normal((m, 288))
    clean = multiply(on_gpu(x, "float16"), qgemm.Tensor("q4_1", (100, 288), blocks).to_device()).get()
    blocks["d"][17, 2], x[m // 2, 5] = np.nan, np.inf
    guarded = cp.full((m + 2, 100), 7.0, np.float32)
    w = qgemm.Tensor("q4_1", (100, 288), blocks).to_device()
    stream = cp.cuda.get_current_stream().ptr
    prefill_mma.multiply(on_gpu(x, "float16"), w, guarded[1:-1], "half", "float", stream)
    y = guarded.get()
    touched = np.zeros(clean.shape, bool)
    touched[m // 2], touched[:, 17] = True, True
    assert not np.isfinite(y[1:-1][touched]).any()
    np.testing.assert_array_equal(y[1:-1][~touched], clean[~touched])
    assert (y[[0, -1]] == 7).all()


@each(TILED)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_a_plan_for_every_product(fmt, sm):
    """It fits the GPU's shared memory, and does not keep more sums of slices than it may."""
    for n, m in itertools.product((64, 4096, 28672), (1, 17, 33, 128, 4096)):
        cut, slices = prefill_mma.plan_of(fmt, (n, 4096), m, sm, 100)
        depth = prefill_mma.template(fmt, cut, "half", "half", sm)["DEPTH"]
        assert depth >= prefill_mma.SHALLOW
        assert prefill_mma.shared_bytes(fmt, cut, depth) <= prefill_mma.shared_limit(sm)
        assert slices == 1 or prefill_mma.tiles_of(cut, n, m) * slices <= prefill_mma.WAVES * 100


def test_plans_fill_the_gpu():
    """Few tiles are shared, many are not; and a cut is not far larger than M. As measured on an H200."""
    plans = {m: prefill_mma.plan_of(qgemm.FORMATS["q4_0"], (8192, 8192), m, 90, 132) for m in (32, 64, 256, 4096)}
    found = {m: (cut.tokens, cut.strips, slices) for m, (cut, slices) in plans.items()}
    assert found == {32: (32, 1, 1), 64: (64, 4, 4), 256: (128, 4, 2), 4096: (128, 4, 1)}


@each(TILED)
def test_compiles_for_gpus_with_less_shared_memory(fmt):
    for arch, sm in (("sm_80", 80), ("sm_89", 89)):
        cut = prefill_mma.cuts_for(fmt, sm)[0]
        source = jit.compose("prefill_mma", fmt, **prefill_mma.template(fmt, cut, "half", "half", sm))
        cubin, report = jit.compile_cubin(source, arch)
        assert cubin.startswith(b"\x7fELF")
        assert "0 bytes spill stores" in report
