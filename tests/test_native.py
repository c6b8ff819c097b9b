"""The compiled products of the CPU: against the formulas that NumPy computes, on any thread, of any instructions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import assert_a8_formula, expected_sums, extreme, random_tensor
from numpy.testing import assert_array_equal
from strategies import EVERY_CODES, over_formats

import qgemm
from qgemm.arguments import KINDS
from qgemm.codec.error_bound import a16_bound, excess, magnitudes
from qgemm.codec.format import Format
from qgemm.codec.group_activations import E4M3
from qgemm.cpu import native
from qgemm.cpu.native import calls, libraries, library, products
from qgemm.formats import format_of
from qgemm.once import Once
from qgemm.system import process

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
SERVED = [fmt for fmt in qgemm.FORMATS.values() if fmt.levels is not None]
UNLISTED = [format_of(name) for name in ("s7_1of2", "f8_e4m3_g128", "f8_e5m2_g32", "kbit4_f32")]
INTEGER = [fmt for fmt in SERVED if fmt.integer]
OF_INTEGERS = tuple(kind for kind in KINDS if kind != E4M3)  # activations of every integer format
WITH_HEADER = [fmt for fmt in SERVED + UNLISTED if libraries.source(fmt)]
M = (1, 2, 3, 4, 5, 8, 16, 17, 100, 530)  # about the sizes of tiles, and more than are packed at a time


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


def test_every_format():
    assert all(native.serves(fmt) for fmt in qgemm.FORMATS.values())
    assert {fmt.name for fmt in SERVED + UNLISTED} == {fmt.name for fmt in WITH_HEADER}


def columns(fmt: Format, blocks: int) -> int:
    """The columns of `blocks` blocks; plain numbers, which have no blocks, end within a vector."""
    return blocks * (67 if fmt.plain else fmt.weights)


def activations_of(fmt: Format) -> tuple[str, ...]:
    return OF_INTEGERS if fmt.integer else ("a16",)


@over_formats(SERVED + UNLISTED)
@pytest.mark.parametrize("m", M)
@pytest.mark.parametrize("blocks", [1, 3, 11])
def test_products(fmt, m, blocks):
    """K of any number of blocks, N that no chunk divides: within the bounds that hold for NumPy."""
    rng = np.random.default_rng(m)
    w = random_tensor(fmt, 37, columns(fmt, blocks), rng)
    x = rng.standard_normal((m, w.shape[1]), np.float32)
    if fmt.integer and libraries.source(fmt):  # without a header NumPy computes it, by decoded numbers: test_a8.py
        assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, partial_dots=True)
    expected_sums(x, w).check(qgemm.matmul(x, w))


@over_formats([fmt for fmt in EVERY_CODES + UNLISTED if fmt.integer and libraries.source(fmt)])
def test_products_of_eight_bits_are_numpys(fmt, monkeypatch):
    """Bit for bit, NaN and infinity among x and scales: rows, tiles, groups and super-blocks cut short."""
    rng = np.random.default_rng(3)
    for m, blocks, kind in ((7, 5, "a8_g256"), (16, 1, "a8_g256"), (29, 11, "a8_g256"), (29, 3, "a8_g256")):
        w = random_tensor(fmt, 37, max(32, fmt.weights) * blocks, rng)
        x = rng.standard_normal((m, w.shape[1]), np.float32) * np.exp2(rng.integers(-60, 60, (m, 1))).astype(np.float32)
        x[2, 3], x[3, 1], x[4] = np.nan, np.inf, 1e-37
        x[5, ::2], x[6] = 127.5, 0

        def computed(x=x, w=w, kind=kind):
            return qgemm.quantize_activations(x, kind).blocks, qgemm.matmul(x, w, kind)

        blocks_of_x, y = computed()
        with monkeypatch.context() as by_numpy:
            by_numpy.setenv("QGEMM_CPU", "numpy")
            assert_array_equal((blocks_of_x, y)[1], (want := computed())[1])
        for field in ("d", "qs"):
            assert_array_equal(blocks_of_x[field], want[0][field])


@over_formats(WITH_HEADER)
def test_levels_and_scales_are_the_formats(fmt):
    """With the identity as x a product is the decoded matrix, bit for bit: raw blocks, each code and scale."""
    rng = np.random.default_rng(1)
    w = random_tensor(fmt, 64, 2 * max(256, fmt.weights), rng)
    y = qgemm.matmul(np.eye(w.shape[1], dtype=np.float32)[:128], w)
    want = w.dequantize().T[:128]
    scale = np.abs(magnitudes(fmt, w.blocks)).T[:128]
    assert (np.abs(y - want) <= 2.0**-23 * scale).all()  # minimum and scale are rounded once each


@over_formats(WITH_HEADER)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_types_of_x_and_y(fmt, dtype):
    from helpers import float_dtype

    rng = np.random.default_rng(2)
    w = random_tensor(fmt, 40, columns(fmt, 2), rng)
    x = rng.standard_normal((5, w.shape[1])).astype(float_dtype(dtype))
    for activation in activations_of(fmt):
        y = qgemm.matmul(x.astype(np.float32), w, activation)
        assert_array_equal(qgemm.matmul(x, w, activation), y)
        assert_array_equal(qgemm.matmul(x, w, activation, dtype=dtype), y.astype(float_dtype(dtype)))
        out = np.full((5, 80), np.nan, np.float32)[:, ::2]
        qgemm.matmul(x, w, activation, out=out)
        assert_array_equal(out, y)
    bias, residual = rng.standard_normal(40, np.float32), rng.standard_normal((5, 40), np.float32)
    plain = qgemm.matmul(x, w)
    assert_array_equal(qgemm.matmul(x, w, bias=bias, residual=residual), plain + bias + residual)


@over_formats(WITH_HEADER)
@pytest.mark.parametrize("m", [1, 16])
def test_weights_are_what_decoding_gives(fmt, m):
    """Bit for bit for formats whose weights are floats, with a row of x and with tiles."""
    w = random_tensor(fmt, 50, columns(fmt, 3), np.random.default_rng(8))
    x = np.zeros((m, w.shape[1]), np.float32)
    for k in (0, w.shape[1] // 2, w.shape[1] - 1):
        x[:] = 0
        x[:, k] = 2
        y, want = qgemm.matmul(x, w), 2 * w.dequantize()[:, k]
        if fmt.integer:
            assert (np.abs(y - want) <= 2.0**-22 * np.abs(magnitudes(fmt, w.blocks)[:, k])).all()
        else:
            assert_array_equal(y, np.broadcast_to(want, y.shape))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_a_codebook_belongs_to_the_tensor(bits):
    """Tensors of other codebooks share a library, but not the levels."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((17, 320), np.float32)
    for scale in (1, -3):
        book = scale * np.linspace(-1, 1, 2**bits) ** 3
        w = qgemm.quantize(rng.standard_normal((33, 320), np.float32), f"kbit{bits}", codebook=book)
        expected_sums(x, w).check(qgemm.matmul(x, w))


