"""Products of e4m3 numbers, "e4m3_g256": numbers, weights, the formula in exact sums, error, kernels on the host."""

from __future__ import annotations

import itertools
from fractions import Fraction

import harness
import numpy as np
import pytest
from e4m3_operands import exact_in_any_order
from harness.products import requantized, run_eight_bits
from helpers import exact, normal, prepared_product, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

import qgemm
from qgemm.codec import e4m3
from qgemm.codec.eight_bits import COLUMNS, e4m3_exponent, e4m3_weights
from qgemm.codec.error_bound import e4m3_exact, excess
from qgemm.codec.group_activations import E4M3
from qgemm.cuda.kernels import gemm_sm90_s8 as gemm
from qgemm.cuda.kernels import prefill_sm80_eight_bits as prefill
from qgemm.cuda.kernels import requantize, routes
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem

MXFP4 = qgemm.FORMATS["mxfp4"]
FINITE = np.flatnonzero(np.isfinite(e4m3.NUMBERS))


def weights_of(w: qgemm.Tensor):
    return e4m3_weights(w.format, w.blocks, w.shape[1])


def decoded(weights) -> np.ndarray:
    k = weights.codes.shape[1]
    return e4m3.NUMBERS[weights.codes] * weights.scale.repeat(COLUMNS, axis=1)[:, :k]


def with_exponents(e: np.ndarray, rng: np.random.Generator) -> qgemm.Tensor:
    """W in mxfp4 with these exponents [N, K / 32] and all codes."""
    blocks = np.empty(e.shape, MXFP4.dtype)
    blocks["e"], blocks["qs"] = e, rng.integers(0, 256, blocks["qs"].shape)
    blocks["qs"][..., :8] = np.arange(8) | np.arange(8, 16) << 4
    return qgemm.Tensor(MXFP4, (len(e), 32 * e.shape[1]), blocks)


def test_numbers():
    """0x38 is 1; seven subnormal numbers; 448 is the largest, with two codes of NaN; halves go to the even code."""
    assert e4m3.NUMBERS[[0x38, 0x01, 0x07, 0x08, 0x7E]].tolist() == [1, 2**-9, 7 * 2**-9, 2**-6, 448]
    assert np.flatnonzero(np.isnan(e4m3.NUMBERS)).tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(e4m3.encode(e4m3.NUMBERS[FINITE]), FINITE)
    size = e4m3.NUMBERS[:127]
    between = (size[:-1] + size[1:]) / 2
    even = np.arange(126) + np.arange(126) % 2
    np.testing.assert_array_equal(e4m3.encode(between), even)
    np.testing.assert_array_equal(e4m3.encode(np.nextafter(between, np.float32(1e9))), np.arange(1, 127))
    np.testing.assert_array_equal(e4m3.encode(-np.nextafter(between, np.float32(0))), np.arange(126) | 128)
    assert e4m3.encode(np.float32([464, 1e30, -np.inf, np.nan, 1e-30, -0.0])).tolist() == [126, 126, 254, 127, 0, 128]


@given(st.floats(-470, 470, width=32))
def test_the_nearest_number(value):
    code = int(e4m3.encode(np.float32([value]))[0])
    distances = [abs(Fraction(float(e4m3.NUMBERS[candidate])) - Fraction(value)) for candidate in FINITE]
    assert abs(Fraction(float(e4m3.NUMBERS[code])) - Fraction(value)) == min(distances)


@pytest.mark.usefixtures("engine")
@settings(max_examples=20)
@given(data=st.data())
def test_product_is_the_formula_in_exact_sums(data):
    x, w = data.draw(problems(MXFP4))
    prepared, y = prepared_product(x, w, E4M3)
    weights = weights_of(w)
    values = prepared.dequantize(np.float64) @ decoded(weights).astype(np.float64).T
    assert excess(y, values, e4m3_exact(prepared.blocks, weights)[1]) <= 1
    size = np.abs(prepared.dequantize(np.float64)) @ np.abs(decoded(weights).astype(np.float64)).T
    np.testing.assert_allclose(y, values, rtol=0, atol=1e-5 * size.max() + 1e-37)


@pytest.mark.parametrize("apart", range(18))
def test_weights_are_exact_where_exponents_differ_by_14_at_most(apart):
    """Beyond 14 a weight is off by at most half of e4m3's least number, in the unit of its row's 256 columns."""
    rng = np.random.default_rng(apart)
    e = rng.integers(120 - apart, 121, (6, 19))
    e[:, ::8], e[:, 1::8] = 120, 120 - apart
    w = with_exponents(e, rng)
    weights, values = weights_of(w), w.dequantize()
    np.testing.assert_array_equal(weights.scale, 2.0 ** (120 - 128 + e4m3_exponent(MXFP4)))
    assert np.array_equal(decoded(weights), values) == (apart <= 14)
    assert np.abs(decoded(weights) - values).max() <= 2.0**-10 * weights.scale.max()


