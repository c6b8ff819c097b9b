"""decode_slices on the host: one token as slices of eight bits, by integer products."""

from __future__ import annotations

import harness
import helpers
import numpy as np
import pytest
from gates import function, gated_bound
from harness import products
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import over_formats

import qgemm
from qgemm.cuda.jit.grid_codegen import COLUMNS
from qgemm.cuda.kernels.decode import sliced

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
SLICED = [fmt for fmt in qgemm.FORMATS.values() if sliced(fmt)]
FAMILIES = [qgemm.FORMATS[name] for name in ("u1_g128", "u1z_g32", "u2z_g128", "u2f_g64_bf16", "u3_g128", "u3z_g256")]
SLICE_BLOCK = 256
LOST = 2.0**-29  # error of each x at most, relative to the largest magnitude of its block


def expected_product(x, w):
    """The product by float32 sums of exact products of slices.

    raw: includes the zero, which is subtracted from sums.
    """
    raw = helpers.magnitudes(w.format, w.blocks) + np.abs(w.dequantize(np.float64))
    n, k = raw.shape
    padded = -(-k // SLICE_BLOCK) * SLICE_BLOCK
    of_blocks = np.zeros((n, padded))
    of_blocks[:, :k] = 4 * raw
    of_blocks = of_blocks.reshape(n, -1, SLICE_BLOCK)
    largest = np.zeros(padded)
    largest[:k] = np.abs(x[0])
    largest = largest.reshape(-1, SLICE_BLOCK).max(axis=1)
    bound = 4 * helpers.a16_bound(x, raw) + LOST * (of_blocks.sum(axis=2) @ largest)
    sliced_noise = LOST * np.sqrt((of_blocks**2).sum(axis=2) @ largest**2)
    noise = np.hypot(helpers.noise_of(x.astype(np.float64), raw, 0.0), sliced_noise)
    return helpers.Expected(helpers.exact(x, w), bound, noise)


def multiplied(fmt, source, x, w, **config):
    """y [N] by the kernel."""
    given_x = x.astype(np.float16) if source == "half" else x
    return products.run_decode(fmt, "decode_slices", source, given_x, w, 1, **config)


@over_formats([*SLICED, *FAMILIES])
def test_one_token(fmt):
    """Every format: float32 sums of exact products, in two chunks if x has more columns than a CTA holds."""
    for k in (320, 4500):
        w, x, _ = products.problem(fmt, 1, k=k)
        expected_product(x, w).check(multiplied(fmt, "half", x, w))


@over_formats([qgemm.FORMATS[name] for name in ("q2_k", "q1_0", "iq2_xs")])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 3, 40]), zeros=st.booleans())
def test_x_of_any_range(fmt, seed, spread, zeros):
    """Magnitudes that differ by up to 2^80, denormals among them: the error is relative to a block's largest."""
    rng = np.random.default_rng(seed)
    w = products.problem(fmt, 1, k=768)[0]
    x = (rng.standard_normal((1, w.shape[1])) * 2.0 ** rng.uniform(-spread, spread, (1, w.shape[1]))).astype(np.float32)
    x[:, : 256 if zeros else 0] = 0
    x[:, 256:260] *= np.float32(1e-38)
    expected_product(x, w).check(multiplied(fmt, "float", x, w))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_x_that_is_not_finite(value):
    """Infinity has no slices: all products with it are NaN."""
    fmt = qgemm.FORMATS["q2_k"]
    w, x, _ = products.problem(fmt, 1)
    x = x.copy()
    x[0, 77] = value
    assert np.isnan(multiplied(fmt, "float", x, w)).all()


@over_formats([qgemm.FORMATS[name] for name in ("q3_k", "iq1_s")])
@pytest.mark.parametrize("m16_tiles", [1, 8])
def test_shares_of_rows(fmt, m16_tiles):
    """A part of a row_block, and two of them."""
    w, x, _ = products.problem(fmt, 1, k=1024, n=250)
    y = multiplied(fmt, "half", x, w, m16_tiles=m16_tiles, warp_split_k=3)
    expected_product(x, w).check(y)


@over_formats([qgemm.FORMATS[name] for name in ("q2_k", "iq2_xs")])
def test_one_launch_of_gate_and_up(fmt):
    """y is the gate of one product times the other, each with the bits of a launch of its own."""
    rng = np.random.default_rng(9)
    weights = tuple(helpers.random_tensor(fmt, 90, 512, rng) for _ in range(2))
    x = helpers.normal(1, weights[0].shape[1], seed=4).astype(np.float16)
    gate, up = (multiplied(fmt, "half", x, w) for w in weights)
    y = products.run_gated(fmt, "decode_slices", "half", x, weights, 1, "silu")
    want = function("silu", gate) * up
    zero = np.zeros_like(gate)
    assert (np.abs(y - want) <= gated_bound("silu", gate, up, zero, zero)).all()


def test_columns_of_a_point_are_all_of_them():
    assert sorted(COLUMNS) == list(range(8))
