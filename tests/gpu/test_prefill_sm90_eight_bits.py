"""Products of eight bits on int8 tensor cores: codes of W, exact integer sums, every config, NaN, epilogues."""

from __future__ import annotations

import numpy as np
import pytest
from eight_bit_codes import codes_of, of_units
from helpers import cupy, guarded, normal, random_tensor
from measured_errors import of_groups
from strategies import over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.kernels import prefill_sm90_eight_bits as prefill
from qgemm.cuda.kernels import sm90_grid
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, EIGHT_BITS, Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

pytestmark = pytest.mark.skipif("not on_sm_90()", reason="the kernel is for sm_90")

KIND = "a8_g256"
every_kind = pytest.mark.parametrize("kind", INTEGER)
# A code, scale and minimum of each kind, and both kinds of tables; the host harness has the codes of more
# (tests/test_operand_a.py).
SOME = ("q4_0", "q5_1", "q8_0", "q2_k", "q4_k", "q6_k", "mxfp4", "iq4_xs", "iq2_xs")
FORMATS = [qgemm.FORMATS[name] for name in SOME]


def of_kernel(w, on_device):
    """The codes that the kernel multiplies."""
    return codes_of(w, qgemm.matmul(cupy().eye(w.shape[1], dtype=np.float32), on_device, KIND).get())


def launch_within(w, m, dtype, kind):
    """The launch that quantizes m rows of x itself."""
    on, (n, k) = gpu_of(w.device), w.shape
    p = Problem(w.format, kind, m, n, k, on.sm, C_TYPES[dtype], (Output(n),), 0, on.device, on.sms)
    return prefill.EightBitLaunch(p, prefill.ranked(p)[0][0]).enter


@every_kind
@over_formats(FORMATS)
@pytest.mark.parametrize(("n", "k"), [(200, 32), (330, 1120)])
def test_products_are_the_formula_in_exact_integers(fmt, n, k, kind):
    """M on both sides of each token tile; N and K that end inside a tile or a group; nothing beside y is touched."""
    rng = np.random.default_rng(n + k)
    w = random_tensor(fmt, n, k, rng)
    on_device, k = w.to_device(), w.shape[1]
    weights = of_kernel(w, on_device)
    for m in (1, 63, 128, 129, 177, 300):
        x = rng.standard_normal((m, k)).astype(np.float16)
        rows, y = guarded(m, n)
        qgemm.matmul(cupy().asarray(x), on_device, kind, out=y)
        got = rows.get()
        assert np.isnan(got[[0, -1]]).all()
        expected = of_groups(qgemm.quantize_activations(x, kind).blocks, weights)
        expected.check(got[1:-1])


