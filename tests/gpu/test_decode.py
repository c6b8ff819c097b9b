"""Products of up to 16 tokens by the decode kernels, and by the SIMT kernels of sm_75, against float64."""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np
import pytest
from helpers import cupy, expected_decode, poisoned, random_tensor, raw_magnitudes
from hypothesis import given
from hypothesis import strategies as st
from measured_errors import Expected, noise_of
from references import EVERY_ROW, Reference
from strategies import INTEGER, TILED, gpu_settings, over_formats, problems

import qgemm
from qgemm.codec.error_bound import a8_exact, a16_bound
from qgemm.codec.format import float_dtype
from qgemm.codec.q8_1_f32 import scale_and_sum
from qgemm.cuda.kernels import decode, decode_config, routes


@pytest.fixture
def without_prefill(monkeypatch):
    """Up to 16 rows by the decode kernels, also where the prefill kernel, which rounds weights, is faster from 9 on."""
    monkeypatch.setattr(routes, "ROUTES", tuple(row for row in routes.ROUTES if row.kernel.name != "prefill_sm90"))


def expected_parts(x: np.ndarray, w: qgemm.Tensor) -> Expected:
    """The a8 product by kernels that sum parts of a block in float32, in any order."""
    blocks = qgemm.quantize_activations(x)
    levels = w.format.decode_levels(w.blocks.reshape(-1))
    codes = np.abs(levels.codes.astype(np.float64)).reshape(w.shape)
    scale = np.repeat(np.abs(levels.scale).reshape(w.shape[0], -1), w.format.group, axis=1)
    dense = scale * (codes + levels.zero)
    if levels.minimum is not None:
        dense += np.repeat(np.abs(levels.minimum).reshape(w.shape[0], -1), w.format.group, axis=1)
    sums = np.repeat(np.abs(scale_and_sum(blocks.blocks)[1]), 32, axis=1)
    terms = np.abs(blocks.dequantize(np.float64)) + sums
    y, _ = a8_exact(blocks.blocks, w.format, w.blocks)
    return Expected(y, 2 * a16_bound(terms, dense), noise_of(terms, dense, 0.0))


@over_formats(INTEGER)
@gpu_settings
@given(data=st.data())
def test_a8_fused_equals_cpu_closely(fmt, data):
    """At M <= 16 both use the same integers: only the order of float32 sums differs."""
    x, w = data.draw(problems(fmt, st.integers(1, 16)))
    expected_parts(x, w).check(qgemm.matmul(cupy().asarray(x), w.to_device(), "a8").get())


class Decoded(Reference):
    """A reference that also has the terms of each weight in the decode kernel."""

    @cached_property
    def raw_magnitudes(self):
        return cupy().asarray(raw_magnitudes(self.w))


def assert_decoded(x: np.ndarray, w: Decoded) -> None:
    """Products by the decode kernels: with exact weights and x, and by the formula of the codes if they are integers.

    Products of w.rows are compared with float64; y of the other rows is written and finite.
    """
    x = cupy().asarray(x)

    def product(activation: str):
        y = poisoned((len(x), len(w.whole)), np.float32)
        qgemm.matmul(x, w.on_device, activation, out=y)
        assert isinstance(w.rows, slice) or cupy().isfinite(y).all()
        return y if isinstance(w.rows, slice) else y[:, cupy().asarray(w.rows)]

    dtype = x.dtype.name
    bound = 2 * a16_bound(x.astype(np.float64), w.raw_magnitudes) + w.level_loss(x, dtype)
    w.expected(x, bound, dtype, w.raw_magnitudes, levels_alone=True).check(product("a16"))
    if w.w.format.integer:
        w.a8(x).check(product("a8"))