@over_formats(WITH_HEADER)
@pytest.mark.parametrize("m", [3, 16])
def test_memory_of_any_alignment(fmt, m):
    """Blocks, x and y at an odd address, as a file that is mapped may have its tensors; the same bits."""

    def at_odd_address(array):
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
        memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        moved = memory.view(array.dtype).reshape(array.shape)
        assert moved.ctypes.data % 2
        return moved

    rng = np.random.default_rng(10)
    w = random_tensor(fmt, 35, columns(fmt, 3), rng)
    x = rng.standard_normal((m, w.shape[1]), np.float32)
    moved = qgemm.Tensor(fmt, w.shape, at_odd_address(w.blocks))
    for activation in activations_of(fmt):
        out = at_odd_address(np.zeros((m, 35), np.float32))
        qgemm.matmul(at_odd_address(x), moved, activation, out=out)
        assert_array_equal(out, qgemm.matmul(x, w, activation))


@over_formats(WITH_HEADER)
def test_no_rows(fmt):
    """x or W without rows gives y without them."""
    w = random_tensor(fmt, 4, columns(fmt, 1), np.random.default_rng(0))
    k = w.shape[1]
    for activation in activations_of(fmt):
        assert qgemm.matmul(np.zeros((0, k), np.float32), w, activation).shape == (0, 4)
        assert qgemm.matmul(np.zeros((2, 0, k), np.float32), w, activation).shape == (2, 0, 4)
        assert qgemm.matmul(np.ones((3, k), np.float32), w[:0], activation).shape == (3, 0)


