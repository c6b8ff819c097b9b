"""The GPU road, against NumPy: decode with ==, products with bounds derived from K and the types involved."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import FORMATS, INTEGER, TILED, each, exact, problems, raw_blocks, subnormal_loss, tame, weights

import qgemm
from qgemm.codec.error_bound import a8_exact, a16_bound, magnitudes
from qgemm.cuda import upload as transfer
from qgemm.cuda.kernels import decode, routes
from qgemm.cuda.kernels import decode_config as splits
from qgemm.cuda.layout import activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.tensor import half_exponent

pytestmark = pytest.mark.gpu

EXCERPT = Path(__file__).parent / "data" / "minilm_excerpt.gguf"
gpu_settings = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
ON_GPU = [fmt for fmt in FORMATS if fmt.plain or fmt.slots]
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of one conversion to the type
PRODUCTS = [(fmt, activation) for fmt in TILED for activation in ("a16", "a8") if activation == "a16" or fmt.integer]
each_product = pytest.mark.parametrize(
    ("fmt", "activation"), PRODUCTS, ids=[f"{fmt.name}-{activation}" for fmt, activation in PRODUCTS]
)
M_EDGES = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 9, 16, 33))  # both sides of every route boundary and token tile


def cupy():
    import cupy

    return cupy


def bf16():
    from ml_dtypes import bfloat16

    return np.dtype(bfloat16)


def poisoned(shape, dtype):
    """An output filled with NaN: whatever is not written shows."""
    return cupy().full(shape, np.nan, np.float32).astype(dtype)


@pytest.fixture
def without_prefill(monkeypatch):
    """Up to 16 rows by the decode kernels, also where the prefill kernel, which rounds weights, is faster from 9 on."""
    monkeypatch.setattr(routes, "ROUTES", tuple(row for row in routes.ROUTES if row.kernel != "prefill"))


def product_bound(x: np.ndarray, w: qgemm.Tensor, dtype: np.dtype) -> np.ndarray:
    """Sums in float32; weights rounded to x's type in panels, with scale and minimum in the prefill kernel."""
    sizes, loss = magnitudes(w.format, w.blocks), ROUNDING[dtype.name]
    tiny = subnormal_loss(w) * np.abs(x).sum(axis=1, keepdims=True) if loss else 0.0
    return a16_bound(x, sizes) + 3 * loss * (np.abs(x) @ sizes.T) + tiny


def assert_bounds(on_device, bounds):
    """Those of all rows, then zeros up to the last row of a strip, right behind the tiles."""
    assert on_device.bounds.get().tobytes() == bounds.tobytes() + bytes(-len(bounds) % 64 * 4)
    assert on_device.bounds.data.ptr == on_device.pointer + on_device.nbytes
    assert on_device.exponent == half_exponent(bounds.max())


@each(TILED)
@gpu_settings
@given(data=st.data())
def test_pack_equals_numpy_byte_for_byte(fmt, data):
    """Random bytes, ragged rows and columns, several pieces a strip; and back."""
    n, count = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 40))
    raw = raw_blocks(data.draw, fmt, (n, count))
    on_device = qgemm.Tensor(fmt, (n, count * fmt.weights), raw).to_device()
    assert on_device.data.get().tobytes() == tiles.pack(fmt, raw).tobytes()
    assert_bounds(on_device, tiles.bounds(fmt, raw))
    assert on_device.to_host().blocks.tobytes() == raw.tobytes()


@each(TILED)
def test_packing_in_chunks_equals_packing_at_once(fmt, monkeypatch):
    """More chunks than stages, the last of them ragged; bytes of other work in what the stages are made of."""
    rng = np.random.default_rng(17)
    raw = np.frombuffer(rng.bytes(500 * 9 * fmt.block_bytes), fmt.dtype).reshape(500, 9)
    monkeypatch.setattr(transfer, "CHUNK", 100 * 9 * fmt.block_bytes)
    for _ in range(3):
        on_device = qgemm.Tensor(fmt, (500, 9 * fmt.weights), raw).to_device()
        assert on_device.data.get().tobytes() == tiles.pack(fmt, raw).tobytes()
        assert_bounds(on_device, tiles.bounds(fmt, raw))
        assert on_device.to_host().blocks.tobytes() == raw.tobytes()