def test_each_row_and_256_columns_have_a_scale_of_their_own():
    e = np.full((3, 16), 100)
    e[0, :8], e[1], e[2, 8:] = 140, 7, 3
    w = with_exponents(e, np.random.default_rng(0))
    np.testing.assert_array_equal(decoded(weights_of(w)), w.dequantize())


@pytest.mark.usefixtures("engine")
def test_any_row_is_nearer_than_with_integers():
    """e4m3 loses less than a8_g256 even of rows whose exponents are too far apart."""
    rng = np.random.default_rng(1)
    w = with_exponents(rng.integers(95, 125, (64, 32)), rng)
    x = normal(8, 1024)
    for kind, max_error in ((E4M3, 1e-5), ("a8_g256", 1)):
        prepared = qgemm.quantize_activations(x, kind)
        want = prepared.dequantize(np.float64) @ w.dequantize(np.float64).T
        assert np.abs(qgemm.matmul(prepared, w) - want).max() / np.abs(want).max() < max_error


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("k", [32, 96, 256, 288, 640])
def test_last_groups_may_be_short(k):
    x, w = normal(3, k), random_tensor(MXFP4, 70, k, np.random.default_rng(k))
    prepared = qgemm.quantize_activations(x, E4M3)
    assert prepared.blocks.shape == (3, k // 32)
    for first in range(0, k, 256):
        d = prepared.blocks["d"][:, first // 32 : first // 32 + 8]
        unit = np.abs(x[:, first : first + 256]).max(axis=1, keepdims=True) / np.float32(448)
        np.testing.assert_array_equal(d, unit.repeat(d.shape[1], axis=1))
    np.testing.assert_allclose(prepared.dequantize(), x, rtol=2.0**-4, atol=2.0**-10 * prepared.blocks["d"].max())
    assert excess(qgemm.matmul(x, w, E4M3), *e4m3_exact(prepared.blocks, weights_of(w))) <= 1


@pytest.mark.usefixtures("engine")
def test_nothing_but_its_own_row_meets_nan_and_infinity():
    x, w = normal(4, 512), random_tensor(MXFP4, 6, 512, np.random.default_rng(1))
    want = qgemm.matmul(x, w, E4M3)
    x[1, 7], x[2, 300] = np.nan, -np.inf
    prepared = qgemm.quantize_activations(x, E4M3).blocks
    assert not prepared["qs"][1, :8].any()
    assert not prepared["qs"][2, 8:].any()
    y = qgemm.matmul(x, w, E4M3)
    assert np.isnan(y[[1, 2]]).all()
    np.testing.assert_array_equal(y[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 3e38])
def test_any_magnitude_of_x(size):
    """Below 2^-119 a group counts as zero; the largest number of a group is 448 times its scale."""
    x = normal(2, 256)
    x *= np.float32(size) / np.abs(x).max(axis=1, keepdims=True)
    blocks = qgemm.quantize_activations(x, E4M3).blocks
    assert (np.abs(e4m3.NUMBERS[blocks["qs"].view(np.uint8)]).max(axis=(1, 2)) == (0 if size == 1e-38 else 448)).all()


@pytest.mark.usefixtures("engine")
def test_relative_error_of_products():
    """The error against exact products is 2.6% with normal activations, 1.8% where outliers dominate the product."""
    rng = np.random.default_rng(2)
    w = qgemm.quantize(rng.standard_normal((64, 2048)).astype(np.float32), MXFP4)
    x = rng.standard_normal((16, 2048)).astype(np.float32)
    outliers = x.copy()
    outliers[:, rng.choice(2048, 20, replace=False)] *= 20
    for values, max_error in ((x, 0.028), (outliers, 0.021)):
        want = exact(values, w)
        assert np.sqrt(((qgemm.matmul(values, w, E4M3) - want) ** 2).mean() / (want**2).mean()) < max_error


@pytest.mark.usefixtures("engine")
def test_gated_many_and_experts_take_it():
    rng = np.random.default_rng(3)
    x, ws = normal(3, 128), [random_tensor(MXFP4, 10, 128, rng) for _ in range(2)]
    ys = qgemm.matmul_many(x, ws, E4M3, biases=[np.ones(10), None])
    np.testing.assert_array_equal(ys[0], qgemm.matmul(x, ws[0], E4M3) + 1)
    np.testing.assert_array_equal(ys[1], qgemm.matmul(x, ws[1], E4M3))
    gated = qgemm.gated(qgemm.quantize_activations(x, E4M3), *ws)
    np.testing.assert_array_equal(gated, qgemm.gated(x, *ws, activation=E4M3))
    experts = random_tensor(MXFP4, 3 * 10, 128, rng)
    experts = qgemm.Tensor(MXFP4, (3, 10, 128), experts.blocks.reshape(3, 10, -1))
    y = qgemm.moe_matmul(x, experts, np.array([[2], [0], [1]]), E4M3)
    np.testing.assert_array_equal(y[0, 0], qgemm.matmul(x[:1], experts[2], E4M3)[0])


def test_errors_say_what_fits():
    x, w = normal(2, 64), qgemm.quantize(normal(3, 64), MXFP4)
    other = qgemm.quantize(normal(3, 64), "nvfp4")
    prepared = qgemm.quantize_activations(x, E4M3)
    for call, message in (
        (lambda: qgemm.matmul(x, other, E4M3), "'e4m3_g256' is for MXFP4.*of NVFP4 are not: use 'a8_g256' or 'a16'"),
        (lambda: qgemm.matmul(prepared, other), "is for MXFP4"),
        (lambda: qgemm.gated(x, w, other, activation=E4M3), "is for MXFP4"),
        (lambda: qgemm.matmul(prepared, w, "a8_g256"), "are e4m3 numbers a group of 256 for activation 'e4m3_g256'"),
        (lambda: qgemm.matmul(qgemm.quantize_activations(x, "a8_g256"), w, E4M3), "are codes of eight bits a group"),
    ):
        with pytest.raises(qgemm.UnsupportedError, match=message):
            call()
    with pytest.raises(qgemm.ShapeError, match="100 is not a multiple of 32"):
        qgemm.quantize_activations(normal(2, 100), E4M3)


@pytest.mark.compiles
@harness.needs_compiler
def test_requantize_makes_the_numbers_of_numpy():
    """Bytes and scales agree for near and far exponents; N and K end inside a tile, a pair and a stage."""
    rng = np.random.default_rng(3)
    for apart, ctas in itertools.product((2, 14, 40, 250), (2, 1)):
        w = with_exponents(rng.integers(252 - apart, 253, (150, 9)), rng)
        actual, want = requantized(w, ctas, E4M3), weights_of(w)
        np.testing.assert_array_equal(e4m3.NUMBERS[actual.codes.view(np.uint8)], e4m3.NUMBERS[want.codes])
        np.testing.assert_array_equal(actual.scale, want.scale)


@pytest.mark.compiles
@harness.needs_compiler
@pytest.mark.parametrize("config", range(len(prefill.measured())))
def test_sums_that_lose_nothing_are_those_of_numpy(config):
    """Bit for bit, over CTAs along K as well; M, N and K end inside a tile."""
    x, w = exact_in_any_order(70, 140, 544, np.random.default_rng(5))
    want, blocks = qgemm.matmul(x, w, E4M3), qgemm.quantize_activations(x, E4M3).blocks
    for split_k, backwards in ((1, False), (3, True)):
        y = run_eight_bits(w, blocks, E4M3, config, split_k, backwards=backwards)
        np.testing.assert_array_equal(y, want)


@pytest.mark.compiles
@harness.needs_compiler
def test_products_of_the_host_are_within_the_bound():
    w, x = random_tensor(MXFP4, 70, 800, np.random.default_rng(3)), normal(20, 800)
    x[1, 7], x[17, 300] = np.nan, -np.inf
    blocks = qgemm.quantize_activations(x, E4M3).blocks
    y = run_eight_bits(w, blocks, E4M3, 2)
    want, near = e4m3_exact(blocks, weights_of(w))
    rows = [row for row in range(20) if row not in (1, 17)]
    assert np.isnan(y[[1, 17]]).all()
    assert excess(y[rows].astype(np.float64), want[rows], near[rows]) <= 1


@pytest.mark.parametrize("x", TYPES)
def test_routes(x):
    """wgmma serves more than 240 tokens on sm_90, mma.sync the rest, nothing GPUs before sm_89 or other formats."""
    for m, sm in itertools.product((1, 64, 240, 241, 4096), (89, 90, 100, 120)):
        p = Problem(MXFP4, E4M3, m, 4096, 4096, sm, x)
        chosen = routes.route(p).kernel
        assert chosen.name == (gemm.NAME if sm == 90 and m > 240 else prefill.NAME)
        assert chosen.reads(p) == (EIGHT_BITS,)
    for sm in (75, 80, 86):
        with pytest.raises(qgemm.UnsupportedError, match=rf"on sm_{sm} \(sm_89 is the least"):
            routes.route(Problem(MXFP4, E4M3, 64, 64, 256, sm, x))
    with pytest.raises(qgemm.UnsupportedError, match="no kernel for Q4_0 e4m3_g256"):
        routes.route(Problem(qgemm.FORMATS["q4_0"], E4M3, 64, 64, 256, 90, x))


def test_a_model_is_prepared_for_it():
    """Tensors of other formats are left out."""
    w, other = (qgemm.quantize(normal(128, 256), name) for name in ("mxfp4", "q4_0"))
    keys = needed([w, other], 90, activations=(E4M3,))
    prepared = [
        (fmt, dict(template)["E4M3"]) for name, fmt, template in keys if name in (requantize.NAME, prefill.NAME)
    ]
    assert set(prepared) == {(MXFP4, 1)}