@over_formats([format_of(name) for name in ("q1_0", "u1_g32", "u1z_g32", "u2z_g32", "u1z_g64")])
@pytest.mark.parametrize("m", [1, 7, 17])
def test_sums_that_cancel(fmt, m):
    """Lanes hold integer dots of parts of a group, and float32 adds them: their sum is not exact where it is zero."""
    for seed, k in itertools.product(range(4), (fmt.weights, 512)):
        w = random_tensor(fmt, 20, k, np.random.default_rng(seed))
        x = np.random.default_rng(seed).standard_normal((m, k), np.float32)
        x[:, 1::2] = -x[:, ::2]
        assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, partial_dots=True)


@over_formats(INTEGER)
def test_x_of_any_magnitude(fmt):
    w = random_tensor(fmt, 40, 768, np.random.default_rng(3))
    x = np.resize(extreme(768), (7, 768))
    assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, partial_dots=True)
    assert np.isfinite(qgemm.matmul(x, w)).all()


@over_formats(WITH_HEADER)
@pytest.mark.parametrize("m", [6, 24])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(fmt, m, value):
    rng = np.random.default_rng(4)
    w = random_tensor(fmt, 40, 512, rng)
    for activation in activations_of(fmt):
        x = rng.standard_normal((m, 512), np.float32)
        want = qgemm.matmul(x, w, activation)
        x[4, 77] = value
        y = qgemm.matmul(x, w, activation)
        assert_array_equal(np.delete(y, 4, axis=0), np.delete(want, 4, axis=0))
        assert not np.isfinite(y[4]).all()


@pytest.mark.parametrize("count", [0, 1, 300, 5000])
def test_activations_are_numpys(count, monkeypatch):
    """Bit for bit, of any magnitude, rounding ties, NaN and infinity among them."""
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((count, 32)) * 10.0 ** rng.integers(-42, 37, (count, 1))).astype(np.float32)
    if count > 100:
        x[10], x[11, 3], x[12, 4], x[13, 5], x[14] = 0, np.nan, np.inf, -np.inf, -0.0
        x[15:60] = np.arange(-16, 16) + np.float32(0.5)
        x[15:60, 0] = 127 * 2.0 ** np.arange(-22, 23)
        x[60:90] = rng.integers(0, 2**32, (30, 32), np.uint32).view(np.float32)
    blocks = qgemm.quantize_activations(x.reshape(1, -1)).blocks if count else qgemm.quantize_activations(x).blocks
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    want = qgemm.quantize_activations(x.reshape(1, -1)).blocks if count else qgemm.quantize_activations(x).blocks
    for name in ("d", "s", "qs"):
        assert_array_equal(blocks[name], want[name])


@pytest.mark.parametrize("m", [1, 17, 100])
def test_products_of_e4m3_are_of_what_x_decodes_to(m, monkeypatch):
    """Bit for bit those of it, which are NumPy's but for rounding: weights of mxfp4 are exact in both."""
    rng = np.random.default_rng(m)
    w, x = random_tensor(qgemm.FORMATS["mxfp4"], 37, 800, rng), rng.standard_normal((m, 800), np.float32)
    x[0, 700] = np.nan
    prepared = qgemm.quantize_activations(x, E4M3)
    y, decoded = qgemm.matmul(x, w, E4M3), prepared.dequantize()
    assert_array_equal(y, qgemm.matmul(decoded, w))
    assert_array_equal(y, qgemm.matmul(prepared, w))
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    near = 2 * a16_bound(decoded[1:].astype(np.float64), magnitudes(w.format, w.blocks))
    assert excess(y[1:], qgemm.matmul(prepared, w)[1:].astype(np.float64), near) <= 1
    assert np.isnan(y[0]).all()


@pytest.mark.parametrize("threads", [2, 3, 4, 7])
def test_bits_do_not_depend_on_threads(threads, monkeypatch):
    rng = np.random.default_rng(5)
    w, x = random_tensor(qgemm.FORMATS["q4_k"], 515, 512, rng), rng.standard_normal((21, 512), np.float32)
    monkeypatch.setenv("QGEMM_THREADS", "1")
    want = [qgemm.matmul(x, w, activation) for activation in OF_INTEGERS]
    monkeypatch.setenv("QGEMM_THREADS", str(threads))
    for _ in range(10):
        for activation, y in zip(OF_INTEGERS, want, strict=True):
            assert_array_equal(qgemm.matmul(x, w, activation), y)


