"""For tests of eight-bit kernels: the codes that one makes of W, and operands whose products are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from helpers import normal

import qgemm
from qgemm.codec.eight_bits import COLUMNS, EightBits, eight_bits
from qgemm.codec.format import float_dtype

# Units that a code is off beside half a unit: with minimums what 11 bits lose of ratios times codes, of offsets and of
# their sums; without, of the ratio, a multiple of 1 / zero, half of one times a level that is at most the zero.
ROUNDINGS = {True: (256 + 256 + 128) * 2.0**-11, False: 0.5 + 2.0**-10}


def prepared(x: np.ndarray, kind: qgemm.arguments.Activation) -> np.ndarray:
    """Blocks of activations in eight bits."""
    return qgemm.quantize_activations(x, kind).blocks


def codes_of(w: qgemm.Tensor, y: np.ndarray) -> EightBits:
    """y [K, N]: the kernel's product of the identity [K, K], whose columns are 127 times a code each, and W.

    AssertionError unless codes are whole, at most 127, and within half a unit and ROUNDINGS of the weights.
    """
    k = w.shape[1]
    expected = eight_bits(w.format, w.blocks, k)
    scale = expected.scale.repeat(COLUMNS, axis=1)[:, :k].astype(np.float64)
    quotients = np.divide(y.T.astype(np.float64), scale, out=np.zeros(w.shape), where=scale > 0)
    codes = np.rint(quotients)
    np.testing.assert_allclose(quotients, codes, atol=1e-3)
    minimum = w.format.decode_levels(w.blocks.reshape(-1)).zeros_as_minimums().minimum
    assert (np.abs(codes * scale - w.dequantize(np.float64)) <= (0.5 + ROUNDINGS[minimum is not None]) * scale).all()
    assert np.abs(codes).max() <= 127
    return EightBits(codes.astype(np.int8), expected.scale)


def of_units(m: int, n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, qgemm.Tensor]:
    """x [m, k] and W [n, k] in q4_0 whose scales are 1: codes and sums are integers, the ends of int8 among them."""
    blocks = qgemm.quantize(np.ones((n, k), np.float32), "q4_0").blocks.copy()
    blocks["d"], blocks["qs"] = 127 / 8, rng.integers(0, 256, blocks["qs"].shape)
    blocks["qs"][:, ::4, 0] &= 0xF0  # a code 0, the weight -127, in each 128 columns
    blocks["qs"][0] = 0
    x = rng.integers(-127, 128, (m, k)).astype(np.float32)
    x[:, ::64], x[0], x[1] = 127, 127, -127
    return x, qgemm.Tensor("q4_0", (n, k), blocks)


def check_ends_of_int8(run: Callable, kind: str, config: int, shape: tuple[int, int, int], splits: Iterable) -> None:
    """Products of [m, n, k] whose codes reach the ends of int8 are those of the CPU, bit for bit.

    run: `harness.products.run_eight_bits` or a partial of it. splits: (CTAs along K, threads in reverse order).
    """
    x, w = of_units(*shape, np.random.default_rng(5))
    want = qgemm.matmul(x, w, kind)
    assert want[0, 0] == -want[1, 0] == -shape[2] * 127**2
    blocks = qgemm.quantize_activations(x, kind).blocks
    for split_k, backwards in splits:
        np.testing.assert_array_equal(run(w, blocks, kind, config, split_k, backwards=backwards), want)


def check_epilogue(run: Callable, kind: str, config: int, out: str, bias: str | None, residual: str | None) -> None:
    """y = sum + bias + residual of these types, rounded once."""
    x, w = of_units(3, 70, 256, np.random.default_rng(6))
    x = np.sign(x) * (np.arange(256) % 128 == 0) * 127  # few terms: sums that float16 holds to a unit
    biases = None if bias is None else normal(70, seed=7).astype(float_dtype(bias))
    residuals = None if residual is None else normal(3, 70, seed=8).astype(float_dtype(residual))
    y = run(w, qgemm.quantize_activations(x, kind).blocks, kind, config, 1, out, biases, residuals)
    want = qgemm.matmul(x, w, kind)
    for added in (biases, residuals):
        want = want if added is None else want + added.astype(np.float32)
    np.testing.assert_array_equal(y, want.astype(float_dtype(out)))