def a_row_of_each_m16_tile(n: int, rng: np.random.Generator):
    """A random row of each 16 rows of a large W: decoding all would dominate the time of the tests."""
    return EVERY_ROW if n < 4096 else np.minimum(np.arange(0, n, 16) + rng.integers(0, 16, -(-n // 16)), n - 1)


@pytest.mark.usefixtures("without_prefill")
@over_formats(TILED)
@pytest.mark.parametrize("x_dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_decode_kernel_is_exact_but_for_float_sums(fmt, x_dtype, data):
    """M = 1..16: neither weights nor x are rounded, whatever its type, so the bound has no 2^-11 but for codebooks."""
    x, w = data.draw(problems(fmt, st.integers(1, 16), finite=False))
    x = (x * np.float32(1.0 + 2.0**-20)).astype(float_dtype(x_dtype))
    y = poisoned((len(x), w.shape[0]), np.float32)
    qgemm.matmul(cupy().asarray(x), w.to_device(), out=y)
    expected_decode(x, w).check(y.get())


@pytest.mark.usefixtures("without_prefill")
@over_formats(TILED)
def test_rings_filled_without_bulk_copies(fmt, monkeypatch):
    """The pipelines of sm_80, which this GPU runs as well."""
    monkeypatch.setattr(decode_config, "BULK_COPIES", 1000)
    monkeypatch.setattr(decode, "BULK_COPIES", 1000)
    rng = np.random.default_rng(23)
    n, k = 200, 5 * max(64, fmt.weights) + (32 if fmt.weights == 32 else 0)
    w = Decoded(random_tensor(fmt, n, k, rng))
    routes.launch.cache_clear()
    try:
        for m, dtype in itertools.product((1, 8, 9, 16), ("float16", "float32")):
            assert_decoded(rng.standard_normal((m, w.w.shape[1])).astype(dtype), w)
    finally:
        routes.launch.cache_clear()


@over_formats(TILED)
@gpu_settings
@given(data=st.data())
def test_kernels_of_sm_75(fmt, data):
    """The kernels that need no tensor cores, which this GPU runs as well."""
    old = [row._replace(below=routes.ANY) for row in routes.ROUTES if row.kernel.name in ("gemv_simt", "gemv_dp4a")]
    x, w = data.draw(problems(fmt, st.integers(1, 8)))
    on_device = w.to_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ROUTES", (*old, *routes.ROUTES))
        y = poisoned((len(x), w.shape[0]), np.float32)
        qgemm.matmul(cupy().asarray(x), on_device, out=y)
        expected_decode(x, w).check(y.get())
        if not fmt.integer:
            return
        y = poisoned((len(x), w.shape[0]), np.float32)
        qgemm.matmul(cupy().asarray(x), on_device, "a8", out=y)
        expected_parts(x, w).check(y.get())


@pytest.mark.usefixtures("without_prefill")
@over_formats(TILED)
def test_long_rows(fmt):
    """K = 8192: many rounds of every pipeline."""
    rng = np.random.default_rng(24)
    n, k = 72, 8192
    w = Decoded(random_tensor(fmt, n, k, rng))
    for m in (1, 2, 3, 16):
        assert_decoded(rng.standard_normal((m, w.w.shape[1])).astype(np.float16), w)


@pytest.mark.usefixtures("without_prefill")
@over_formats(TILED)
@pytest.mark.parametrize(
    ("n", "long"),
    [
        *((n, False) for n in (16, 64, 33 * 64, 66 * 64, 80 * 64, 110 * 64, 140 * 64 + 24, 265 * 64 + 24)),
        (36 * 64 + 24, True),
        (265 * 64 + 24, True),
    ],
)
def test_decode_kernel_in_every_config(fmt, n, long):
    """One matrix for each row of DECODE_CONFIGS, ragged rows and columns, M on both sides of a token tile.

    long: rows of 8192 columns and more, which CTAs of a cluster share.
    """
    rng = np.random.default_rng(n)
    k = 64 * 9 + 32 if fmt.weights == 32 else 256 * (19 if n < 67 * 64 else 11)  # more than a tile of 256 a warp
    k += 8192 if long else 0
    w = Decoded(random_tensor(fmt, n, k, rng), a_row_of_each_m16_tile(n, rng))
    for m in (1, 7, 8, 9, 16):
        assert_decoded(rng.standard_normal((m, w.w.shape[1])).astype(np.float16), w)


@pytest.mark.usefixtures("without_prefill")
@over_formats(TILED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_identity_gives_the_decoded_matrix(fmt, dtype):
    """Bit for bit; from x of float16 levels of a codebook are those of half."""
    rng = np.random.default_rng(7)
    k = 3 * fmt.weights
    w = random_tensor(fmt, 200, k, rng)
    on_device = w.to_device()
    wants = {"float32": w.dequantize(np.float32).T, "float16": w.dequantize(np.float32).T}
    if fmt.needs_table:
        rounded = fmt.variant(fmt.codebook.astype(np.float16).astype(np.float32), None)
        wants["float16"] = rounded.dequantize(w.blocks).T
    for source, rows in itertools.product(wants, (slice(0, 8), slice(40, 41), slice(k - 16, k))):
        want = wants[source]
        y = qgemm.matmul(cupy().eye(k, dtype=source)[rows], on_device, dtype=dtype).get()
        np.testing.assert_array_equal(y, want[rows].astype(y.dtype))