def test_a_number_of_threads():
    before = qgemm.threads()
    try:
        assert qgemm.threads(3) == qgemm.threads() == 3
        with pytest.raises(ValueError, match="a thread at least"):
            qgemm.threads(0)
    finally:
        qgemm.threads(before)


NARROW = {"x86-64-v3": ("-march=x86-64-v3",), "avxvnni": ("-march=x86-64-v3", "-mavxvnni")}
RUN_HERE = [
    name for name, flag in (("x86-64-v3", "avx2"), ("avxvnni", "avx_vnni")) if flag in process.cpu().split()
]  # CPUs with fewer instructions than this one


def extreme_activations(m, k, codes):
    """Blocks of "a8" with these codes: those from elsewhere may hold -128, which `quantize_activations` never makes."""
    x = qgemm.quantize_activations(np.ones((m, k), np.float32), "a8")
    blocks = x.blocks.copy()
    blocks["qs"] = np.random.default_rng(8).choice(np.array(codes, np.int8), blocks["qs"].shape)
    blocks["d"], blocks["s"] = 2.0**-20, 2.0**-20 * blocks["qs"].sum(-1, dtype=np.int64)
    return qgemm.Tensor(x.format, x.shape, blocks)


@over_formats(WITH_HEADER)
@pytest.mark.parametrize("narrow", RUN_HERE)
def test_bits_do_not_depend_on_the_instructions(fmt, narrow, monkeypatch):
    """Sources compiled for other CPUs give equal numbers, also of the codes and activations that saturate most."""
    rng = np.random.default_rng(6)
    w, x = random_tensor(fmt, 33, columns(fmt, 13), rng), rng.standard_normal((21, 1), np.float32)
    x = x * rng.standard_normal((1, w.shape[1]), np.float32)
    more = [(extreme_activations(21, w.shape[1], [-128, 127]), None)] if fmt.integer else []
    inputs = [*((x, activation) for activation in activations_of(fmt)), *more]
    want = [qgemm.matmul(x, w, activation) for x, activation in inputs]
    engine = libraries.loaded(fmt)
    monkeypatch.setattr(library, "NATIVE", NARROW[narrow])
    monkeypatch.setattr(library, "cpu", lambda: "")  # compiled for no CPU of its own: as tools/build_wheel.py keeps it
    monkeypatch.setattr(library, "_loaded", Once())
    cached = (libraries.loaded, products.eight_bit_library)
    for each_cache in cached:
        each_cache.cache_clear()
    try:
        w = qgemm.Tensor(w.format, w.shape, w.blocks)  # without the plans of products before
        for (x, activation), y in zip(inputs, want, strict=True):
            assert_array_equal(qgemm.matmul(x, w, activation), y)
        assert libraries.loaded(fmt) is not engine
    finally:
        for each_cache in cached:
            each_cache.cache_clear()


@over_formats([fmt for fmt in WITH_HEADER if fmt.integer])
@pytest.mark.parametrize("code", [-128, -127, 127])
def test_sums_of_extreme_activations_do_not_overflow(fmt, code, monkeypatch):
    w = random_tensor(fmt, 33, columns(fmt, 3), np.random.default_rng(8))
    x = extreme_activations(24, w.shape[1], [code])
    y = qgemm.matmul(x, w)
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    expected = qgemm.matmul(x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["q8_0", "q8_1", "iq4_nl", "mxfp4"])
@pytest.mark.parametrize("least", [-127, -128])
def test_signed_codes_with_and_without_minus_128(name, least):
    """Random bytes hold -128 almost always, encoded weights never: sums of integers are exact for both."""
    fmt, rng = format_of(name), np.random.default_rng(9)
    w = random_tensor(fmt, 33, 256, rng)
    blocks = w.blocks.copy()
    blocks["e" if name == "mxfp4" else "d"] = 128 if name == "mxfp4" else 1
    if name.startswith("q8"):
        blocks["qs"] = rng.integers(least, 128, blocks["qs"].shape)
        blocks["qs"][0, 0, 7] = least
    w = qgemm.Tensor(fmt, w.shape, blocks)
    prepared = qgemm.quantize_activations(np.ones((19, 256), np.float32), "a8")
    x = prepared.blocks.copy()
    x["qs"] = rng.integers(-128, 128, x["qs"].shape)
    x["qs"][:, 0], x["qs"][:, 1] = -128, 127
    x["d"] = 2.0**-19
    numbers = x["qs"].reshape(19, 256).astype(np.float64)
    for m in (1, 2, 19):
        y = qgemm.matmul(qgemm.Tensor(prepared.format, (m, 256), x[:m]), w)
        assert_array_equal(y, numbers[:m] @ w.dequantize().T)
    x16 = rng.integers(-(2**15), 2**15, (3, 256)).astype(np.float32)  # digits of -128 among them
    np.testing.assert_allclose(qgemm.matmul(x16, w), x16.astype(float) @ w.dequantize().T, rtol=1e-6, atol=64)


