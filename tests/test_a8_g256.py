"""Products of eight bits on either side, "a8_g256": the formula in exact integers, codes, error."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import exact, normal, prepared_product, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_errors import check_rms, of_groups
from strategies import EVERY_CODES, over_formats, problems

import qgemm
from qgemm.codec.eight_bits import COLUMNS, eight_bits, level_range
from qgemm.codec.error_bound import a8_g256_exact, excess
from qgemm.codec.group_activations import FORMAT, GROUP, MIN_MAGNITUDE

KIND = "a8_g256"
OUTLIER_LIMIT = 0.035  # error with outlier channels, docs/kernels/eight_bits.md


def weights_of(w: qgemm.Tensor):
    return eight_bits(w.format, w.blocks, w.shape[1])


@pytest.mark.usefixtures("engine")
@over_formats(EVERY_CODES)
@settings(max_examples=4)
@given(data=st.data())
def test_product_is_the_formula_in_exact_integers(fmt, data):
    x, w = data.draw(problems(fmt))
    prepared, y = prepared_product(x, w, KIND)
    assert excess(y, *a8_g256_exact(prepared.blocks, weights_of(w))) <= 1


@over_formats(EVERY_CODES)
@settings(max_examples=4)
@given(data=st.data())
def test_codes_are_within_half_a_unit_of_the_weights(fmt, data):
    """The unit is 1/127 of the largest possible weight of 256 columns."""
    _, w = data.draw(problems(fmt))
    quantized, values = weights_of(w), w.dequantize(np.float64)
    n, k = w.shape
    scale = quantized.scale.repeat(COLUMNS, axis=1)[:, :k].astype(np.float64)
    assert np.abs(quantized.codes).max() <= 127
    assert (np.abs(quantized.codes * scale - values) <= (0.5 + 1e-4) * scale).all()
    levels = fmt.decode_levels(w.blocks.reshape(-1)).zeros_as_minimums()
    ends = np.stack([levels.scale * np.float32(end) for end in level_range(fmt)])
    ends = np.abs(ends if levels.minimum is None else ends + levels.minimum).max(axis=0).reshape(n, -1)
    for group in range(quantized.scale.shape[1]):
        largest = ends[:, group * COLUMNS // fmt.group : (group + 1) * COLUMNS // fmt.group].max(axis=1)
        np.testing.assert_allclose(
            quantized.scale[:, group] * 127, np.where(largest < 2.0**-119, 0, largest), rtol=1e-6
        )


@pytest.mark.usefixtures("engine")
def test_identity_gives_back_the_codes():
    """One column of x at a time is the code 127 of its group, whose scale is 1/127."""
    w = random_tensor(qgemm.FORMATS["q4_k"], 5, 512, np.random.default_rng(0))
    quantized = weights_of(w)
    y = qgemm.matmul(np.eye(512, dtype=np.float32), w, KIND)
    np.testing.assert_allclose(y.T, quantized.codes * quantized.scale.repeat(COLUMNS, axis=1), rtol=1e-6)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("k", [32, 96, 128, 160, 256, 288, 640])
def test_last_groups_may_be_short(k):
    x, w = normal(3, k), random_tensor(qgemm.FORMATS["q5_1"], 70, k, np.random.default_rng(k))
    prepared, group = qgemm.quantize_activations(x, KIND), GROUP
    assert prepared.blocks.shape == (3, k // 32)
    for first in range(0, k, group):
        d = prepared.blocks["d"][:, first // 32 : (first + group) // 32]
        unit = np.abs(x[:, first : first + group]).max(axis=1, keepdims=True) / np.float32(127)
        np.testing.assert_array_equal(d, unit.repeat(d.shape[1], axis=1))
    np.testing.assert_allclose(prepared.dequantize(), x, atol=0.5001 * prepared.blocks["d"].max())
    y = qgemm.matmul(x, w, KIND)
    np.testing.assert_array_equal(qgemm.matmul(prepared, w), y)
    assert excess(y, *a8_g256_exact(prepared.blocks, weights_of(w))) <= 1


@pytest.mark.usefixtures("engine")
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity():
    x, w = normal(4, 256), random_tensor(qgemm.FORMATS["q4_0"], 6, 256, np.random.default_rng(1))
    want = qgemm.matmul(x, w, KIND)
    x[1, 7], x[2, 200] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][4, 0] = np.nan, np.inf
    y = qgemm.matmul(x, qgemm.Tensor(w.format, w.shape, blocks), KIND)
    lost = np.zeros(y.shape, bool)
    lost[[1, 2]] = lost[:, [3, 4]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 3e38])
def test_any_magnitude_of_x(size):
    """A group below 2^-119 counts as zero; any other is as exact as ordinary x, and overflows only where y does."""
    x, w = normal(2, 128), qgemm.quantize(normal(40, 128, seed=1), "q8_0")
    x /= np.abs(x).max()
    prepared = qgemm.quantize_activations(x * np.float32(size), KIND)
    y = qgemm.matmul(prepared, w).astype(np.float64)
    if size == 1e-38:
        assert (y == 0).all()
    elif size < 1e38:
        of_groups(prepared.blocks, eight_bits(w.format, w.blocks, 128)).check(y)
        check_rms(y / size, qgemm.matmul(x, w, KIND), "a8")
    assert (np.abs(prepared.blocks["qs"]) <= 127).all()
    assert np.abs(prepared.blocks["qs"]).max() == (0 if size == 1e-38 else 127)


@pytest.mark.usefixtures("engine")
def test_groups_of_the_least_magnitude():
    """A group whose largest number is MIN_MAGNITUDE has codes, one below it has zeros."""
    x, least = np.zeros((4, 256), np.float32), np.float32(MIN_MAGNITUDE)
    x[:, 5] = least, -least, np.nextafter(least, np.float32(0)), 0
    blocks = qgemm.quantize_activations(x, KIND).blocks
    assert [codes.any() for codes in blocks["qs"]] == [True, True, False, False]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "mxfp4", "q2_k", "tq2_0"])
def test_relative_error_of_products(name):
    """The error against exact products is 1.5% with normal activations, OUTLIER_LIMIT with outlier channels."""
    rng = np.random.default_rng(2)
    w = qgemm.quantize(rng.standard_normal((64, 2048)).astype(np.float32), name)
    x = rng.standard_normal((16, 2048)).astype(np.float32)
    outliers = x.copy()
    outliers[:, rng.choice(2048, 20, replace=False)] *= 20
    for values, max_error in ((x, 0.015), (outliers, OUTLIER_LIMIT)):
        want = exact(values, w)
        assert np.sqrt(((qgemm.matmul(values, w, KIND) - want) ** 2).mean() / (want**2).mean()) < max_error


@pytest.mark.usefixtures("engine")
def test_gated_many_and_experts_take_it():
    rng = np.random.default_rng(3)
    x, ws = normal(3, 128), [random_tensor(qgemm.FORMATS["q4_0"], 10, 128, rng) for _ in range(2)]
    ys = qgemm.matmul_many(x, ws, KIND, biases=[np.ones(10), None])
    np.testing.assert_array_equal(ys[0], qgemm.matmul(x, ws[0], KIND) + 1)
    np.testing.assert_array_equal(ys[1], qgemm.matmul(x, ws[1], KIND))
    gated = qgemm.gated(qgemm.quantize_activations(x, KIND), *ws)
    np.testing.assert_array_equal(gated, qgemm.gated(x, *ws, activation=KIND))
    experts = random_tensor(qgemm.FORMATS["q4_0"], 3 * 10, 128, rng)
    experts = qgemm.Tensor(experts.format, (3, 10, 128), experts.blocks.reshape(3, 10, -1))
    y = qgemm.moe_matmul(x, experts, np.array([[2], [0], [1]]), KIND)
    np.testing.assert_array_equal(y[0, 0], qgemm.matmul(x[:1], experts[2], KIND)[0])


def test_errors_say_what_fits():
    x, w = normal(2, 64), qgemm.quantize(normal(3, 64), "q4_0")
    for call, message in (
        (
            lambda: qgemm.matmul(qgemm.quantize_activations(x, KIND), w, "a8"),
            "activation 'a8_g256', got 'a8'",
        ),
        (lambda: qgemm.matmul(qgemm.quantize_activations(x), w, KIND), "are Q8_1 for activation 'a8', got 'a8_g256'"),
        (lambda: qgemm.matmul(x, w, "a8_g128"), "got 'a8_g128', which was removed; use 'a8_g256'"),
        (
            lambda: qgemm.quantize_activations(x, "a16"),
            "activation is 'a8', 'a8_g256' or 'e4m3_g256', got 'a16'",
        ),
        (lambda: qgemm.matmul(x, w, "a4"), "activation is 'a16', 'a8', 'a8_g256' or 'e4m3_g256', got 'a4'"),
        (
            lambda: qgemm.matmul(x, qgemm.quantize(x, "kbit4"), KIND),
            "no integer codes for activations of eight bits a group",
        ),
    ):
        with pytest.raises(qgemm.UnsupportedError, match=message):
            call()
    with pytest.raises(qgemm.ShapeError, match="100 is not a multiple of 32"):
        qgemm.quantize_activations(normal(2, 100), KIND)
    assert FORMAT.block_bytes == 36
