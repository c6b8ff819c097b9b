"""The prefill kernel of sm_90 against float64: every config by every format, types, rows, NaN, graphs, views."""

from __future__ import annotations

import fit_sm90
import numpy as np
import pytest
import tune_sm90
from helpers import (
    assert_a8,
    assert_same_bits,
    cupy,
    exact,
    guarded,
    level_magnitudes,
    random_tensor,
    subnormal_loss,
)
from measured_errors import Expected, noise_of, weight_loss
from references import reference
from strategies import CODEBOOKS as CODEBOOK_FORMATS
from strategies import EDGES, INTEGER, TILED, every_config, over_formats

import qgemm
from benchmarks import operands
from qgemm.codec.error_bound import a16_bound, magnitudes
from qgemm.codec.format import float_dtype
from qgemm.cuda.kernels import prefill_sm90, routes, sm90_config, sm90_grid
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

pytestmark = pytest.mark.skipif("not on_sm_90()", reason="the prefill kernel is for sm_90")


def launched(fmt, shape, m, config):
    """The launch of a config for M rows of x of float16, y of float32."""
    (n, k), on = shape, gpu_of(cupy().cuda.Device().id)
    return prefill_sm90.PrefillLaunch(
        Problem(fmt, "a16", m, n, k, on.sm, "half", (Output(n),), 0, on.device, on.sms), config
    )


LOSS = 2.0**-11  # relative error of one rounding to half


def expected_product(x, w):
    """The product of float sums of weights that are rounded to half.

    A weight is rounded three times: the scale, the minimum or a level of a codebook, and the weight itself.
    """
    fmt, dtype = w.format, x.dtype.name
    x, sizes = x.astype(np.float64), magnitudes(w.format, w.blocks)
    size = np.abs(x) @ (level_magnitudes(w) if fmt.needs_table else sizes).T
    bound = a16_bound(x, sizes) + 3 * LOSS * size + subnormal_loss(w) * np.abs(x).sum(axis=1, keepdims=True)
    return Expected(exact(x, w), bound, noise_of(x, sizes, weight_loss(fmt, w.blocks, dtype)))


def expected_on_gpu(x, w):
    """The expected product, its bound and noise, of a Reference and x of the GPU."""
    wide, dtype = abs(x.astype(np.float64)), x.dtype.name
    sizes = w.level_magnitudes if w.w.format.needs_table else w.magnitudes
    bound = a16_bound(wide, w.magnitudes) + 3 * LOSS * (wide @ sizes.T)
    return w.expected(x, bound + w.subnormal_loss * wide.sum(axis=1)[:, None], dtype)


@over_formats(TILED)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 32), (72, 96), (1100, 1120)])
def test_products_at_every_edge(fmt, n, k):
    """M on both sides of each token tile and route; N and K that end inside a tile; nothing beside y is touched."""
    cp, rng, w = cupy(), np.random.default_rng(n + k), reference(fmt, n, k)
    max_m = 2 * max(EDGES) + 7
    every = cp.asarray(rng.standard_normal((max_m, w.w.shape[1])).astype(np.float16))
    expected = expected_on_gpu(every, w)
    for m in sorted({9, *EDGES, *(m + 1 for m in EDGES), max_m}):
        rows, y = guarded(m, n)
        qgemm.matmul(every[:m], w.on_device, out=y)
        assert cp.isnan(rows[[0, -1]]).all()
        expected.only(slice(m)).check(y)