@pytest.mark.parametrize("activation", OF_INTEGERS)
@pytest.mark.parametrize("m", [1, 17, 300])
def test_weights_of_a_call_share_x(m, activation):
    """More of them than a job has room for, of several formats and heights: the bits of one product each."""
    rng = np.random.default_rng(10)
    names = ["q4_0", "q8_0", "q4_0", "q4_k", *["f16", "tq1_0"] * (activation == "a16")] * 5
    weights = [random_tensor(qgemm.FORMATS[name], 33 + i, 512, rng) for i, name in enumerate(names)]
    assert len(weights) > calls.TARGETS
    x = rng.standard_normal((m, 512), np.float32)
    for w, y in zip(weights, qgemm.matmul_many(x, weights, activation), strict=True):
        assert_array_equal(y, qgemm.matmul(x, w, activation))


@pytest.mark.parametrize("activation", [None, "a16", "a8"])
def test_a_plan_serves_what_it_was_made_for(activation, monkeypatch, tmp_path):
    """Any rows, in `out` or not, give the bits of the path without a plan, which strides and other types go."""
    rng = np.random.default_rng(11)
    w = random_tensor(qgemm.FORMATS["q4_0"], 40, 256, rng)
    qgemm.write(tmp_path / "w.gguf", {"w": w})
    mapped = qgemm.open(tmp_path / "w.gguf")["w"]
    assert (w.in_memory, mapped.in_memory) == (True, False)
    for shape in [(256,), (1, 256), (2, 3, 256), (40, 256), (300, 256), (0, 256)]:
        x = rng.standard_normal(shape, np.float32)
        y = qgemm.matmul(np.repeat(x, 2, axis=-1)[..., ::2], w, activation)
        assert y.shape == (*shape[:-1], 40)
        for tensor in (w, mapped):
            assert_array_equal(qgemm.matmul(x, tensor, activation), y)
            out = np.full_like(y, np.nan)
            assert qgemm.matmul(x, tensor, activation, out=out) is out
            assert_array_equal(out, y)
        memory = np.zeros(shape, np.float32)
        memory[...] = x
        part = memory.reshape(-1)[: y.size].reshape(y.shape)
        qgemm.matmul(memory, w, activation, out=part)
        assert_array_equal(part, y)
    with pytest.raises(qgemm.ShapeError, match="rows of 255"):
        qgemm.matmul(np.zeros((1, 255), np.float32), w, activation)
    with pytest.raises(qgemm.ShapeError, match="out has shape"):
        qgemm.matmul(np.zeros((1, 256), np.float32), w, activation, out=np.zeros((2, 40), np.float32))
    seen = []
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    for name in ("multiply_a8", "multiply_a16"):
        monkeypatch.setattr(f"qgemm.cpu.reference.{name}", lambda *arguments: seen.append(arguments))
    qgemm.matmul(np.zeros((1, 256), np.float32), w, activation)
    assert len(seen) == 1


def test_zeros_have_zeros_as_codes_in_any_memory():
    """The blocks of zeros lie where those of other numbers were."""
    for _ in range(3):
        blocks = qgemm.quantize_activations(np.full((4, 512), 3.0, np.float32), "a8_g256").blocks
        assert (blocks["qs"] == 127).all()
        del blocks
        assert not qgemm.quantize_activations(np.zeros((4, 512), np.float32), "a8_g256").blocks["qs"].any()
