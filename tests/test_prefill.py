"""The prefill kernel: its tables and its host code anywhere, its products on a GPU against float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import re

import numpy as np
import pytest
import race_tilings
from hypothesis import given
from hypothesis import strategies as st
from strategies import CODEBOOKS as CODEBOOK_FORMATS
from strategies import INTEGER, TILED, each, exact, seeds, subnormal_loss, tame
from test_cuda import assert_a8

import qgemm
from qgemm.bench import gpu as gpu_bench
from qgemm.bench import timing
from qgemm.codec.error_bound import a16_bound, magnitudes
from qgemm.cuda.jit import codegen, nvrtc
from qgemm.cuda.kernels import prefill_sm90 as prefill
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels import sm90_config as tilings
from qgemm.cuda.layout import row_scale as units
from qgemm.cuda.layout import tile as tiles

EDGES = sorted({m for tiling in tilings.TILINGS for m in (tiling.tokens, tiling.m)})
SMS = (78, 114, 132, 144)  # multiprocessors of an H100 PCIe, an H100 SXM, an H200, a GH100


def every_tiling(formats=TILED):
    """A parameter (format, tiling) for each of the two that meet."""
    return pytest.mark.parametrize(
        ("fmt", "tiling"),
        [
            pytest.param(fmt, tiling, id="-".join((fmt.name, "x".join(map(str, tiling[3:8])), "lone" * tiling.lone)))
            for fmt in formats
            for tiling in tilings.compiled(fmt)
        ],
    )


def cupy():
    import cupy

    return cupy


# ---------------------------------------------------------------------------------------------------- without a GPU


def test_sm_90_goes_to_prefill_above_decode():
    """From 9 rows on, of codebooks and a8 from 17 on; of a8 with two scales a group of x from 9 on."""
    q4_0, q4_k, q6_k, kbit4 = (qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "kbit4"))
    for fmt, m, sm, x, kernel in (
        (q4_0, 8, 90, "half", "decode"),
        (q4_0, 9, 90, "half", "prefill"),
        (q4_k, 8, 90, "half", "decode"),
        (q4_k, 9, 90, "half", "prefill"),
        (q4_0, 1 << 20, 90, "bf16", "prefill"),
        (q4_0, 9, 90, "float", "decode"),
        (q4_0, 17, 90, "float", "unpack"),
        (q4_0, 16, 100, "half", "decode"),
        (q4_0, 17, 100, "half", "prefill_mma"),
        (q4_0, 17, 80, "half", "prefill_mma"),
        (kbit4, 16, 90, "bf16", "decode"),
        (kbit4, 17, 90, "bf16", "prefill"),
        (kbit4, 17, 90, "float", "unpack"),
    ):
        assert routes.route(routes.Problem(fmt, "a16", m, 64, 64, sm, x)).kernel == kernel
    for fmt, m, x, kernel in (
        (q4_0, 16, "half", "decode_a8"),
        (q4_0, 17, "half", "prefill"),
        (q4_0, 1 << 20, "bf16", "prefill_a8"),
        (q6_k, 8, "half", "decode_a8"),
        (q6_k, 9, "half", "prefill"),
        (q6_k, 9, "bf16", "decode_a8"),
    ):
        assert routes.route(routes.Problem(fmt, "a8", m, 64, 64, 90, x)).kernel == kernel


@each(TILED)
def test_every_matrix_has_a_tiling(fmt):
    for m in (1, *EDGES, *(m + 1 for m in EDGES), 1 << 20):
        for strips, k, sms in itertools.product((1, 33, 64, 65, 100, 128, 200, 448, 1 << 20), (32, 8192), SMS):
            tiling = tilings.tiling_of(fmt, m, strips, k, sms)
            assert tiling.plain in tilings.compiled(fmt)
            assert strips >= tiling.least
            assert strips * k // sms >= tiling.share
            assert tiles.spans(fmt) >= tiling.spans
            assert fmt.codebook is not None or not tiling.codebook
            part = -(-m // -(-m // max(tilings.TOKENS)))  # of several tiles
            assert part <= tiling.m
            assert m <= tiling.m or part <= tiling.tokens
            wasted = -(-m // tiling.tokens) * tiling.tokens - m
            if strips > 64 and m > 64:  # few tokens are computed in vain
                assert wasted <= m / 2
            assert tiling.tokens % 16 == 0
            assert tiling.tokens <= 256  # of one instruction, and of a tensor map's box
            assert tiling.threads <= 1024
            if tiling.lone:
                assert tiling.idle(m, strips, k, sms) <= tilings.MOST_IDLE
                of_y, along = tiling.tiles(m, strips), -(-k // tiling.unit(fmt))
                ctas, whole, _ = prefill.grid_of(of_y, along, sms, tiling.lone)
                assert whole in (0, ctas)
                assert ctas % tiling.tiles(m, strips) == 0


@every_tiling()
def test_tilings_fit_every_format(fmt, tiling):
    """The conditions of kernels/prefill.cu, which compiling checks for some, and two stages at least for each split."""
    template = tilings.prefill_template(fmt, tiling, "half")
    assert template["SHARED"] <= tilings.SHARED
    assert template["DEPTH"] >= 2 * tiling.splits or template["DEPTH"] * tiling.stage >= 4
    assert template["DEPTH"] > tiling.splits  # each may keep one and wait for another
    along = tiles.spans(fmt)
    assert tiling.stage % along == 0 or along % tiling.stage == 0
    assert tiling.tokens % tiling.chunk == 0
    assert tiling.tokens // tiling.chunk * tiling.strips * max(SMS) <= tilings.MOST_PARTS


@each(TILED)
def test_what_is_picked_is_among_what_is_raced(fmt):
    """tools/race_tilings.py."""
    for m in (1, *EDGES, *(m + 1 for m in EDGES), 1000):
        raced = set(race_tilings.candidates(fmt, m))
        for strips, k in itertools.product((33, 64, 80, 128, 150, 448), (4096, 8192, 16384)):
            assert tilings.tiling_of(fmt, m, strips, k, 132).plain in raced


def test_lone_segments_leave_little_idle():
    """80 tiles of 5280 columns take 132 multiprocessors as long as 80 do; 64 tiles are cut in two, 44 in three."""
    lone = tilings.Tiling(0, 0, 0, tokens=16, strips=1, splits=3, stage=4, lone=True)
    idle = {strips: lone.idle(16, strips, 5280, 132) for strips in (44, 64, 66, 80, 132, 133)}
    assert idle == {44: 0, 64: 2640 - 2560, 66: 0, 80: 5280 - 3200, 132: 0, 133: math.inf}
    q4_0 = qgemm.FORMATS["q4_0"]
    assert tilings.tiling_of(q4_0, 16, 80, 5120, 132).lone
    assert not tilings.tiling_of(q4_0, 16, 80, 13824, 132).lone


def test_rows_of_the_table_are_for_someone():
    """No row is hidden by those before it; a row that needs stages has what it takes of them; a row with a lone segment
    or needs has one after it that has neither."""
    for index, row in enumerate(tilings.TILINGS):
        served = [fmt for fmt in TILED if row.serves(fmt)]
        hiding = [before for before in tilings.TILINGS[:index] if before.hides(row)]
        assert any(not any(before.serves(fmt) for before in hiding) for fmt in served)
        if row.needs > 1:
            depths = {tilings.prefill_template(fmt, row, "half")["DEPTH"] for fmt in served}
            assert min(depths) >= min(row.needs, row.deep)
        if row.needs > 1 or row.lone:
            later = (other for other in tilings.TILINGS[index + 1 :] if other.m >= row.m and other.least <= row.least)
            assert any(not other.lone and other.needs == 1 for other in later)


@every_tiling([qgemm.FORMATS[name] for name in ("q4_0", "q4_k")])
def test_tuned_kernels_keep_their_registers(fmt, tiling):
    """Neither spills nor wgmma that wait for each other: ptxas says so as C75xx."""
    source = codegen.compose("prefill", fmt, **tilings.prefill_template(fmt, tiling, "half"))
    _, report = nvrtc.compile_cubin(source, "sm_90a")
    assert re.search(r"\b0 bytes spill stores", report)
    assert "C75" not in report


def quotient(number: int, divisor: prefill.Divisor) -> int:
    """Divisor::divide in kernels/streamk.cuh, whose words have 32 bits."""
    assert max(2 * number, divisor.factor) < 1 << 32
    return int((2 * number * divisor.factor >> 32) >> divisor.shift)


@given(number=st.integers(0, 2**31 - 1), by=st.one_of(st.integers(1, 5000), st.integers(1, 2**31)))
def test_divisors_divide(number, by):
    """Also the numbers beside a multiple, where a quotient would first be wrong."""
    divisor = prefill.Divisor.of(by)
    for some in {number, number // by * by, max(0, number // by * by - 1), 2**31 - 1}:
        assert quotient(some, divisor) == some // by


def begin_of(cut: prefill.Cut, cta: int) -> int:
    """Segments::begin_of in kernels/streamk.cuh."""
    return int(cut.piece * cta + quotient(cut.rest * cta, cut.ctas))


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("units", [1, 3, 16, 128, 448])
def test_grids_share_all_work(sms, units):
    for count in (*range(1, 3 * sms), 1000, 4096 * 224, (1 << 20) // 256 + 1):
        grid = prefill.grid_of(count, units, sms)
        ctas, whole, paired = grid
        assert 1 <= ctas <= sms
        assert 0 <= whole <= count
        cut = (count - whole) * units
        assert cut < 1 << 31
        if cut:  # every CTA has a piece, and hands over at most one part of a tile
            pieces = [begin_of(prefill.cut_of(grid, count, units, count), cta) for cta in range(ctas + 1)]
            assert pieces[0] == 0
            assert pieces[-1] == cut
            assert min(b - a for a, b in itertools.pairwise(pieces)) >= 1
        if paired:  # neighbours share each tile
            assert paired % prefill.PAIR == 0
            assert pieces[::paired] == [tile * units for tile in range(count + 1)]
        busiest = -(-whole // ctas) * units + -(-cut // ctas)
        ideal = -(-count * units // sms)
        assert busiest <= (ideal * (1 + prefill.WASTE) + 1 if count > sms else units)


def test_few_tiles_are_cut_where_that_is_worth_adding_up():
    """In pairs where it can be; in more pieces where K is long or a tile has several strips."""
    assert prefill.grid_of(64, 128, 132) == (128, 0, 2)
    assert prefill.grid_of(64, 1, 132) == (64, 64, 0)
    assert prefill.grid_of(64, 8, 132) == (64, 64, 0)
    assert prefill.grid_of(32, 32, 132) == (64, 0, 2)
    assert prefill.grid_of(32, 80, 132) == (128, 0, 4)
    assert prefill.grid_of(32, 32, 132, spans=2) == (128, 0, 4)
    assert prefill.grid_of(16, 128, 132) == (128, 0, 8)
    assert prefill.grid_of(40, 40, 132) == (80, 0, 2)
    assert prefill.grid_of(40, 80, 132, spans=2) == (120, 0, 0)
    assert prefill.grid_of(1, 16, 132) == (2, 0, 2)


@pytest.mark.parametrize("sms", SMS)
def test_longer_sums_are_cut_into_more_pieces(sms):
    """Of the same tiles never fewer, and a product never takes longer for the cut than in whole tiles."""
    for count, spans in itertools.product(range(1, sms // 2 + 1), (1, 4, 12)):
        before = 1
        for along in range(24, 1000, 24):  # which all numbers of pieces divide
            ctas, whole, paired = prefill.grid_of(count, along, sms, lone=True, spans=spans)
            pieces = ctas // count
            assert ctas == count * pieces <= sms
            assert (whole, paired) == (count if pieces == 1 else 0, 0 if pieces % prefill.PAIR else pieces)
            assert before <= pieces
            assert along // pieces * spans + prefill.SUMS[pieces] <= along * spans
            before = pieces


def test_few_tiles_are_cut_anywhere_where_whole_ones_leave_much_idle():
    assert prefill.grid_of(112, 16, 132) == (112, 112, 0)
    assert prefill.grid_of(80, 16, 132) == (132, 0, 0)
    assert prefill.grid_of(80, 16, 132, lone=True) == (80, 80, 0)
    assert prefill.grid_of(80, 15, 132) == (80, 80, 0)


BOUNDS = [0, 1e-45, 2.0**-100, 2.0**-17, 1e-3, 0.24, 1, 1e4, 128.5 * 65504, 2.0**27, 1e30, 3e38]


@each(TILED)
@pytest.mark.parametrize("source", ["half", "bf16"])
def test_no_scale_or_weight_overflows_half_in_its_unit(fmt, source):
    unit = units.range_of(fmt, source)
    assert unit.level + 24 <= 15 or tiles.raw_exponent(fmt) is not None
    for bound in BOUNDS:
        weight = unit.weight(bound)
        assert unit.least <= weight <= unit.most
        assert all(-126 <= x <= 127 for x in (weight, -weight, -weight - unit.level))  # powers of two in float32
        if weight < unit.most:
            assert bound * 2.0**-weight < 2.0**15
            assert bound / float(tiles.largest_code(fmt)) * 2.0 ** (-weight - unit.level) <= 2.0**15


def power(x):
    """Power of kernels/prefill.cu: 2^x as three halves."""
    parts = min(max(x, 0), 15) + min(x + 14, 0), max(x - 15, 0), max(min(x, 0), -14)
    assert sum(parts) == x
    assert all(-24 <= part <= 15 for part in parts)
    return np.float16(2.0) ** np.array(parts, np.float16)


def folded(fmt, blocks):
    """Weights of one row of blocks as the prefill kernel makes them of codes, what it rounds to them, their unit."""
    unit, factors = units.range_of(fmt, "half"), tiles.half_factors(fmt)
    weight = unit.weight(tiles.bounds(fmt, blocks[None])[0])
    codes, scale, minimum, zero = fmt.decode_levels(blocks)
    levels = codes.astype(np.float64) - zero
    zero = {"q6_k": 32, "q8_0": 128, "q8_1": 128}.get(fmt.name, zero)  # of codes in a tile
    raw = (levels + zero) * 2.0**unit.level
    assert (raw.astype(np.float16) == raw).all()

    def made(products, name, x):
        """Products that are to be rounded once."""
        first, second, last = power(x)
        half = blocks[name].reshape(-1, 1)
        if factors == 1:
            return half * first * (second * last)
        integers = np.divide(products, half, out=np.zeros_like(products), where=half != 0).astype(np.float16)
        assert (integers * last / last == integers).all()
        return half * first * second * (integers * last)

    d = made(scale, "d", -weight - unit.level)
    np.testing.assert_array_equal(d, (scale * np.float32(2.0 ** (-weight - unit.level))).astype(np.float16))
    if minimum is None:
        m, want = d * np.float16(-zero * 2.0**unit.level), 0
    else:
        m = made(minimum, "m" if factors == 1 else "dmin", -weight)
        want = m[..., None]
    want = levels * 2.0**unit.level * d[..., None] + want
    return (raw * d[..., None] + m[..., None]).astype(np.float16), want, weight


@each([fmt for fmt in TILED if tiles.half_factors(fmt)])
@given(seeds(), st.integers(-24, 15), st.integers(-24, 15))
def test_one_multiply_add_makes_a_weight_of_a_code(fmt, rng, of_scales, of_minimums):
    """It is rounded once; of a row whose unit is 1 or less nothing is lost of subnormal weights."""
    blocks = np.frombuffer(rng.bytes(16 * fmt.block_bytes), fmt.dtype).copy()
    if "scales" in blocks.dtype.names:
        blocks["scales"][rng.integers(16) :] = 0  # integers
    for name, exponent in (("d", of_scales), ("m", of_minimums), ("dmin", of_minimums)):
        if name in (fmt.dtype.names or ()):
            blocks[name] = np.ldexp(rng.uniform(1, 2, 16), exponent - rng.integers(0, 12, 16)) * rng.choice([-1, 1], 16)
    found, want, weight = folded(fmt, blocks)
    assert np.isfinite(found).all()
    lost = 0 if weight <= 0 else 2.0**-25 * 3
    assert (np.abs(found - want) <= np.maximum(np.abs(want) * 2.0**-11, lost)).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-30, 0.1, 1, 7e4, 1e37])
def test_levels_of_any_size_come_into_the_range_of_half(largest):
    """Levels, scales and weights of a codebook in their units are halves."""
    fmt = qgemm.FORMATS["kbit2"].variant([-largest, 0, largest / 9, largest / 2], None)
    level = np.abs(fmt.codebook).max() * 2.0 ** -tiles.level_exponent(fmt)
    unit = units.range_of(fmt, "half")
    assert level <= 2.0**15
    for absmax in (0, 2.0**-14, 1, 31):
        exponent = -unit.weight(float(np.float32(largest * absmax))) - unit.level
        assert -126 <= exponent <= 127
        scale = absmax * 2.0**exponent
        assert scale <= 2.0**15
        assert level * scale <= 2.0**15


def test_structures_are_laid_out_as_in_the_kernel():
    assert [getattr(prefill.Pointers, name).offset for name, _ in prefill.Pointers._fields_] == [0, 8, 16, 40]
    assert ctypes.sizeof(prefill.TensorMap) == 128
    assert ctypes.addressof(prefill.TensorMap.aligned()) % 64 == 0


# --------------------------------------------------------------------------------------------------------- on a GPU


def on_sm_90() -> bool:
    cuda = qgemm.backends()["cuda"]
    return bool(cuda.available) and cupy().cuda.Device().compute_capability == "90"


gpu = [pytest.mark.gpu, pytest.mark.skipif("not on_sm_90()", reason="the prefill kernel is for sm_90")]


def with_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def random_tensor(fmt, n, k, rng):
    """[N, K'] of random bytes with tame scales; K' is K rounded up to whole blocks."""
    blocks = -(-k // fmt.weights)
    raw = np.frombuffer(rng.bytes(n * blocks * fmt.block_bytes), fmt.dtype).reshape(n, blocks)
    return qgemm.Tensor(fmt, (n, blocks * fmt.weights), tame(fmt, raw, rng))


def bound(x, w, loss):
    """Float sums of weights that are rounded to half or bf16 (loss): three roundings of what is added up to a weight.

    Those are of the scale, of the minimum or a codebook's level, and of the weight.
    """
    fmt = w.format
    sizes = magnitudes(fmt, w.blocks)
    size = np.abs(x) @ sizes.T
    if fmt.codebook is not None:
        least = fmt.variant(np.full_like(fmt.codebook, 2.0 ** (tiles.level_exponent(fmt) - 14)), None)
        size = np.abs(x) @ np.maximum(sizes, magnitudes(least, w.blocks)).T
    return a16_bound(x, sizes) + 3 * loss * size + subnormal_loss(w) * np.abs(x).sum(axis=1, keepdims=True)


LOSS = {"float16": 2.0**-11, "bfloat16": 2.0**-9 + 2.0**-24}


def poisoned(m, n, dtype="float32"):
    """An output [m, n] between two rows of guards, NaN everywhere."""
    guarded = cupy().full((m + 2, n), np.nan, np.float32).astype(dtype)
    return guarded, guarded[1:-1]


@with_gpu
@each(TILED)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (200, 32), (72, 96), (1100, 1120)])
def test_products_at_every_edge(fmt, n, k):
    """M on both sides of each token tile and route; N and K that end inside a tile; nothing beside y is touched."""
    rng = np.random.default_rng(n + k)
    w = random_tensor(fmt, n, k, rng)
    on_device = w.to_device()
    for m in sorted({9, *EDGES, *(m + 1 for m in EDGES), 2 * max(EDGES) + 7}):
        x = rng.standard_normal((m, w.shape[1])).astype(np.float16)
        guarded, y = poisoned(m, n)
        qgemm.matmul(cupy().asarray(x), on_device, out=y)
        wide = x.astype(np.float64)
        got = guarded.get()
        assert np.isnan(got[[0, -1]]).all()
        assert (np.abs(got[1:-1] - exact(wide, w)) <= bound(wide, w, LOSS["float16"])).all()


@with_gpu
@every_tiling()
def test_every_tiling_by_every_format(fmt, tiling, monkeypatch):
    """Grids of whole tiles, cut ones, both, any number of equal pieces; strips missing; always the same bits."""
    from qgemm.cuda.kernels.decode import Shape

    monkeypatch.setattr(prefill, "CUT_UNITS", 2)
    cp, rng = cupy(), np.random.default_rng(sum(tiling))
    sms, sums = prefill.sms(cp.cuda.Device().id), prefill.SUMS
    of_halves = 64 * (60 * tiling.strips - 1) + 24, 288, tiling.tokens
    of_few = 64 * (72 * tiling.strips - 1) + 24, 544, tiling.tokens
    for n, k, m in (
        (64 * 3 + 24, 2080, tiling.tokens - 1),
        (64 * 4 + 24, 544, tiling.tokens),
        (64 * 150, 288, tiling.tokens),
        (2500, 800, 333),
        of_halves,
        of_few,
    ):
        if tiling.lone and tiling.tiles(m, -(-n // tiles.ROWS)) > sms:
            continue
        w = random_tensor(fmt, n, k, rng)
        on_device = w.to_device()
        x = rng.standard_normal((m, w.shape[1])).astype(np.float16)
        on_gpu, wide, grids = cp.asarray(x), x.astype(np.float64), set()
        want, near = exact(wide, w), bound(wide, w, LOSS["float16"])
        for pieces in sums:
            monkeypatch.setattr(prefill, "SUMS", {**dict.fromkeys(sums, 1 << 30), pieces: 0})
            launch = prefill.PrefillLaunch(on_device.device, fmt, w.shape, m, "half", Shape(n, "float32"), tiling)
            if launch.grid in grids:
                continue
            grids.add(launch.grid)
            seen = set()
            for _ in range(3):
                guarded, y = poisoned(m, n)
                launch(cp.cuda.get_current_stream().ptr, on_gpu.data.ptr, on_device.pointer, y.data.ptr)
                seen.add(guarded.get().tobytes())
            assert len(seen) == 1
            assert (np.abs(y.get() - want) <= near).all()


@with_gpu
@each([fmt for fmt in TILED if fmt.name in ("q4_0", "q4_k")])
@pytest.mark.parametrize(("shares", "depth"), [(2, 5), (3, 4), (4, 6), (4, 7)])
@pytest.mark.parametrize("lone", [False, True])
def test_depth_of_the_ring_changes_no_bit(fmt, shares, depth, lone):
    """Rings whose stages the splits do not share evenly, many rounds, against one that they do."""
    from qgemm.cuda.kernels.decode import Shape

    cp, rng = cupy(), np.random.default_rng(25)
    m, n = 24, 200
    w = random_tensor(fmt, n, 25760, rng)
    x, on_device, ys = rng.standard_normal((m, w.shape[1])).astype(np.float16), w.to_device(), []
    on_gpu = cp.asarray(x)
    for stages in (2 * shares, depth):
        tiling = tilings.Tiling(0, 0, 0, 32, 1, shares, 2, lone, deep=stages)
        launch = prefill.PrefillLaunch(on_device.device, fmt, w.shape, m, "half", Shape(n, "float32"), tiling)
        assert launch.template["DEPTH"] == stages
        for _ in range(5):
            ys.append(poisoned(m, n)[1])
            launch(cp.cuda.get_current_stream().ptr, on_gpu.data.ptr, on_device.pointer, ys[-1].data.ptr)
    wide = x.astype(np.float64)
    assert (np.abs(ys[0].get() - exact(wide, w)) <= bound(wide, w, LOSS["float16"])).all()
    for y in ys[1:]:
        np.testing.assert_array_equal(y.get(), ys[0].get())


@with_gpu
@each(TILED)
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("y_dtype", ["float16", "bfloat16", "float32"])
def test_types_bias_and_residual(fmt, x_dtype, y_dtype):
    """y = x @ W.T + bias + residual, rounded once to y's type; rows of y of any size, and multiples of 16 bytes."""
    from ml_dtypes import bfloat16

    dtypes = {"float16": np.float16, "float32": np.float32, "bfloat16": bfloat16}
    cp, rng = cupy(), np.random.default_rng(3)
    for n, m in ((130, 20), (192, 70)):
        w = random_tensor(fmt, n, 512, rng)
        x = rng.standard_normal((m, 512)).astype(dtypes[x_dtype])
        bias = rng.standard_normal(n).astype(np.float32)
        residual = rng.standard_normal((m, n)).astype(np.float16)
        y = poisoned(m, n, dtypes[y_dtype])[1]
        qgemm.matmul(cp.asarray(x), w.to_device(), bias=cp.asarray(bias), residual=cp.asarray(residual), out=y)
        wide = x.astype(np.float64)
        want = exact(wide, w) + bias + residual
        near = bound(wide, w, LOSS[x_dtype]) + 2.0**-22 * (np.abs(bias) + np.abs(residual) + np.abs(want))
        near += {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[y_dtype] * (np.abs(want) + near) + 1e-7
        assert (np.abs(y.get().astype(np.float64) - want) <= near).all()


@with_gpu
@each([fmt for fmt in TILED if "d" in fmt.scale_fields])
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_small_rows_beside_large_ones_keep_their_bits(fmt, x_dtype):
    """Each row has a unit of its own: scales of some are 2^29 times those of others."""
    from ml_dtypes import bfloat16

    rng = np.random.default_rng(9)
    w = random_tensor(fmt, 130, 512, rng)
    rows = np.ldexp(1.0, rng.integers(-10, 20, (130, 1)) - 10)
    for name in fmt.scale_fields:
        w.blocks[name] = (w.blocks[name] * rows).astype(np.float16)
    x = rng.standard_normal((70, w.shape[1])).astype({"float16": np.float16, "bfloat16": bfloat16}[x_dtype])
    y = qgemm.matmul(cupy().asarray(x), w.to_device(), dtype="float32")
    wide = x.astype(np.float64)
    assert (np.abs(y.get() - exact(wide, w)) <= bound(wide, w, LOSS[x_dtype])).all()


@with_gpu
@each(TILED)
def test_identity_gives_weights_rounded_to_half(fmt):
    """A product with one weight is that weight but for its rounding."""
    rng = np.random.default_rng(7)
    w = random_tensor(fmt, 200, 300, rng)
    k = w.shape[1]
    y = qgemm.matmul(cupy().eye(k, dtype="float16"), w.to_device()).get()
    want = w.dequantize(np.float64).T
    assert (np.abs(y - want) <= bound(np.eye(k), w, LOSS["float16"])).all()


@with_gpu
@each(TILED)
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


@with_gpu
@each(INTEGER)
def test_a8_multiplies_what_activations_decode_to(fmt):
    """The same bits as a16 of x rounded to Q8_1, wherever both take the prefill kernel; and close to the formula."""
    cp, rng = cupy(), np.random.default_rng(31)
    w = random_tensor(fmt, 200, 544, rng)
    on_device, k = w.to_device(), w.shape[1]
    by_prefill = []
    for m in (9, 16, 17, 33, 64, 65, 300):
        if routes.route(routes.Problem(fmt, "a8", m, 200, k, 90, "half")).kernel == "prefill":
            x = rng.standard_normal((m, k)).astype(np.float16)
            decoded = qgemm.quantize_activations(x).dequantize(np.float16)
            y = qgemm.matmul(cp.asarray(x), on_device, "a8", dtype="float32")
            assert (y == qgemm.matmul(cp.asarray(decoded), on_device, dtype="float32")).all()
            assert_a8(y.get(), x.astype(np.float32), w)
            by_prefill.append(m)
    assert by_prefill[-5:] == [17, 33, 64, 65, 300]


@with_gpu
def test_a_race_of_tilings(monkeypatch):
    monkeypatch.setattr(timing, "REST", 0)
    monkeypatch.setattr(gpu_bench, "ROTATE", 1 << 20)
    fmt = qgemm.FORMATS["q5_k"]
    tried = [tiling for tiling in race_tilings.candidates(fmt, 20) if tiling.stage == 4 and tiling.splits == 1]
    (line,) = race_tilings.race(fmt, (512, 512), [20], tried, 1)
    assert re.fullmatch(r"q5_k 512x512 M=20: \d+\.\d\d \S+ stage \d( lone)?( \| \d+\.\d{3} \S+ stage 4( lone)?)+", line)


@with_gpu
@each(CODEBOOK_FORMATS)
@pytest.mark.parametrize("levels", CODEBOOKS.values(), ids=CODEBOOKS)
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16"])
def test_any_codebook(fmt, levels, x_dtype):
    """Levels of any size and sign, in tiles of few and of many tokens."""
    from ml_dtypes import bfloat16

    rng = np.random.default_rng(13)
    own = fmt.variant(levels(rng, len(fmt.codebook)), None)
    w = random_tensor(own, 200, 544, rng)
    for m in (20, 300):
        x = rng.standard_normal((m, 544)).astype({"float16": np.float16, "bfloat16": bfloat16}[x_dtype])
        y = qgemm.matmul(cupy().asarray(x), w.to_device(), dtype="float32").get()
        wide = x.astype(np.float64)
        assert (np.abs(y - exact(wide, w)) <= bound(wide, w, LOSS[x_dtype])).all()


@with_gpu
@pytest.mark.parametrize(
    ("strips", "m"), [(40, 9), (40, 64), (40, 200), (40, 600), (128, 100), (128, 128), (99, 128), (128, 256)]
)
@pytest.mark.parametrize("name", ["q4_0", "kbit3"])
def test_two_hundred_times_the_same_bits(strips, m, name):
    cp, rng = cupy(), np.random.default_rng(m)
    w = random_tensor(qgemm.FORMATS[name], 64 * strips, 2048, rng).to_device()
    x = cp.asarray(rng.standard_normal((m, 2048)).astype(np.float16))
    want = qgemm.matmul(x, w)
    y = cp.empty_like(want)
    for _ in range(200):
        y.fill(np.nan)
        qgemm.matmul(x, w, out=y)
        assert (y == want).all()


@with_gpu
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


@with_gpu
def test_views_and_leading_dimensions():
    """x that starts beside a multiple of 16 bytes, strided rows, leading dimensions, y that is strided."""
    cp, rng = cupy(), np.random.default_rng(8)
    w = random_tensor(qgemm.FORMATS["q5_0"], 100, 96, rng)
    on_device = w.to_device()
    x = cp.asarray(rng.standard_normal((3, 8, 97)).astype(np.float16))
    for view in (x[..., 1:], x[:, ::-1, :96], x[:, 2:5, 1:]):
        many = cp.full((*view.shape[:2], 200), np.nan, np.float32)
        qgemm.matmul(view, on_device, out=many[..., ::2])
        wide = view.get().astype(np.float64).reshape(-1, 96)
        error = np.abs(many[..., ::2].get().reshape(-1, 100) - exact(wide, w))
        assert (error <= bound(wide, w, LOSS["float16"])).all()
        assert cp.isnan(many[..., 1::2]).all()
        for activation in ("a16", "a8"):
            assert qgemm.matmul(view[:0], on_device, activation).shape == (0, view.shape[1], 100)