@every_config()
def test_every_config_by_every_format(fmt, config, monkeypatch):
    """Grids of whole tiles, stream-K, both, any split_k; row_blocks missing; always the same bits."""
    monkeypatch.setattr(sm90_grid, "STREAM_K_UNITS", 2)
    cp, rng = cupy(), np.random.default_rng(sum(config))
    sms, sums = gpu_of(cp.cuda.Device().id).sms, sm90_grid.SPLIT_K_COST
    of_halves = 64 * (60 * config.row_blocks - 1) + 24, 288, config.tokens
    of_few = 64 * (72 * config.row_blocks - 1) + 24, 544, config.tokens
    for n, k, m in (
        (64 * 3 + 24, 2080, config.tokens - 1),
        (64 * 4 + 24, 544, config.tokens),
        (64 * 150, 288, config.tokens),
        (2500, 800, 333),
        of_halves,
        of_few,
    ):
        if config.single_tile and config.tiles(m, -(-n // tiles.ROWS)) > sms:
            continue
        w = reference(fmt, n, k)
        x, grids = cp.asarray(rng.standard_normal((m, w.w.shape[1])).astype(np.float16)), set()
        expected = expected_on_gpu(x, w)
        for split_k in sums:
            monkeypatch.setattr(sm90_grid, "SPLIT_K_COST", {**dict.fromkeys(sums, 1 << 30), split_k: 0})
            launch = launched(fmt, w.w.shape, m, config)
            if launch.grid in grids:
                continue
            grids.add(launch.grid)
            repeats = [guarded(m, n) for _ in range(3)]
            for _, y in repeats:
                launch(cp.cuda.get_current_stream().ptr, x.data.ptr, w.on_device.pointer, y.data.ptr)
            (first, y), *others = repeats
            for rows, _ in others:
                assert (rows.view(np.uint32) == first.view(np.uint32)).all()
            assert cp.isnan(first[[0, -1]]).all()
            expected.check(y)


@over_formats([fmt for fmt in TILED if fmt.name in ("q4_0", "q4_k")])
@pytest.mark.parametrize(("wg_split_k", "stages"), [(2, 5), (3, 4), (4, 6), (4, 7)])
@pytest.mark.parametrize("single_tile", [False, True])
def test_number_of_stages_changes_no_bit(fmt, wg_split_k, stages, single_tile):
    """Pipelines whose stages wg_split_k does not divide, over many rounds, against one whose stages it does."""
    cp, rng = cupy(), np.random.default_rng(25)
    m, n = 24, 200
    w = random_tensor(fmt, n, 25760, rng)
    x, on_device, ys = rng.standard_normal((m, w.shape[1])).astype(np.float16), w.to_device(), []
    on_gpu = cp.asarray(x)
    for max_stages in (2 * wg_split_k, stages):
        config = sm90_config.Sm90Config(32, 1, wg_split_k, 2, single_tile, max_stages=max_stages)
        launch = launched(fmt, w.shape, m, config)
        assert launch.template["STAGES"] == max_stages
        for _ in range(5):
            ys.append(guarded(m, n)[1])
            launch(cp.cuda.get_current_stream().ptr, on_gpu.data.ptr, on_device.pointer, ys[-1].data.ptr)
    expected_product(x, w).check(ys[0].get())
    for y in ys[1:]:
        np.testing.assert_array_equal(y.get(), ys[0].get())


@over_formats(TILED)
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16", "float32"])
def test_types_bias_and_residual(fmt, x_dtype, y_dtype):
    """y = x @ W.T + bias + residual, rounded once to y's type; rows of y of any size, and multiples of 16 bytes."""
    cp, rng = cupy(), np.random.default_rng(3)
    for n, m in ((130, 20), (192, 70)):
        w = random_tensor(fmt, n, 512, rng)
        x = rng.standard_normal((m, 512)).astype(float_dtype(x_dtype))
        bias = rng.standard_normal(n).astype(np.float32)
        residual = rng.standard_normal((m, n)).astype(np.float16)
        y = guarded(m, n, float_dtype(y_dtype))[1]
        qgemm.matmul(cp.asarray(x), w.to_device(), bias=cp.asarray(bias), residual=cp.asarray(residual), out=y)
        expected_product(x, w).plus(bias, residual).rounded(y_dtype).check(y.get())


@over_formats([fmt for fmt in TILED if "d" in fmt.scale_fields])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_small_rows_beside_large_ones_keep_their_bits(fmt, x_dtype):
    """Each row has a unit of its own: scales of some are 2^29 times those of others."""
    rng = np.random.default_rng(9)
    w = random_tensor(fmt, 130, 512, rng)
    rows = np.ldexp(1.0, rng.integers(-10, 20, (130, 1)) - 10)
    for name in fmt.scale_fields:
        w.blocks[name] = (w.blocks[name] * rows).astype(np.float16)
    x = rng.standard_normal((70, w.shape[1])).astype(float_dtype(x_dtype))
    y = qgemm.matmul(cupy().asarray(x), w.to_device(), dtype="float32")
    expected_product(x, w).check(y.get())


@over_formats(TILED)
def test_identity_gives_weights_rounded_to_half(fmt):
    """A product with one weight is that weight but for its rounding."""
    rng = np.random.default_rng(7)
    w = random_tensor(fmt, 200, 300, rng)
    k = w.shape[1]
    y = qgemm.matmul(cupy().eye(k, dtype="float16"), w.to_device()).get()
    expected_product(np.eye(k, dtype=np.float16), w).check_worst_case(y)


@over_formats(TILED)
def test_nan_stays_in_its_row(fmt):
    """A NaN in one row of x or W reaches no other output."""
    rng = np.random.default_rng(5)
    w = random_tensor(fmt, 200, 544, rng)
    for m in (20, 300):
        x = rng.standard_normal((m, w.shape[1])).astype(np.float16)
        clean = qgemm.matmul(cupy().asarray(x), w.to_device()).get()
        blocks = w.blocks.copy()
        for name in fmt.scale_fields[:1]:  # E4M4 and the exponents of mxfp4 have no NaN
            blocks[name][17, -1] = np.nan
        x[m // 2, 5] = np.nan
        y = qgemm.matmul(cupy().asarray(x), qgemm.Tensor(fmt, w.shape, blocks).to_device()).get()
        touched = np.zeros(y.shape, bool)
        touched[m // 2] = True
        touched[:, 17] |= len(fmt.scale_fields) > 0
        assert np.isnan(y[touched]).all()
        np.testing.assert_array_equal(y[~touched], clean[~touched])


CODEBOOKS = {
    "asymmetric": lambda rng, count: rng.uniform(-0.3, 1, count),
    "wide": lambda rng, count: rng.integers(-3, 4, count) * 2.0 ** rng.integers(-30, 2, count),
    "huge": lambda rng, count: rng.uniform(-1, 3, count) * 1e30,
    "tiny": lambda rng, count: rng.uniform(-1, 3, count) * 1e-30,
    "subnormal": lambda rng, count: rng.uniform(-1, 1, count) * 1e-39,
}


@over_formats(INTEGER)
def test_a8_multiplies_what_activations_decode_to(fmt):
    """a8 has the bits of a16 of x rounded to its blocks, where both take prefill_sm90; and is close to the formula."""
    cp, rng = cupy(), np.random.default_rng(31)
    w = random_tensor(fmt, 200, 544, rng)
    on_device, k = w.to_device(), w.shape[1]
    by_prefill = []
    for m in (9, 16, 17, 33, 64, 65, 300):
        if routes.route(Problem(fmt, "a8", m, 200, k, 90, "half")).kernel.name == "prefill_sm90":
            x = rng.standard_normal((m, k)).astype(np.float16)
            decoded = qgemm.quantize_activations(x).dequantize(np.float16)
            y = qgemm.matmul(cp.asarray(x), on_device, "a8", dtype="float32")
            assert (y == qgemm.matmul(cp.asarray(decoded), on_device, dtype="float32")).all()
            assert_a8(y.get(), x.astype(np.float32), w)
            by_prefill.append(m)
    assert by_prefill[-5:] == [17, 33, 64, 65, 300]


def test_configs_are_timed(monkeypatch):
    """tools/tune_sm90.py: every config that can serve, the choice among them."""
    monkeypatch.setattr("qgemm.cuda.timing.REST", 0)
    monkeypatch.setattr(operands, "ROTATE", 1 << 20)
    fmt = qgemm.FORMATS["q5_k"]
    sms = gpu_of(cupy().cuda.Device().id).sms
    tried = [c for c in tune_sm90.candidates(fmt, 20) if c.wg_split_k == 1 and c.serves(20, 8, sms)]
    stream = cupy().cuda.Stream(non_blocking=True)
    w = operands.matrix(stream, fmt, (512, 512), np.random.default_rng(0), operands.ROTATE)
    row = tune_sm90.measure(stream, w, fmt, (512, 512), 20, tried, 1)
    assert row["before"] in row["us"]
    assert {fit_sm90.key(config) for config in tried} <= set(row["us"])
    assert min(row["us"].values()) > 0


@over_formats(CODEBOOK_FORMATS)
@pytest.mark.parametrize("levels", CODEBOOKS.values(), ids=CODEBOOKS)
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_any_codebook(fmt, levels, x_dtype):
    """Levels of any size and sign, in tiles of few and of many tokens."""
    rng = np.random.default_rng(13)
    own = fmt.variant(levels(rng, len(fmt.codebook)), None)
    w = random_tensor(own, 200, 544, rng)
    for m in (20, 300):
        x = rng.standard_normal((m, 544)).astype(float_dtype(x_dtype))
        y = qgemm.matmul(cupy().asarray(x), w.to_device(), dtype="float32").get()
        expected_product(x, w).check(y)


@pytest.mark.parametrize(
    ("row_blocks", "m"), [(40, 9), (40, 64), (40, 200), (40, 600), (128, 100), (128, 128), (99, 128), (128, 256)]
)
@pytest.mark.parametrize("name", ["q4_0", "kbit3"])
def test_two_hundred_times_the_same_bits(row_blocks, m, name):
    cp, rng = cupy(), np.random.default_rng(m)
    w = random_tensor(qgemm.FORMATS[name], 64 * row_blocks, 2048, rng).to_device()
    x = cp.asarray(rng.standard_normal((m, 2048)).astype(np.float16))
    want = qgemm.matmul(x, w)
    y = cp.empty_like(want)

    def repeat():
        y.fill(np.nan)
        return qgemm.matmul(x, w, out=y)

    assert_same_bits(want, repeat)


@pytest.mark.parametrize("m", [16, 100, 1000])
def test_a_product_can_be_captured_in_a_graph(m):
    """Also on a stream that has never multiplied before, with workspace to be had."""
    cp, rng = cupy(), np.random.default_rng(22)
    w = random_tensor(qgemm.FORMATS["q4_1"], 320, 2048, rng).to_device()
    x, y = cp.zeros((m, 2048), np.float16), cp.empty((m, 320), np.float32)
    qgemm.matmul(x, w, out=y)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        qgemm.matmul(x, w, out=y)
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = cp.asarray(rng.standard_normal((m, 2048)).astype(np.float16))
            y.fill(np.nan)
            graph.launch(stream)
            assert (y == qgemm.matmul(x, w)).all()


def test_views_and_leading_dimensions():
    """x that starts beside a multiple of 16 bytes, strided rows, leading dimensions, y that is strided."""
    cp, rng = cupy(), np.random.default_rng(8)
    w = random_tensor(qgemm.FORMATS["q5_0"], 100, 96, rng)
    on_device = w.to_device()
    x = cp.asarray(rng.standard_normal((3, 8, 97)).astype(np.float16))
    for view in (x[..., 1:], x[:, ::-1, :96], x[:, 2:5, 1:]):
        many = cp.full((*view.shape[:2], 200), np.nan, np.float32)
        qgemm.matmul(view, on_device, out=many[..., ::2])
        expected_product(view.get().reshape(-1, 96), w).check(many[..., ::2].get().reshape(-1, 100))
        assert cp.isnan(many[..., 1::2]).all()
        for activation in ("a16", "a8"):
            assert qgemm.matmul(view[:0], on_device, activation).shape == (0, view.shape[1], 100)
