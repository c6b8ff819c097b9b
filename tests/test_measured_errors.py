"""The checks of products: they accept correct results, and reject small faults in every kernel family."""

from __future__ import annotations

import numpy as np
import pytest
from gates import gated_product
from helpers import (
    FEW_ROWS,
    check_product,
    expected_a8,
    expected_decode,
    expected_on_gpu,
    expected_product,
    expected_sums,
    normal,
    random_tensor,
)  # fmt: skip
from measured_errors import Expected, check_rms, of_e4m3, of_groups, of_integer_dots, rounded_weights
from strategies import EVERY, over_formats

import qgemm
from qgemm.codec.eight_bits import e4m3_weights, eight_bits
from qgemm.codec.format import float_dtype
from qgemm.gating import gated_by

N, K_BLOCK = 64, 64
SHAPES = (1, 768), (5, 768), (3, 4096)
FAMILIES = {  # name -> whether it multiplies a format
    "sums": lambda fmt: True,
    "float16 weights": lambda fmt: fmt.tiled or fmt.plain,
    "bfloat16 weights": lambda fmt: fmt.tiled or fmt.plain,
    "levels of float16": lambda fmt: fmt.tiled and fmt.needs_table,
    "a8 by integer dots": lambda fmt: fmt.integer,
    "a8 by decoded activations": lambda fmt: fmt.integer and fmt.tiled,
    "a8_g256": lambda fmt: fmt.integer,
    "e4m3_g256": lambda fmt: fmt.e4m3,
}
PAIRS = [(fmt, family) for fmt in EVERY for family, multiplies in FAMILIES.items() if multiplies(fmt)]


def correct(family: str, w: qgemm.Tensor, m: int) -> tuple[np.ndarray, Expected, np.ndarray]:
    """y as a correct kernel computes it, the expected product, and the part of y that the last k_block adds."""
    fmt, k = w.format, w.shape[1]
    x, dense = normal(m, k).astype(np.float16).astype(np.float64), w.dequantize(np.float64)
    rest = x[:, -K_BLOCK:] @ dense[:, -K_BLOCK:].T
    narrow = x.astype(np.float32)
    if family == "sums":
        return qgemm.matmul(narrow, w), expected_sums(x, w), rest
    if family.endswith(" weights"):
        dtype = family.split()[0]
        x = x.astype(float_dtype(dtype)).astype(np.float64)
        y = x @ rounded_weights(fmt, w.blocks, dtype, False).T
        return y.astype(np.float32), expected_product(x, w, dtype), rest
    if family == "levels of float16":
        y = x @ rounded_weights(fmt, w.blocks, "float16", True).T
        return y.astype(np.float32), expected_product(x, w, "float16", levels_alone=True), rest
    if family == "a8 by decoded activations":
        halves = qgemm.quantize_activations(narrow).dequantize(np.float64).astype(np.float16).astype(np.float64)
        y = halves @ rounded_weights(fmt, w.blocks, "float16", False).T
        return y.astype(np.float32), expected_a8(narrow, w), rest
    activation = "a8" if family == "a8 by integer dots" else family
    prepared = qgemm.quantize_activations(narrow, activation)
    y, blocks = qgemm.matmul(prepared, w), prepared.blocks
    if activation == "a8":
        return y, of_integer_dots(blocks, w), rest
    if activation == "a8_g256":
        return y, of_groups(blocks, eight_bits(fmt, w.blocks, k)), rest
    return y, of_e4m3(blocks, e4m3_weights(fmt, w.blocks, k)), rest


@pytest.mark.parametrize(("fmt", "family"), PAIRS, ids=[f"{fmt.name}-{family}" for fmt, family in PAIRS])
def test_small_faults_are_rejected(fmt, family):
    """y scaled by 1.01, y without its last k_block, and y with a row of W of zeros."""
    for m, k in SHAPES:
        w = random_tensor(fmt, N, k, np.random.default_rng(1))
        y, expected, rest = correct(family, w, m)
        expected.check(y)
        for fault in faults(y, rest):
            with pytest.raises(AssertionError):
                expected.check(fault)


@over_formats([fmt for fmt in EVERY if fmt.name in ("q2_0", "q4_0", "q5_0", "tq1_0", "tq2_0")])
def test_a_prediction_covers_kernels_for_few_rows(fmt):
    """They sum codes with an offset, which matters where the weights themselves are exact (q2_0); others do not."""
    w, x = random_tensor(fmt, N, 768, np.random.default_rng(1)), normal(FEW_ROWS + 1, 768).astype(np.float16)
    many, few = (expected_product(rows, w, "float16").noise[:2] for rows in (x, x[:FEW_ROWS]))
    assert (few >= 0.999 * expected_decode(x[:2], w).noise).all()
    assert (many <= few).all()
    assert fmt.name != "q2_0" or (many <= 0.6 * few).all()


