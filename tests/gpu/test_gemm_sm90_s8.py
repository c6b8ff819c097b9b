"""gemm_sm90_s8 on sm_90: exact integers, slices of W, tiles that end inside a matrix, NaN, epilogues, requantizers."""

from __future__ import annotations

import numpy as np
import pytest
from eight_bit_codes import codes_of, of_units
from helpers import cupy, float_dtype, guarded, normal, random_tensor
from measured_errors import of_groups
from strategies import over_formats

import qgemm
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.kernels import gemm_sm90_s8 as gemm
from qgemm.cuda.kernels.prefill_sm90_eight_bits import PREFILL_SM90_EIGHT_BITS
from qgemm.cuda.kernels.routes import gemm_pays
from qgemm.cuda.problem import C_TYPES, EIGHT_BITS, Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

pytestmark = pytest.mark.skipif("not on_sm_90()", reason="the kernel is for sm_90")

every_kind = pytest.mark.parametrize("kind", INTEGER)
KIND = "a8_g256"
SOME = ("q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "mxfp4", "iq4_xs", "iq2_xs")
FORMATS = [qgemm.FORMATS[name] for name in SOME]


def problem(w, m, kind, **output):
    on, (n, k) = gpu_of(cupy().cuda.Device().id), w.shape
    return Problem(w.format, kind, m, n, k, on.sm, EIGHT_BITS, (Output(n, **output),), 0, on.device, on.sms)


def product(w, prepared, kind, kernel=gemm.GEMM_SM90_S8, requantizers=None):
    """y [m, n] of prepared activations by a kernel; requantizers: None: its own choice. Rows beside y stay NaN."""
    m, n = prepared.shape[0], w.shape[0]
    rows, y = guarded(m, n)
    launch(w, m, kind, kernel, requantizers)(
        cupy().cuda.get_current_stream().ptr, prepared.pointer, w.pointer, y.data.ptr, 0, 0
    )
    got = rows.get()
    assert np.isnan(got[[0, -1]]).all()
    return got[1:-1]


def launch(w, m, kind, kernel=gemm.GEMM_SM90_S8, requantizers=None, x=EIGHT_BITS):
    p = problem(w, m, kind)._replace(x=x)
    config = kernel.choose(p) if requantizers is None else by(p, requantizers)
    return kernel.launch(p, config)


def by(p, requantizers):
    """The config with requantizers, or without."""
    (config,) = (config for config in gemm.configs(p) if bool(config.requantizers) == requantizers)
    return config


@every_kind
@over_formats(FORMATS)
def test_products_are_the_formula_in_exact_integers(fmt, kind, monkeypatch):
    """M, N and K that end inside a tile; W whole and in slices of a cluster's rows, with the same bits."""
    rng, cp = np.random.default_rng(3), cupy()
    w = random_tensor(fmt, 600, 800, rng)
    on_device, k = w.to_device(), w.shape[1]
    weights = codes_of(w, qgemm.matmul(cp.eye(k, dtype=np.float32), on_device, kind).get())
    for m in (241, 256, 257, 300, 777):
        prepared = qgemm.quantize_activations(cp.asarray(rng.standard_normal((m, k)).astype(np.float16)), kind)
        expected = of_groups(prepared.blocks(), weights)
        y = product(on_device, prepared, kind, requantizers=False)
        expected.check(y)
        kinds = [config.requantizers > 0 for config in gemm.configs(problem(on_device, m, kind))]
        for requantizers in kinds:
            np.testing.assert_array_equal(product(on_device, prepared, kind, requantizers=requantizers), y)
        monkeypatch.setattr(gemm, "WORKSPACE", 1)
        assert len(gemm.slices(*w.shape)) == 3
        for requantizers in kinds:
            np.testing.assert_array_equal(product(on_device, prepared, kind, requantizers=requantizers), y)
        monkeypatch.undo()


@every_kind
def test_several_tiles_of_y_for_each_cluster(kind):
    """More tiles than the GPU has clusters, some cut in two, against the other kernel, whose tiles are whole."""
    rng, cp = np.random.default_rng(4), cupy()
    w = random_tensor(qgemm.FORMATS["q4_k"], 9000, 512, rng).to_device()
    prepared = qgemm.quantize_activations(cp.asarray(normal(2100, 512).astype(np.float16)), kind)
    y = product(w, prepared, kind)
    other = product(w, prepared, kind, PREFILL_SM90_EIGHT_BITS)
    np.testing.assert_allclose(y, other, rtol=0, atol=2e-6 * np.abs(other).max())


@every_kind
def test_integers_are_exact_to_the_ends_of_int8(kind):
    """Where scales are 1: bit for bit the product on the CPU."""
    x, w = of_units(300, 330, 1120, np.random.default_rng(5))
    want = qgemm.matmul(x, w, kind)
    assert want[0, 0] == -want[1, 0] == -1120 * 127**2
    got = product(w.to_device(), qgemm.quantize_activations(cupy().asarray(x), kind), kind)
    np.testing.assert_array_equal(got, want)


@every_kind
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity(kind):
    cp, w = cupy(), random_tensor(qgemm.FORMATS["q4_0"], 150, 512, np.random.default_rng(1))
    x = normal(280, 512)
    want = product(w.to_device(), qgemm.quantize_activations(cp.asarray(x), kind), kind)
    x[1, 7], x[277, 200] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][140, 0] = np.nan, np.inf
    broken = qgemm.Tensor(w.format, w.shape, blocks).to_device()
    y = product(broken, qgemm.quantize_activations(cp.asarray(x), kind), kind)
    lost = np.zeros(y.shape, bool)
    lost[[1, 277]] = lost[:, [3, 140]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@every_kind
def test_many_repeats_prepared_and_epilogues_give_the_same_bits(kind):
    """By `matmul`, which takes this kernel; other weights in between, whose bytes take the same workspace."""
    rng, cp = np.random.default_rng(5), cupy()
    w, other = (random_tensor(qgemm.FORMATS["q4_k"], 4000, 1024, rng).to_device() for _ in range(2))
    x = cp.asarray(normal(2048, 1024).astype(np.float16))
    assert gemm_pays(problem(w, 2048, kind)._replace(x="half"))
    first = qgemm.matmul(x, w, kind)
    between = qgemm.matmul(x, other, kind)
    prepared = qgemm.quantize_activations(x, kind)
    for repeat in range(200):
        assert bool((qgemm.matmul(x if repeat % 2 else prepared, w, kind) == first).all())
        assert bool((qgemm.matmul(prepared, other, kind) == between).all())
    bias, residual = cp.asarray(normal(4000)), cp.asarray(normal(2048, 4000, seed=1))
    added = qgemm.matmul(prepared, w, kind, bias=bias, residual=residual)
    np.testing.assert_array_equal(added.get(), (first + bias + residual).get())
    half = qgemm.matmul(x, w, kind, dtype="float16")
    np.testing.assert_array_equal(half.get(), first.get().astype(np.float16))


@over_formats([qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4")])
@pytest.mark.parametrize(("n", "k", "m"), [(4000, 1024, 256), (14336, 512, 1024), (9000, 768, 2100), (300, 4096, 512)])
def test_requantizers_write_the_bytes_of_requantize(fmt, n, k, m):
    """Whole tiles, halves and last waves of halves, ragged rows of W and of x: the same bits."""
    w = random_tensor(fmt, n, k, np.random.default_rng(7)).to_device()
    prepared = qgemm.quantize_activations(cupy().asarray(normal(m, k).astype(np.float16)), KIND)
    np.testing.assert_array_equal(
        product(w, prepared, KIND, requantizers=True), product(w, prepared, KIND, requantizers=False)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k", "m"), [(4000, 1056, 241), (300, 4096, 777), (9000, 256, 2100)])
def test_x_quantized_within_is_that_of_the_kernel_before(n, k, m, dtype):
    """Rows and columns beyond x are zeros, NaN and infinity stay in their row; the workspace is ready for the next."""
    cp, w = cupy(), random_tensor(qgemm.FORMATS["q4_0"], n, k, np.random.default_rng(9)).to_device()
    for seed in range(3):
        x = normal(m, k, seed=seed)
        x[3, 7], x[m - 1, k - 1] = np.nan, -np.inf
        raw_x = cp.asarray(x.astype(float_dtype(dtype)))
        prepared = qgemm.quantize_activations(raw_x, KIND)
        rows, y = guarded(m, n)
        enter = launch(w, m, KIND, requantizers=True, x=C_TYPES[dtype])
        enter(cp.cuda.get_current_stream().ptr, raw_x.data.ptr, w.pointer, y.data.ptr, 0, 0)
        got = rows.get()
        assert np.isnan(got[[0, -1]]).all()
        np.testing.assert_array_equal(got[1:-1], product(w, prepared, KIND, requantizers=True))


def test_one_product_of_a_call_quantizes_x_within_and_several_share_what_a_launch_before_makes():
    cp, rng = cupy(), np.random.default_rng(10)
    w, other = (random_tensor(qgemm.FORMATS["q4_0"], 14336, 4096, rng).to_device() for _ in range(2))
    x = cp.asarray(normal(1024, 4096).astype(np.float16))
    assert gemm.quantizes(problem(w, 1024, KIND)._replace(x="half"))
    alone = qgemm.matmul(x, w, KIND)
    both = qgemm.matmul_many(x, [w, other], KIND)
    prepared = qgemm.quantize_activations(x, KIND)
    for y in (both[0], qgemm.matmul(prepared, w, KIND)):
        assert bool((y == alone).all())
    assert bool((both[1] == qgemm.matmul(x, other, KIND)).all())


def test_flags_of_requantizers_serve_every_launch_of_a_workspace():
    """Shapes and formats that share one take turns, on two streams at once, and in graphs that are replayed."""
    cp, rng = cupy(), np.random.default_rng(8)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    cases = []
    for name, n, k, m in (("q4_0", 4096, 2048, 512), ("q4_k", 4000, 2048, 300), ("q8_0", 2048, 4096, 1024)):
        w = random_tensor(qgemm.FORMATS[name], n, k, rng).to_device()
        x = cp.asarray(normal(m, k).astype(np.float16))
        prepared = qgemm.quantize_activations(x, KIND)
        want = cp.asarray(product(w, prepared, KIND, requantizers=False))
        for kind, pointer in ((EIGHT_BITS, prepared.pointer), ("half", x.data.ptr)):
            enter = launch(w, m, KIND, requantizers=True, x=kind)
            ys = [cp.empty((m, n), np.float32) for _ in streams]
            cases.append((enter, pointer, w, want, ys, (x, prepared)))

    def run(turn):
        for number, stream in enumerate(streams):
            for enter, pointer, w, _, ys, _ in cases[turn:] + cases[:turn]:
                enter(stream.ptr, pointer, w.pointer, ys[number].data.ptr, 0, 0)

    def check():
        for *_, want, ys, _ in cases:
            assert all(bool((y == want).all()) for y in ys)
            for y in ys:
                y.fill(np.nan)
        cp.cuda.Device().synchronize()

    cp.cuda.Device().synchronize()
    for turn in range(60):
        run(turn % 3)
        cp.cuda.Device().synchronize()
        check()
    graphs = []
    for number, stream in enumerate(streams):
        with stream:
            stream.begin_capture()
            for _ in range(3):
                for enter, pointer, w, _, ys, _ in cases:
                    enter(stream.ptr, pointer, w.pointer, ys[number].data.ptr, 0, 0)
            graphs.append(stream.end_capture())
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        cp.cuda.Device().synchronize()
        check()
