"""Kernels of sm_80 on tensor cores, run on the host: mma.sync, ldmatrix and cp.async by their definitions.

Every format that such a kernel takes, those of tests included: groups of 128 and 256 weights, a zero of each group.
"""

from __future__ import annotations

import harness
import helpers
import numpy as np
import pytest
from harness.products import decode_problem, problem, run_decode, run_prefill
from q8_1_blocks import in_k_blocks
from strategies import EVERY_INTEGER, EVERY_TILED, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.jit.twins import TYPE_CODES
from qgemm.cuda.kernels import prefill_sm80
from qgemm.cuda.problem import Q8_1

pytestmark = [pytest.mark.compiles, harness.needs_compiler]


@over_formats(EVERY_TILED)
def test_prefill(fmt):
    """W dequantized to half in registers, sums in float32, over CTAs in order."""
    w, x, expected = problem(fmt, 5)
    y = run_prefill(fmt, prefill_sm80.A16, "half", x.astype(np.float16), w, len(x), 2)
    expected.check(y)


@over_formats(EVERY_INTEGER)
def test_prefill_of_quantized_activations(fmt):
    """Integer products of codes."""
    w, x, _ = problem(fmt, 5)
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    y = run_prefill(fmt, prefill_sm80.A8, Q8_1, blocks, w, len(x), 1)
    helpers.assert_a8(y, x, w)


@over_formats(EVERY_TILED)
def test_decode(fmt):
    """Codes on tensor cores as they lie, scales on sums in float32."""
    w, x, expected = decode_problem(fmt, 5)
    y = run_decode(fmt, "decode", "half", x.astype(np.float16), w, 5)
    expected.check(y)


@over_formats(EVERY_INTEGER)
def test_extreme_activations(fmt):
    """x from 1e-30 to 1e30, and spikes: prefill_sm80_a8 and decode_a8, which also quantizes x itself."""
    w, _, _ = problem(fmt, 5)
    x = helpers.extreme(w.shape[1])
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    y = run_prefill(fmt, prefill_sm80.A8, Q8_1, blocks, w, len(x), 2)
    helpers.assert_a8_formula(y, x, w, worst_case=True, levels_first=fmt.tile.bytes_are_levels)
    y = run_decode(fmt, "decode_a8", Q8_1, blocks, w, len(x))
    helpers.assert_a8_formula(y, x, w, worst_case=True, levels_first=fmt.tile.bytes_are_levels)
    np.testing.assert_array_equal(run_decode(fmt, "decode_a8", "float", x, w, len(x)), y)


@pytest.mark.parametrize("residual", [None, *TYPE_CODES])
@pytest.mark.parametrize("bias", [None, *TYPE_CODES])
@pytest.mark.parametrize("out", list(TYPE_CODES))
def test_epilogue(out, bias, residual):
    """y = sum + bias + residual, each of a type of its own: they are large beside the sum, which alone has a bound."""
    fmt = qgemm.FORMATS["q4_0"]
    w, x, expected = decode_problem(fmt, 3)
    m, n = expected.y.shape
    scale = 8 * np.abs(expected.y).max()
    bias = None if bias is None else (scale + helpers.normal(n, seed=5)).astype(helpers.float_dtype(bias))
    residual = (
        None if residual is None else (-3 * scale * helpers.normal(m, n, seed=6)).astype(helpers.float_dtype(residual))
    )
    y = run_decode(fmt, "decode", "half", x.astype(np.float16), w, m, out, bias, residual)
    expected.plus(*(term for term in (bias, residual) if term is not None)).rounded(helpers.float_dtype(out)).check(y)


@over_formats(EVERY_INTEGER)
def test_decode_of_quantized_activations(fmt):
    """Integer products of codes."""
    w, x, _ = problem(fmt, 5)
    y = run_decode(fmt, "decode_a8", Q8_1, in_k_blocks(qgemm.quantize_activations(x).blocks), w, 5)
    helpers.assert_a8(y, x, w)


@over_formats([qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "kbit3", "iq2_s", "iq3_xxs")])
def test_decode_of_one_token(fmt):
    """One row of x is read as the eight columns of an instruction."""
    w, x, expected = decode_problem(fmt, 1)
    expected.check(run_decode(fmt, "decode", "half", x.astype(np.float16), w, 1))


@over_formats(
    [qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", "nvfp4", "tq2_0", "iq4_nl", "u8z_g128")]
)
@pytest.mark.parametrize("m", [1, 5])
def test_decode_of_bfloat16(fmt, m):
    """Codes as the bits of bf16: x is small, or so large that warps start again without its factor."""
    w, x, _ = problem(fmt, m)
    x, weights = x.astype(float_dtype("bfloat16")).astype(np.float64), w.dequantize().astype(np.float64)
    for power in (-80, -40, 0, 31, 33, 100):
        scaled = x * 2.0**power
        y = run_decode(fmt, "decode", "bf16", scaled.astype(float_dtype("bfloat16")), w, m)
        bound = 2.0**-18 * np.abs(scaled) @ np.abs(weights).T
        assert (np.abs(y - scaled @ weights.T) <= bound).all(), power
    x[0, -1] = 2.0**40  # one warp starts again; the product of x with the code of level 0 is subtracted
    y = run_decode(fmt, "decode", "bf16", x.astype(float_dtype("bfloat16")), w, m)
    error = np.abs(y - x @ weights.T)
    assert (error[0] <= 2.0**-18 * np.abs(x[0]).sum() * np.abs(weights).max()).all()
    x[0, 3] = np.nan
    others = run_decode(fmt, "decode", "bf16", x.astype(float_dtype("bfloat16")), w, m)
    assert np.isnan(others[0]).all()
    for got in (y, others):
        assert (np.abs(got[1:] - x[1:] @ weights.T) <= 2.0**-18 * np.abs(x[1:]) @ np.abs(weights).T).all()


@over_formats([qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "q8_0")])
@pytest.mark.parametrize("cluster", [2, 4])
def test_decode_by_clusters(fmt, cluster):
    """CTAs of a cluster share K: each stores its part of the rows, the sums of the others included."""
    for m in (1, 5):
        w, x, expected = decode_problem(fmt, m, k=1344)
        options = {"m16_tiles": 4, "warp_split_k": 3, "cluster_split_k": cluster}
        y = run_decode(fmt, "decode", "half", x.astype(np.float16), w, m, **options)
        expected.check(y)


@over_formats([qgemm.FORMATS[name] for name in ("q1_0", "u2_g128", "u4z_g128", "s7_1of2")])
@pytest.mark.parametrize(
    ("m", "source", "dtype"), [(1, "half", np.float16), (13, "half", np.float16), (5, "float", "f4")]
)
def test_decode_by_whole_tiles(fmt, m, source, dtype):
    """A stage has a tile of two k_blocks, a group; K ends inside a round of the warps, N inside a row_block."""
    w, x, expected = decode_problem(fmt, m)
    y = run_decode(fmt, "decode", source, x.astype(dtype), w, m, whole_tiles=1)
    expected.check(y)