@over_formats([qgemm.FORMATS[name] for name in ("q4_0", "q4_k")])
@pytest.mark.parametrize(
    "row", prefill.measured(), ids=lambda row: f"{row.config}_{row.config.x_scale}".replace(" ", "_")
)
def test_every_config(fmt, row, monkeypatch):
    """Grids of whole tiles, stream-K, both, any split_k; row_blocks missing; always the same bits."""
    config = row.config
    kind = KIND
    if not config.fits(fmt):
        pytest.skip("its tiles do not fit")
    monkeypatch.setattr(sm90_grid, "STREAM_K_UNITS", 2)
    cp, rng = cupy(), np.random.default_rng(sum(config))
    on, sums = gpu_of(cp.cuda.Device().id), sm90_grid.SPLIT_K_COST
    of_halves = 64 * (60 * config.row_blocks - 1) + 24, 1120, config.tokens
    for n, k, m in ((64 * 3 + 24, 2080, config.tokens - 1), (2500, 800, 333), of_halves):
        if config.single_tile and config.tiles(m, -(-n // tiles.ROWS)) > on.sms:
            continue
        w = random_tensor(fmt, n, k, rng)
        on_device, k = w.to_device(), w.shape[1]
        x = rng.standard_normal((m, k)).astype(np.float16)
        prepared, weights = qgemm.quantize_activations(cp.asarray(x), kind), of_kernel(w, on_device)
        expected = of_groups(prepared.blocks(), weights)
        p, grids = Problem(fmt, kind, m, n, k, on.sm, EIGHT_BITS, (Output(n),), 0, on.device, on.sms), set()
        for split_k in sums:
            monkeypatch.setattr(sm90_grid, "SPLIT_K_COST", {**dict.fromkeys(sums, 1 << 30), split_k: 0})
            launch = prefill.EightBitLaunch(p, config)
            if launch.grid in grids:
                continue
            grids.add(launch.grid)
            seen = set()
            for _ in range(3):
                rows, y = guarded(m, n)
                stream = cp.cuda.get_current_stream().ptr
                launch.enter(stream, prepared.pointer, on_device.pointer, y.data.ptr, 0, 0)
                seen.add(rows.get().tobytes())
            assert len(seen) == 1
            expected.check(y.get())


@every_kind
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity(kind):
    w = random_tensor(qgemm.FORMATS["q4_0"], 150, 512, np.random.default_rng(1))
    x = normal(140, 512)
    want = qgemm.matmul(cupy().asarray(x), w.to_device(), kind).get()
    x[1, 7], x[133, 200] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][140, 0] = np.nan, np.inf
    broken = qgemm.Tensor(w.format, w.shape, blocks).to_device()
    y = qgemm.matmul(cupy().asarray(x), broken, kind).get()
    lost = np.zeros(y.shape, bool)
    lost[[1, 133]] = lost[:, [3, 140]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@every_kind
def test_integers_are_exact_to_the_ends_of_int8(kind):
    """Where scales are 1: bit for bit the product on the CPU."""
    x, w = of_units(300, 330, 1120, np.random.default_rng(5))
    want = qgemm.matmul(x, w, kind)
    assert want[0, 0] == -want[1, 0] == -1120 * 127**2
    np.testing.assert_array_equal(qgemm.matmul(cupy().asarray(x), w.to_device(), kind).get(), want)


@every_kind
def test_many_repeats_prepared_and_epilogues_give_the_same_bits(kind):
    rng = np.random.default_rng(5)
    w = random_tensor(qgemm.FORMATS["q4_k"], 1000, 2048, rng).to_device()
    x = cupy().asarray(normal(300, 2048).astype(np.float16))
    first = qgemm.matmul(x, w, kind)
    for _ in range(200):
        assert bool((qgemm.matmul(x, w, kind) == first).all())
    prepared = qgemm.quantize_activations(x, kind)
    bias, residual = cupy().asarray(normal(1000)), cupy().asarray(normal(300, 1000, seed=1))
    for source in (x, prepared, prepared):
        np.testing.assert_array_equal(qgemm.matmul(source, w, kind).get(), first.get())
        added = qgemm.matmul(source, w, kind, bias=bias, residual=residual)
        np.testing.assert_array_equal(added.get(), (first + bias + residual).get())
        half = qgemm.matmul(source, w, kind, dtype="float16")
        np.testing.assert_array_equal(half.get(), first.get().astype(np.float16))
    with pytest.raises(qgemm.UnsupportedError, match=f"for activation '{kind}', got 'a8'"):
        qgemm.matmul(prepared, w, "a8")


@every_kind
@over_formats([fmt for fmt in FORMATS if fmt.name in ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4")])
def test_relative_error_of_products(fmt, kind):
    """Against exact weights and activations: 1.5% on normal activations, 3.5% with outlier channels."""
    rng = np.random.default_rng(2)
    w = qgemm.quantize(rng.standard_normal((256, 2048)).astype(np.float32), fmt.name)
    x = rng.standard_normal((64, 2048)).astype(np.float32)
    outliers = x.copy()
    outliers[:, rng.choice(2048, 20, replace=False)] *= 20
    for values, limit in ((x, 0.015), (outliers, 0.035)):
        want = values.astype(np.float64) @ w.dequantize(np.float64).T
        y = qgemm.matmul(cupy().asarray(values), w.to_device(), kind).get()
        assert np.sqrt(((y - want) ** 2).mean() / (want**2).mean()) < limit


@every_kind
@over_formats([fmt for fmt in FORMATS if fmt.name in ("q4_0", "q4_k", "mxfp4", "iq2_xs")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_x_quantized_within_has_the_bits_of_x_prepared(fmt, dtype, kind):
    """M around token tiles and sixteens, K that ends inside a group, rows of NaN; again and again."""
    cp, rng = cupy(), np.random.default_rng(6)
    w = random_tensor(fmt, 330, 1120, rng).to_device()
    n, k = w.shape
    for m in (1, 16, 100, 128, 129, 256, 300):
        raw_x = rng.standard_normal((m, k)).astype(np.float32)
        raw_x[m // 2, 7], raw_x[m - 1, k - 1] = np.nan, np.inf
        x = cp.asarray(raw_x.astype(float_dtype(dtype)))
        want = qgemm.matmul(qgemm.quantize_activations(x, kind), w, kind, dtype="float32").get()
        launch = launch_within(w, m, dtype, kind)
        for _ in range(3):
            rows, y = guarded(m, n)
            launch(cp.cuda.get_current_stream().ptr, x.data.ptr, w.pointer, y.data.ptr, 0, 0)
            np.testing.assert_array_equal(y.get(), want)
            assert bool(cp.isnan(rows[[0, -1]]).all())


def test_x_quantized_within_on_two_streams_and_in_a_graph():
    """Two streams, neither of which waits for the other; launches in a row, each begins before the last ends."""
    cp, rng = cupy(), np.random.default_rng(7)
    w = random_tensor(qgemm.FORMATS["q4_0"], 4096, 2048, rng).to_device()
    launches, xs, wants, streams, ys = {}, {}, {}, {}, {}
    for m in (128, 256):
        xs[m] = cp.asarray(rng.standard_normal((m, 2048)).astype(np.float16))
        wants[m] = qgemm.matmul(qgemm.quantize_activations(xs[m], "a8_g256"), w, "a8_g256", dtype="float32")
        launches[m], streams[m] = launch_within(w, m, "float16", "a8_g256"), cp.cuda.Stream(non_blocking=True)
        ys[m] = [cp.empty((m, 4096), np.float32) for _ in range(100)]
    cp.cuda.Device().synchronize()
    for repeat in range(100):
        for m, launch in launches.items():
            launch(streams[m].ptr, xs[m].data.ptr, w.pointer, ys[m][repeat].data.ptr, 0, 0)
    cp.cuda.Device().synchronize()
    for m, outputs in ys.items():
        assert all(bool((y == wants[m]).all()) for y in outputs)
    (m, stream), outputs = next(iter(streams.items())), ys[128][:3]
    with stream:
        stream.begin_capture()
        for y in outputs:
            launches[m](stream.ptr, xs[m].data.ptr, w.pointer, y.data.ptr, 0, 0)
        graph = stream.end_capture()
        for y in outputs:
            y.fill(np.nan)
        for _ in range(20):
            graph.launch(stream)
    stream.synchronize()
    assert all(bool((y == wants[m]).all()) for y in outputs)
