"""Products of quantized activations on the CPU: their formula in exact integers, any magnitude of x, many rows of x."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import exact, extreme, normal, random_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from q8_1_blocks import in_k_blocks
from strategies import EVERY_CODES, over_formats, problems

import qgemm
from qgemm.codec import q8_1_f32
from qgemm.codec.error_bound import LARGEST, U, gamma, magnitudes
from qgemm.codec.format import float_dtype
from qgemm.codec.q8_1_f32 import scale_and_sum, to_half_precision
from qgemm.cpu import reference as cpu
from qgemm.cuda.activations import DeviceActivations

Q8_1 = qgemm.FORMATS["q8_1"]
M_EDGES = (1, 2, 7, cpu.FEW_TOKENS, cpu.FEW_TOKENS + 1, 2 * cpu.FEW_TOKENS)


def compiled() -> bool:
    """Whether compiled code multiplies, by the fixture `engine`."""
    return "QGEMM_CPU" not in os.environ


def formula(x: np.ndarray, w: qgemm.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The a8 product of blocks x [M, b] in exact integers and float64, and the sum of its terms' magnitudes.

    Compiled code adds integer dots of parts of a group in float32, so that their magnitudes count, not that of the sum.
    Groups narrower than a block of x have no sum there: their zero is taken from the codes, and those of x are summed
    for a minimum. In wider ones every block of x has a term of its own.
    """
    levels = w.format.decode_levels(w.blocks.reshape(-1))
    n, group = w.shape[0], w.format.group
    width, narrow = min(group, 32), group < 32
    zeros = np.broadcast_to(levels.zero, levels.scale.shape)
    codes = levels.codes.astype(np.int64)
    codes = (codes - zeros[..., None] if narrow else codes).reshape(n, -1, width)
    q = x["qs"].astype(np.int64).reshape(len(x), -1, width)
    sumi = np.einsum("ngj,mgj->mng", codes, q).astype(np.float64)
    dw, zero, mw = (
        part.astype(np.float64).reshape(n, -1).repeat(group // width, axis=1)
        for part in (levels.scale, zeros, levels.scale if levels.minimum is None else levels.minimum)
    )
    da, sa = (part[:, None] for part in scale_and_sum(x))
    da = da.repeat(32 // width, axis=-1)
    if narrow:
        sa = da * q.sum(axis=2)[:, None]
    correction = np.zeros(1) if narrow else zero * sa
    y = dw * (da * sumi - correction)
    dots = np.einsum("ngj,mgj->mng", np.abs(codes), np.abs(q)).astype(np.float64) if compiled() else sumi
    size = np.abs(dw) * (np.abs(da * dots) + np.abs(correction))
    if levels.minimum is not None:
        y, size = y + mw * sa, size + np.abs(mw * sa)
    return y.sum(axis=-1), size.sum(axis=-1)


def sums_bound(x: np.ndarray, w: qgemm.Tensor, size: np.ndarray) -> np.ndarray:
    """How far float32 may lie from the formula.

    Few rows of x: three roundings a group, then a sum over groups; the integer dot itself is exact. Many rows: sums of
    d * q times decoded weights, and of what minimums and zeros make of the difference of s and d * sum(q).
    """
    k, fmt = w.shape[1], w.format
    if len(x) <= cpu.FEW_TOKENS or compiled():
        return (k // min(fmt.group, 32) + 6) * U * size + 1e-37
    d, s = scale_and_sum(x)
    values = np.abs(d)[..., None] * np.abs(x["qs"])
    bound = gamma(k + 5) * (values.reshape(len(x), -1) @ magnitudes(fmt, w.blocks).T) + 1e-37
    if fmt.group < 32:
        return bound
    levels = fmt.decode_levels(w.blocks.reshape(-1))
    shift = np.abs(levels.scale.astype(np.float64) * levels.zero)
    if levels.minimum is not None:
        shift += np.abs(levels.minimum)
    difference = np.abs(s - d * x["qs"].sum(axis=-1, dtype=np.int64))
    by_block = shift.reshape(len(w.blocks), -1).repeat(fmt.group // 32, axis=1)
    return bound + gamma(k // 32 + 8) * (difference @ by_block.T)


def rounding_bound(x: np.ndarray, w: qgemm.Tensor, size: np.ndarray) -> np.ndarray:
    """How far the formula may lie from x @ w.T: half a step of each code, and d and s that are rounded to 11 bits."""
    steps = np.abs(x).reshape(len(x), -1, 32).max(axis=-1) / 127
    weights = np.abs(w.dequantize(np.float64)).reshape(len(w.blocks), -1, 32).sum(axis=-1)
    decoding = gamma(2) * (np.abs(x) @ magnitudes(w.format, w.blocks).T)
    return (0.5 + 2.0**-15) * (steps @ weights.T) + 2.0**-11 * (1 + 2.0**-9) * size + decoding


@pytest.mark.usefixtures("engine")
@over_formats(EVERY_CODES)
@given(data=st.data())
def test_a8_against_its_formula_in_exact_integers(fmt, data):
    """And x that was prepared gives the same bits."""
    x, w = data.draw(problems(fmt, st.sampled_from(M_EDGES)))
    prepared = qgemm.quantize_activations(x)
    want, size = formula(prepared.blocks, w)
    y = qgemm.matmul(x, w, "a8")
    assert (np.abs(y - want) <= sums_bound(prepared.blocks, w, size)).all()
    np.testing.assert_array_equal(qgemm.matmul(prepared, w), y)
    np.testing.assert_array_equal(qgemm.matmul(prepared, w, "a8"), y)


# ---------------------------------------------------------------- any magnitude


@pytest.mark.usefixtures("engine")
@over_formats(EVERY_CODES)
@pytest.mark.parametrize("m", [7, 65])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_x_of_any_magnitude(fmt, m, dtype):
    """From 1e-30 to 1e30, in one row as well: finite, the formula, and as near to x @ w.T as ordinary x."""
    w = random_tensor(fmt, 40, 768, np.random.default_rng(3))
    x = np.resize(extreme(768), (m, 768))
    if dtype == "float16":
        x = np.clip(x, -65504, 65504)
    x = x.astype(float_dtype(dtype))
    y, wide, blocks = qgemm.matmul(x, w, "a8"), x.astype(np.float64), qgemm.quantize_activations(x).blocks
    want, size = formula(blocks, w)
    assert np.isfinite(y).all()
    bound = sums_bound(blocks, w, size)
    assert (np.abs(y - want) <= bound).all()
    assert (np.abs(y - exact(wide, w)) <= bound + rounding_bound(wide, w, size)).all()


@pytest.mark.usefixtures("engine")
@over_formats(EVERY_CODES)
@pytest.mark.parametrize("m", [3, 65])
def test_no_term_overflows_where_y_is_finite(fmt, m):
    """The largest float32 in x, alone in a block, all over a block, and beside ordinary numbers; W is small."""
    w = random_tensor(fmt, 40, 768, np.random.default_rng(3))
    for name in fmt.scale_fields:
        w.blocks[name] *= np.float16(2.0**-12)
    x = np.resize(normal(3, 768), (m, 768))
    x[0, 5], x[1, 32:64], x[2, ::100] = LARGEST, -LARGEST, LARGEST
    blocks = qgemm.quantize_activations(x).blocks
    with np.errstate(over="ignore"):
        y, (want, size) = qgemm.matmul(x, w, "a8"), formula(blocks, w)
    finite = np.abs(want) < LARGEST / 2
    assert finite.any(axis=1)[:3].all()
    assert (np.abs(y - want) <= sums_bound(blocks, w, size))[finite].all()


def test_half_precision_is_that_of_float16():
    """Every significand, of either sign, times any power of two."""
    every = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    want = every.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(to_half_precision(every), want)
    for exponent in range(-115, 112, 5):
        sampled = slice(exponent + 115, None, 97)
        scaled, factor = np.ldexp(every[sampled], exponent), (-1.0) ** exponent
        np.testing.assert_array_equal(
            to_half_precision(np.float32(factor) * scaled), factor * np.ldexp(want[sampled], exponent)
        )
    assert np.isnan(to_half_precision(np.float32([np.nan, np.inf, -np.inf]))).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_ordinary_activations_are_those_of_ggml(seed):
    """Where d and s are normal in float16, and sums zero, the numbers of q8_1, whose blocks multiply alike."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((5, 320)) * 2.0 ** rng.integers(-3, 9, (5, 1))).astype(np.float32)
    quantized, of_ggml = qgemm.quantize_activations(x), qgemm.quantize(x, "q8_1")
    np.testing.assert_array_equal(quantized.blocks["qs"], of_ggml.blocks["qs"])
    for value, expected in zip(scale_and_sum(quantized.blocks), scale_and_sum(of_ggml.blocks), strict=True):
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(quantized.dequantize(), of_ggml.dequantize())
    w = random_tensor(qgemm.FORMATS["q5_1"], 8, 320, rng)
    for prepared in (of_ggml, pickle.loads(pickle.dumps(of_ggml)), pickle.loads(pickle.dumps(quantized))):
        np.testing.assert_array_equal(qgemm.matmul(prepared, w), qgemm.matmul(x, w, "a8"))


@pytest.mark.usefixtures("engine")
def test_what_is_not_finite_is_nan_in_its_own_block():
    x = normal(3, 96)
    x[0, 40], x[1, 95], x[2, 0] = np.nan, np.inf, -np.inf
    blocks = qgemm.quantize_activations(x).blocks
    bad = np.zeros((3, 3), bool)
    bad[0, 1] = bad[1, 2] = bad[2, 0] = True
    for part in scale_and_sum(blocks):
        np.testing.assert_array_equal(np.isnan(part), bad)
    assert not blocks["qs"][bad & (np.arange(3) != 0)[:, None]].any()


@pytest.mark.usefixtures("engine")
def test_activations_too_small_for_a_scale_are_zero():
    """1 / d would be infinite; the error is as large as the values."""
    x = np.full((2, 64), 3e-37, np.float32)
    w = random_tensor(qgemm.FORMATS["q5_1"], 8, 64, np.random.default_rng(2))
    assert not qgemm.matmul(x, w, "a8").any()


def test_prepared_activations_are_not_for_files(tmp_path):
    """A file gets ggml's blocks, by `quantize`."""
    prepared = qgemm.quantize_activations(normal(2, 64))
    with pytest.raises(qgemm.GGUFError, match="ggml has no type for Q8_1_F32"):
        qgemm.write(tmp_path / "x.gguf", {"x": prepared})


# ---------------------------------------------------------------- many rows


@over_formats(EVERY_CODES)
@pytest.mark.parametrize("m", [64, 65, 200])
def test_many_rows_by_the_float_road_equal_the_integer_road(fmt, m, monkeypatch):
    w, x = random_tensor(fmt, 70, 768, np.random.default_rng(3)), normal(m, 768)
    blocks = qgemm.quantize_activations(x).blocks
    y, (_, size) = qgemm.matmul(x, w, "a8"), formula(blocks, w)
    bound = sums_bound(blocks, w, size)
    monkeypatch.setattr(cpu, "FEW_TOKENS", m)
    assert (np.abs(qgemm.matmul(x, w, "a8") - y) <= bound + sums_bound(blocks, w, size)).all()


@pytest.mark.parametrize(("m", "slow"), [(64, "_multiply_decoded"), (65, "_multiply_codes")])
def test_above_64_rows_activations_are_decoded(m, slow, monkeypatch):
    """Which is as fast as a16; integers group by group are up to four times slower."""
    monkeypatch.setattr(cpu, slow, lambda *_: pytest.fail(f"{slow} of {m} rows"))
    w = random_tensor(qgemm.FORMATS["q4_1"], 8, 64, np.random.default_rng(3))
    assert qgemm.matmul(normal(m, 64), w, "a8").shape == (m, 8)


def test_a_long_x_is_multiplied_in_parts(monkeypatch):
    """The last of few rows."""
    w, x = random_tensor(qgemm.FORMATS["q4_k"], 70, 768, np.random.default_rng(3)), normal(210, 768)
    monkeypatch.setattr(cpu, "X_CHUNK", 100 * 768)
    parts = [qgemm.matmul(x[start : start + 100], w, "a8") for start in (0, 100, 200)]
    np.testing.assert_array_equal(qgemm.matmul(x, w, "a8"), np.concatenate(parts))


# ---------------------------------------------------------------- on a device


def test_blocks_of_a_device_are_those_of_the_host():
    """From the order in which kernels read them, without a GPU; K ends inside a k_block."""
    blocks = qgemm.quantize_activations(extreme(96)).blocks
    library = SimpleNamespace(pointer=id, host=lambda data: np.frombuffer(data, np.uint8))
    data = in_k_blocks(blocks).tobytes()
    unpacked = DeviceActivations((len(blocks), 96), data, None, "float32", library).blocks()
    assert unpacked.dtype == q8_1_f32.DTYPE
    assert unpacked.tobytes() == blocks.tobytes()