@over_formats([fmt for fmt in EVERY if fmt.name in ("q4_0", "q4_k", "bf16", "mxfp4")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_faults_of_rounded_outputs_are_rejected(fmt, dtype):
    """y of 16 bits, with a bias."""
    w, bias = random_tensor(fmt, N, 768, np.random.default_rng(1)), normal(N)
    for m in (1, 5):
        y, expected, _ = correct(f"{dtype} weights", w, m)
        expected, y = expected.plus(bias).rounded(dtype), (y + bias).astype(float_dtype(dtype))
        expected.check(y)
        for factor in (0.99, 1.01):
            with pytest.raises(AssertionError, match=r"RMS|bound"):
                expected.check((y.astype(np.float32) * np.float32(factor)).astype(y.dtype))


def faults(y: np.ndarray, rest: np.ndarray) -> list[np.ndarray]:
    """y [M, N] scaled, without the part of its last k_block, and with a row of W of zeros."""
    row = y.copy()
    row[:, 17] = 0
    return [part.astype(y.dtype) for part in (y * np.float32(1.01), y * np.float32(0.99), y - rest, row)]


SMALL = normal(N, 768) / 32  # The factor keeps the gates of products from 0.
MATRICES = {
    "q4_0": lambda: qgemm.quantize(SMALL, "q4_0"),
    "q6_k": lambda: qgemm.quantize(SMALL, "q6_k"),
    "reordered": lambda: qgemm.Reordered(
        qgemm.quantize(SMALL, "q4_0"), np.random.default_rng(5).permutation(768).astype(np.int32)
    ),
    "scaled": lambda: qgemm.Scaled(qgemm.quantize(SMALL, "nvfp4"), np.linspace(0.1, 3, N, dtype=np.float32)),
    "divided": lambda: qgemm.Scaled(qgemm.quantize(SMALL, "nvfp4"), np.float32(123.4), divides=True),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_small_faults_of_calls_are_rejected(name, activation, dtype, m):
    """A product with a bias and a residual, rounded to a type, of few rows and of many, also by a view; and a gate."""
    w, bias, residual = MATRICES[name](), normal(N, seed=1), normal(m, N, seed=2)
    x = normal(m, 768, seed=3).astype(float_dtype(dtype))
    wide, dense = x.astype(np.float32), w.dequantize(np.float64)
    rest = wide[:, -K_BLOCK:].astype(np.float64) @ dense[:, -K_BLOCK:].T
    sums = qgemm.matmul(wide, w, activation)
    y = (sums + bias + residual).astype(x.dtype)
    check_product(y, x, w, bias, residual, activation=activation)
    for fault in faults(y.astype(np.float32), rest):
        with pytest.raises(AssertionError, match=r"RMS|bound"):
            check_product(fault.astype(x.dtype), x, w, bias, residual, activation=activation)
    expected = expected_on_gpu(x, w, activation)
    gated = gated_product("silu", expected, expected)
    y = qgemm.gated(wide, w, w, activation=activation)
    gated.check(y)
    for fault in faults(y, qgemm.gated(wide, w, w) - gated_by("silu", sums - rest, sums - rest)):
        with pytest.raises(AssertionError, match=r"RMS|bound"):
            gated.check(fault)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "a8"])
def test_small_faults_fail_by_the_relative_rms(dtype):
    """Also of y between other layers' values, where nothing but the type is known."""
    w = random_tensor(qgemm.FORMATS["q4_0"], N, 768, np.random.default_rng(1))
    x = normal(33, 768)
    x = x if dtype == "a8" else x.astype(float_dtype(dtype)).astype(np.float32)
    dense = w.dequantize(np.float64)
    want, rest = x @ dense.T, x[:, -K_BLOCK:] @ dense[:, -K_BLOCK:].T
    if dtype == "a8":
        y = qgemm.matmul(x, w, "a8")
    else:
        y = (x @ dense.astype(float_dtype(dtype)).astype(np.float64).T).astype(float_dtype(dtype))
    check_rms(y, want, dtype)
    for fault in faults(y.astype(np.float64), rest):
        with pytest.raises(AssertionError, match="RMS"):
            check_rms(fault, want, dtype)