def test_what_is_packed_need_not_be_contiguous():
    raw = np.frombuffer(np.random.default_rng(19).bytes(70 * 8 * 17), qgemm.FORMATS["mxfp4"].dtype).reshape(70, 8)
    view = raw[::2, 1::2]
    w = qgemm.Tensor("mxfp4", (35, 128), view).to_device()
    assert w.to_host().blocks.tobytes() == view.tobytes()


@each(ON_GPU)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_decode_equals_numpy_bit_for_bit(fmt, dtype, data):
    """Raw bytes: every scale, NaN, infinity and subnormals included."""
    n, k = data.draw(st.integers(1, 140)), fmt.weights * data.draw(st.integers(1, 9))
    tensor = qgemm.Tensor(fmt, (n, k), raw_blocks(data.draw, fmt, (n, k // fmt.weights)))
    got = tensor.to_device().dequantize(dtype).get()
    want = tensor.dequantize(dtype)
    assert got.dtype == want.dtype
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(got.astype(np.float32)))
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@each(ON_GPU)
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_a16_within_bound(fmt, x_dtype, data):
    x, w = data.draw(problems(fmt, M_EDGES))
    dtype = bf16() if x_dtype == "bfloat16" else np.dtype(x_dtype)
    x = x.astype(dtype)
    on_device = w.to_device()
    y = poisoned((len(x), w.shape[0]), np.float32)
    assert qgemm.matmul(cupy().asarray(x), on_device, out=y) is y
    wide = x.astype(np.float64)
    want = exact(wide, w)
    error = np.abs(y.get().astype(np.float64) - want)
    bound = product_bound(wide, w, dtype)
    assert (error <= bound + (0 if fmt.plain else level_loss(wide, w, x_dtype))).all()


@each(INTEGER)
@gpu_settings
@given(data=st.data())
def test_a8_against_its_formula(fmt, data):
    x, w = data.draw(problems(fmt, M_EDGES))
    assert_a8(qgemm.matmul(cupy().asarray(x), w.to_device(), "a8").get(), x, w)


def assert_a8(got: np.ndarray, x: np.ndarray, w: qgemm.Tensor) -> None:
    """The CPU backend computes the formula; both sum in float32, and by every route the GPU rounds no differently."""
    blocks = qgemm.quantize_activations(x)
    want = qgemm.matmul(blocks, w)
    decoded = blocks.dequantize(np.float64)
    dense = w.dequantize(np.float64)
    sums = np.abs(decoded) @ np.abs(dense).T
    # The panel route sums d * q where the formula takes the stored s: they differ by 2^-10 of the largest |s| there is.
    largest = np.abs(dense).max() + 16 * np.abs(w.format.decode_levels(w.blocks.reshape(-1)).scale).max()
    bound = (
        2 * a16_bound(decoded, dense) + 2.0**-9 * (np.abs(decoded).sum(axis=1, keepdims=True) * largest + sums) + 1e-30
    )
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize("m", [64, 512])
def test_every_tensor_of_a_real_model(m):
    """With float16 x, a16 and a8, against float64; types without tiles are refused by name."""
    rng, multiplied = np.random.default_rng(m), set()
    with qgemm.open(EXCERPT) as file:
        for w in file.values():
            if not (w.format.plain or w.format.slots):
                with pytest.raises(qgemm.UnsupportedError, match=str(w.format)):
                    w.to_device()
                continue
            on_device, x = w.to_device(), rng.standard_normal((m, w.shape[1])).astype(np.float16)
            y = poisoned((m, w.shape[0]), np.float32)
            qgemm.matmul(cupy().asarray(x), on_device, out=y)
            wide = x.astype(np.float64)
            want = exact(wide, w)
            bound = product_bound(wide, w, x.dtype)
            assert (np.abs(y.get() - want) <= bound).all(), w
            if w.format.slots:
                assert_a8(qgemm.matmul(cupy().asarray(x), on_device, "a8").get(), x.astype(np.float32), w)
            multiplied.add(w.format.name)
    assert len(multiplied) == 10


def a8_parts_bound(x: qgemm.Tensor, w: qgemm.Tensor) -> np.ndarray:
    """Of the difference of two a8 products that sum parts of a block in float32, each in its own order."""
    levels = w.format.decode_levels(w.blocks.reshape(-1))
    codes = np.abs(levels.codes.astype(np.float64)).reshape(w.shape)
    scale = np.repeat(np.abs(levels.scale).reshape(w.shape[0], -1), w.format.group, axis=1)
    dense = scale * (codes + levels.zero)
    if levels.minimum is not None:
        dense += np.repeat(np.abs(levels.minimum).reshape(w.shape[0], -1), w.format.group, axis=1)
    sums = np.repeat(np.abs(x.blocks["s"].astype(np.float64)), 32, axis=1)
    return 2 * a16_bound(np.abs(x.dequantize(np.float64)) + sums, dense)


@each(INTEGER)
@gpu_settings
@given(data=st.data())
def test_a8_fused_equals_cpu_closely(fmt, data):
    """At M <= 16 both use the same integers: only the order of float32 sums differs."""
    x, w = data.draw(problems(fmt, st.integers(1, 16)))
    got = qgemm.matmul(cupy().asarray(x), w.to_device(), "a8").get()
    blocks = qgemm.quantize_activations(x)
    assert (np.abs(got - qgemm.matmul(blocks, w)) <= a8_parts_bound(blocks, w)).all()


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
        x = x.astype(np.float32).astype(bf16() if x_dtype == "bfloat16" else x_dtype)
    want = qgemm.quantize_activations(x).blocks
    on_gpu = cupy().asarray(x)
    size = -(-shape[1] // tiles.SPAN) * shape[0] * activations.DTYPE.itemsize
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
    x = cupy().asarray(x.astype(np.float32)).astype(bf16() if x_dtype == "bfloat16" else x_dtype)
    w = qgemm.quantize(rng.standard_normal((72, k)), "q4_0").to_device()
    for some in (x, x[3:]):
        y = qgemm.matmul(some, w, "a8").get()
        np.testing.assert_array_equal(y, qgemm.matmul(qgemm.quantize_activations(some), w, "a8").get())
    assert np.isfinite(y).any()


def level_loss(x: np.ndarray, w: qgemm.Tensor, dtype: str) -> np.ndarray | float:
    """What rounding a codebook's levels to x's type costs; from 2^-14 on, of levels times 2^-e, half has 11 bits."""
    if w.format.codebook is None or dtype == "float32":
        return 0.0
    least = w.format.variant(np.full_like(w.format.codebook, 2.0 ** (tiles.level_exponent(w.format) - 14)), None)
    sizes = np.maximum(magnitudes(w.format, w.blocks), magnitudes(least, w.blocks))
    return {"float16": 2.0**-11, "bfloat16": 2.0**-9}[dtype] * (np.abs(x) @ sizes.T)


def raw_magnitudes(w: qgemm.Tensor) -> np.ndarray:
    """What the decode kernel sums for each weight: scale * (code + its offset from zero, at most 128) + minimum."""
    levels = w.format.decode_levels(w.blocks.reshape(-1))
    codes = np.abs(levels.codes.astype(np.float64) - levels.zero) + 2 * max(
        levels.zero, 128 if levels.codes.dtype == np.int8 else 0
    )
    sizes = np.abs(levels.scale[..., None]) * codes
    if levels.minimum is not None:
        sizes = sizes + np.abs(levels.minimum[..., None])
    return sizes.reshape(w.shape)


def assert_decoded(x: np.ndarray, w: qgemm.Tensor, on_device) -> None:
    """Products by the decode kernels: of exact weights and x, and by the formula of the codes if they are integers."""
    y = poisoned((len(x), w.shape[0]), np.float32)
    qgemm.matmul(cupy().asarray(x), on_device, out=y)
    wide = x.astype(np.float64)
    bound = 2 * a16_bound(wide, raw_magnitudes(w)) + level_loss(wide, w, x.dtype.name)
    assert (np.abs(y.get() - exact(wide, w)) <= bound).all()
    if w.format.integer:
        y = poisoned(y.shape, np.float32)
        qgemm.matmul(cupy().asarray(x), on_device, "a8", out=y)
        want, bound = a8_exact(qgemm.quantize_activations(x).blocks, w.format, w.blocks)
        assert (np.abs(y.get() - want) <= 2 * bound).all()


@pytest.mark.usefixtures("without_prefill")
@each(TILED)
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_decode_kernel_is_exact_but_for_float_sums(fmt, x_dtype, data):
    """M = 1..16: neither weights nor x are rounded, whatever its type, so the bound has no 2^-11 but for codebooks."""
    x, w = data.draw(problems(fmt, st.integers(1, 16)))
    x = (x * np.float32(1.0 + 2.0**-20)).astype(bf16() if x_dtype == "bfloat16" else x_dtype)
    y = poisoned((len(x), w.shape[0]), np.float32)
    qgemm.matmul(cupy().asarray(x), w.to_device(), out=y)
    wide = x.astype(np.float64)
    bound = 2 * a16_bound(wide, raw_magnitudes(w)) + level_loss(wide, w, x_dtype)
    assert (np.abs(y.get() - exact(wide, w)) <= bound).all()


@pytest.mark.usefixtures("without_prefill")
@each(TILED)
def test_rings_filled_without_bulk_copies(fmt, monkeypatch):
    """The rings of sm_80, which this GPU runs as well."""
    monkeypatch.setattr(splits, "BULK_COPIES", 1000)
    monkeypatch.setattr(routes, "BULK_COPIES", 1000)
    rng = np.random.default_rng(23)
    n, k = 200, 5 * max(64, fmt.weights) + (32 if fmt.weights == 32 else 0)
    raw = np.frombuffer(rng.bytes(n * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(n, -1)
    w = qgemm.Tensor(fmt, (n, k), tame(fmt, raw, rng))
    decode.decode_launch.cache_clear()
    try:
        on_device = w.to_device()
        for m, dtype in itertools.product((1, 8, 9, 16), ("float16", "float32")):
            assert_decoded(rng.standard_normal((m, k)).astype(dtype), w, on_device)
    finally:
        decode.decode_launch.cache_clear()


@each(TILED)
@gpu_settings
@given(data=st.data())
def test_kernels_of_sm_75(fmt, data):
    """The first rows of the table that need no tensor cores, which this GPU runs as well."""
    old = [row._replace(below=routes.ANY) for row in routes.ROUTES if row.kernel in ("fused", "fused_a8")]
    x, w = data.draw(problems(fmt, st.integers(1, 8)))
    on_device = w.to_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ROUTES", (*old, *routes.ROUTES))
        y = poisoned((len(x), w.shape[0]), np.float32)
        qgemm.matmul(cupy().asarray(x), on_device, out=y)
        assert (np.abs(y.get() - exact(x, w)) <= 2 * a16_bound(x, raw_magnitudes(w))).all()
        if not fmt.integer:
            return
        y = poisoned((len(x), w.shape[0]), np.float32)
        qgemm.matmul(cupy().asarray(x), on_device, "a8", out=y)
        blocks = qgemm.quantize_activations(x)
        assert (np.abs(y.get() - qgemm.matmul(blocks, w)) <= a8_parts_bound(blocks, w)).all()


@pytest.mark.usefixtures("without_prefill")
@each(TILED)
def test_long_rows(fmt):
    """K = 8192: many rounds of every ring."""
    rng = np.random.default_rng(24)
    n, k = 72, 8192
    raw = np.frombuffer(rng.bytes(n * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(n, -1)
    w = qgemm.Tensor(fmt, (n, k), tame(fmt, raw, rng))
    on_device = w.to_device()
    for m in (1, 2, 3, 16):
        assert_decoded(rng.standard_normal((m, k)).astype(np.float16), w, on_device)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bias_and_residual(activation, m, dtype):
    """Added in float32 before y is rounded; the residual may be y itself; the second call is the short way."""
    cp, rng = cupy(), np.random.default_rng(25)
    w = qgemm.quantize(rng.standard_normal((200, 96)).astype(np.float32), "q4_1").to_device()
    x = cp.asarray(rng.standard_normal((m, 96)).astype(np.float16))
    bias = cp.asarray(rng.standard_normal(200).astype(np.float16))
    residual = cp.asarray(rng.standard_normal((m, 200)).astype(np.float32)).astype(bf16())
    sums = qgemm.matmul(x, w, activation)
    want = (sums + bias + residual.astype(np.float32)).astype(dtype if dtype != "bfloat16" else bf16())
    for _ in range(2):
        y = poisoned((m, 200), want.dtype)
        qgemm.matmul(x, w, activation, bias=bias, residual=residual, out=y)
        assert (y == want).all()
        y[...] = residual.astype(y.dtype)
        before = y.astype(np.float32)
        qgemm.matmul(x, w, activation, residual=y, out=y)
        assert (y == (sums + before).astype(y.dtype)).all()
    assert (qgemm.matmul(x, w, activation, bias=bias.astype(np.float64)) == sums + bias).all()
    with pytest.raises(qgemm.UnsupportedError, match="bias has shape"):
        qgemm.matmul(x, w, bias=bias[1:])


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_products_of_all_sizes_in_turn(activation):
    """What a small product asks of its kernel does not harm a large one that was launched before."""
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
    some = [w for w in ws if w.format.name == "q4_0"][:3]
    first = [y.get() for y in qgemm.matmul_many(x, some, activation)]
    for _ in range(20):
        for y, want in zip(qgemm.matmul_many(x, some, activation), first, strict=True):
            assert (y.get() == want).all()


@pytest.mark.usefixtures("without_prefill")
@each(TILED)
@pytest.mark.parametrize("n", [16, 64, 33 * 64, 66 * 64, 80 * 64, 110 * 64, 140 * 64 + 24, 265 * 64 + 24])
def test_decode_kernel_in_every_split(fmt, n):
    """One matrix for each row of SPLITS_OF_K, ragged rows and columns, M on both sides of a token tile."""
    rng = np.random.default_rng(n)
    k = 64 * 9 + 32 if fmt.weights == 32 else 256 * (19 if n < 67 * 64 else 11)  # more than a tile of 256 a warp
    raw = np.frombuffer(rng.bytes(n * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(n, -1)
    w = qgemm.Tensor(fmt, (n, k), tame(fmt, raw, rng))
    on_device = w.to_device()
    for m in (1, 7, 8, 9, 16):
        assert_decoded(rng.standard_normal((m, k)).astype(np.float16), w, on_device)


@pytest.mark.usefixtures("without_prefill")
@each(TILED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_identity_gives_the_decoded_matrix(fmt, dtype):
    """Bit for bit; from x of float16 levels of a codebook are those of half."""
    rng = np.random.default_rng(7)
    raw = np.frombuffer(rng.bytes(200 * 3 * fmt.block_bytes), fmt.dtype).reshape(200, 3)
    k = 3 * fmt.weights
    w = qgemm.Tensor(fmt, (200, k), tame(fmt, raw, rng))
    on_device = w.to_device()
    wants = {"float32": w.dequantize(np.float32).T, "float16": w.dequantize(np.float32).T}
    if fmt.codebook is not None:
        rounded = fmt.variant(fmt.codebook.astype(np.float16).astype(np.float32), None)
        wants["float16"] = rounded.dequantize(w.blocks).T
    for source, rows in itertools.product(wants, (slice(0, 8), slice(40, 41), slice(k - 16, k))):
        want = wants[source]
        y = qgemm.matmul(cupy().eye(k, dtype=source)[rows], on_device, dtype=dtype).get()
        np.testing.assert_array_equal(y, want[rows].astype(y.dtype))


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


@each([fmt for fmt in TILED if "d" in fmt.scale_fields])
def test_large_scales_do_not_overflow_half(fmt):
    """65504 * 127 is finite in float32, not in float16: the panel is scaled by a power of two."""
    k = 2 * fmt.weights
    blocks = np.zeros((64, 2), fmt.dtype)
    blocks["d"] = 65504
    blocks[next(iter(fmt.slots))] = 0x77
    if "scales" in blocks.dtype.names:
        blocks["scales"] = 0x7F
    w = qgemm.Tensor(fmt, (64, k), blocks)
    x = np.full((16, k), 2.0**-10, np.float16)
    y = qgemm.matmul(cupy().asarray(x), w.to_device()).get()
    want = exact(x, w)
    np.testing.assert_allclose(y, want, rtol=2.0**-10)


def test_scales_beyond_half_of_mxfp4():
    """2^(e - 128) spans all of float32: panels in float16 are scaled, products of few tokens need no scaling."""
    fmt = qgemm.FORMATS["mxfp4"]
    for e in (60, 127, 180):
        blocks = np.zeros((64, 2), fmt.dtype)
        blocks["e"], blocks["qs"] = e, 0x27
        w = qgemm.Tensor(fmt, (64, 64), blocks)
        x = np.ones((32, 64), np.float16)
        for m in (1, 16, 32):
            y = qgemm.matmul(cupy().asarray(x[:m]), w.to_device()).get()
            np.testing.assert_allclose(y, exact(x[:m], w), rtol=2.0**-10)


@each_product
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_same_input_same_bits(fmt, m, activation):
    rng = np.random.default_rng(3)
    raw = np.frombuffer(rng.bytes(320 * 512 // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(320, -1)
    w = qgemm.Tensor(fmt, (320, 512), tame(fmt, raw, rng)).to_device()
    x = cupy().asarray(rng.standard_normal((m, 512)).astype(np.float16))
    first = qgemm.matmul(x, w, activation)
    for _ in range(200):
        assert (qgemm.matmul(x, w, activation) == first).all()


def test_leading_shapes_strides_and_empty():
    cp, rng = cupy(), np.random.default_rng(5)
    w = qgemm.quantize(rng.standard_normal((96, 64)).astype(np.float32), "q8_0")
    on_device = w.to_device()
    x = cp.asarray(rng.standard_normal((3, 4, 128)).astype(np.float32))[:, ::2, ::2]
    want = exact(x.get().reshape(-1, 64), w).reshape(3, 2, 96)
    np.testing.assert_allclose(qgemm.matmul(x, on_device).get(), want, atol=1e-4)
    assert qgemm.matmul(x[0, 0], on_device).shape == (96,)
    assert qgemm.matmul(x[:0], on_device).shape == (0, 2, 96)
    strided = cp.full((3, 2, 192), np.nan, np.float16)
    qgemm.matmul(x, on_device, out=strided[..., ::2])
    np.testing.assert_allclose(strided[..., ::2].get(), want, rtol=2e-3, atol=1e-2)
    assert cp.isnan(strided[..., 1::2]).all()
    empty = qgemm.Tensor("q8_0", (5, 0), np.empty((5, 0), qgemm.FORMATS["q8_0"].dtype)).to_device()
    assert (qgemm.matmul(cp.ones((2, 0), np.float32), empty) == 0).all()


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_second_call_takes_the_short_way(activation):
    """The same shapes again: same bits, into any other arrays; views and overlaps take the long way."""
    cp, rng = cupy(), np.random.default_rng(21)
    w = qgemm.quantize(rng.standard_normal((96, 96)).astype(np.float32), "q4_0").to_device()
    for m in (1, 5):
        for _ in range(3):
            x = cp.asarray(rng.standard_normal((m, 96)).astype(np.float16))
            want = qgemm.matmul(x, w, activation, dtype="float16")
            y = poisoned((m, 96), np.float16)
            qgemm.matmul(x, w, activation, out=y)
            assert (y == want).all()
            buffer = cp.zeros(m * 96 + 1, np.float16)
            shifted = buffer[1:].reshape(m, 96)
            shifted[...] = x
            assert (qgemm.matmul(shifted, w, activation, out=y) == want).all()
            assert (qgemm.matmul(shifted, w, activation, out=shifted) == want).all()


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 16])
def test_a_product_can_be_captured_in_a_graph(activation, m):
    cp, rng = cupy(), np.random.default_rng(22)
    w = qgemm.quantize(rng.standard_normal((320, 256)).astype(np.float32), "q4_1").to_device()
    x, y = cp.zeros((m, 256), np.float16), cp.empty((m, 320), np.float32)
    qgemm.matmul(x, w, activation, out=y)
    with cp.cuda.Stream(non_blocking=True) as stream:
        qgemm.matmul(x, w, activation, out=y)  # compiles, and takes its workspace
        stream.begin_capture()
        qgemm.matmul(x, w, activation, out=y)
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = cp.asarray(rng.standard_normal((m, 256)).astype(np.float16))
            y.fill(np.nan)
            graph.launch(stream)
            assert (y == qgemm.matmul(x, w, activation)).all()


@each_product
def test_guard_regions(fmt, activation):
    """What lies around y is not written, and what lies around x, NaN, reaches no output."""
    cp, rng = cupy(), np.random.default_rng(9)
    n, k = 70, 3 * fmt.weights
    raw = np.frombuffer(rng.bytes(n * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(n, -1)
    w = qgemm.Tensor(fmt, (n, k), tame(fmt, raw, rng)).to_device()
    for m in (1, 2, 5, 8, 16, 20, 70, 300):
        x = cp.full((m + 2, k), np.nan, np.float16)
        x[1:-1] = cp.asarray(rng.standard_normal((m, k)))
        before = x.copy()
        guarded = cp.full((m + 2, n), 7.0, np.float32)
        qgemm.matmul(x[1:-1], w, activation, out=guarded[1:-1])
        assert (guarded[0] == 7).all()
        assert (guarded[-1] == 7).all()
        assert (guarded[1:-1] != 7).all()
        assert cp.isfinite(guarded).all()
        assert (x.view(np.uint16) == before.view(np.uint16)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_in_torch_out(dtype):
    """Zero-copy in and out through DLPack, on torch's current stream."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(11)
    w = qgemm.quantize(rng.standard_normal((256, 128)).astype(np.float32), "q4_0")
    on_device = w.to_device()
    for m in (1, 33):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.randn(m, 128, device="cuda").to(getattr(torch, dtype))
            torch.cuda._sleep(20_000_000)  # what follows must wait for x * 2 on the same stream
            x *= 2
            y = qgemm.matmul(x, on_device, dtype=dtype)
            out = torch.full((m, 256), float("nan"), device="cuda", dtype=torch.float32)
            assert qgemm.matmul(x, on_device, out=out) is out
        stream.synchronize()
        assert isinstance(y, torch.Tensor)
        assert y.dtype == x.dtype
        want = exact(x.float().cpu().numpy(), w)
        tolerance = np.abs(want).max() * (2.0**-6 if dtype == "bfloat16" else 2.0**-9)
        np.testing.assert_allclose(y.float().cpu().numpy(), want, atol=tolerance)
        np.testing.assert_allclose(out.cpu().numpy(), want, atol=tolerance)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize(
    ("n", "counts"),
    [(512, (1, 4, 8, 40)), (512, (17, 64, 200, 600)), (8192, (113, 128, 160, 256))],
    ids=["few", "many", "CTAs that wait for each other"],
)
def test_threads_and_streams(activation, n, counts):
    cp, rng = cupy(), np.random.default_rng(13)
    w = qgemm.quantize(rng.standard_normal((n, 256)).astype(np.float32), "q5_0").to_device()
    xs = [cp.asarray(rng.standard_normal((m, 256)).astype(np.float16)) for m in counts]
    wants = [qgemm.matmul(x, w, activation).get() for x in xs]
    failures: list[str] = []

    def work(x, want):
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                y = qgemm.matmul(x, w, activation)
                stream.synchronize()
                if not (y.get() == want).all():
                    failures.append(f"M = {len(x)}")

    cp.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_errors_name_what_came_and_what_fits():
    cp = cupy()
    w = qgemm.quantize(np.ones((32, 64), np.float32), "q4_0")
    on_device = w.to_device()
    with pytest.raises(qgemm.UnsupportedError, match="to_device"):
        qgemm.matmul(cp.ones((1, 64), np.float32), w)
    with pytest.raises(qgemm.UnsupportedError, match="upload x first"):
        qgemm.matmul(np.ones((1, 64), np.float32), on_device)
    with pytest.raises(qgemm.UnsupportedError, match="K = 64"):
        qgemm.matmul(cp.ones((1, 32), np.float32), on_device)
    with pytest.raises(TypeError, match="int32"):
        qgemm.matmul(cp.ones((1, 64), np.int32), on_device)
    with pytest.raises(qgemm.UnsupportedError, match="out has shape"):
        qgemm.matmul(cp.ones((1, 64), np.float32), on_device, out=cp.empty((2, 32), np.float32))
    with pytest.raises(qgemm.UnsupportedError, match="no kernel for F16 a8"):
        qgemm.matmul(
            cp.ones((1, 64), np.float32), qgemm.quantize(np.ones((32, 64), np.float32), "f16").to_device(), "a8"
        )


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
