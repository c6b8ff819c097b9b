"""How far a decoded kbit weight lies from its own: bounds, default codebooks, signal to noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import CODEBOOKS, codebooks, over_formats, seeds

import qgemm

BITS = (2, 3, 4, 5)
every_bits = pytest.mark.parametrize("bits", BITS)


def with_codebook(fmt, codebook):
    return fmt.variant(codebook, None)


SQNR = {2: 5, 3: 10, 4: 15, 5: 20}  # dB of normal weights, at least


U = 2.0**-24  # the relative error of one float32 operation


# ---------------------------------------------------------------- errors of decoded weights


def stored_absmax(fmt, packed) -> np.ndarray:
    """The absmax of blocks [n] that decoding multiplies by, float64."""
    return fmt.decode_levels(packed).scale[:, 0].astype(np.float64)


def reach(codebook) -> float:
    """How far the nearest level can be from a number in -1..1."""
    levels = np.unique(codebook.astype(np.float64))
    inside = np.clip((levels[1:] + levels[:-1]) / 2, -1, 1)
    ends = np.concatenate([[-1, 1], inside])
    return float(np.abs(ends[:, None] - levels).min(axis=1).max())


@st.composite
def adversarial(draw, fmt) -> np.ndarray:
    """Values [n, 32]: normal, heavy-tailed, or where rounding is worst: between levels, absmax between two numbers."""
    rng, n = draw(seeds()), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(("normal", "heavy", "between", "worst absmax", "outlier", "tiny")))
    if kind == "normal":
        x = rng.standard_normal((n, 32)) * 2.0 ** rng.integers(-12, 2, (n, 1))
    elif kind == "heavy":
        x = rng.standard_t(2, (n, 32)) * 0.1
    elif kind == "tiny":
        x = rng.standard_normal((n, 32)) * 2.0 ** rng.integers(-60, -12, (n, 1))
    else:
        levels = np.sort(fmt.codebook.astype(np.float64))
        x = rng.choice(np.concatenate([(levels[1:] + levels[:-1]) / 2, levels]), (n, 32))
        x[:, rng.integers(32)] = 1
        x *= rng.choice([-1, 1]) * 2.0 ** rng.integers(-15, 4, (n, 1))
        if kind == "worst absmax":
            x *= 1 + (2 * rng.integers(0, 16, (n, 1)) + 1) / 32
        elif kind == "outlier":
            x[:, 1:] *= 2.0**-10
    return np.clip(x, -31, 31).astype(np.float32)


@over_formats(CODEBOOKS)
@settings(max_examples=100)
@given(data=st.data())
def test_error_within_its_bound(fmt, data):
    """w = s * level for x = a * v, with v rounded once in float32, and w once:

    |w - x| <= a * |level - v| + |s - a| * |level|, and s is a rounded to 5 or 11 bits.
    """
    if data.draw(st.booleans()):
        fmt = with_codebook(fmt, np.clip(data.draw(codebooks(fmt)), -4, 4))
    x = data.draw(adversarial(fmt))
    packed = fmt.encode(x)
    a, s = np.abs(x).max(axis=1).astype(np.float64), stored_absmax(fmt, packed)
    relative, least = (2.0**-11, 2.0**-25) if fmt.scale_fields else (2.0**-5, 2.0**-15)
    assert (np.abs(s - a) <= np.maximum(relative * a, least)).all()
    largest = float(np.abs(fmt.codebook).max())
    bound = a * (reach(fmt.codebook) + U) + np.abs(s - a) * largest + U * s * largest + 2.0**-149
    bound = np.where(s == 0, a, bound)  # rounded to zero, where v may be x / 1e-8
    error = np.abs(fmt.decode(packed).astype(np.float64) - x)
    assert (error <= bound[:, None]).all()


@over_formats(CODEBOOKS)
@settings(max_examples=100)
@given(data=st.data())
def test_error_with_the_default_codebook(fmt, data):
    """(largest gap / 2 + 1/16) * absmax + 1e-6; below 2^-11 E4M4 is too coarse for it, see the bound above."""
    x = data.draw(adversarial(fmt))
    a = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    if not fmt.scale_fields:
        x, a = (part[a[:, 0] >= 2.0**-11] for part in (x, a))
        assume(len(x))
    gap = float(np.diff(fmt.codebook.astype(np.float64)).max())
    assert (np.abs(fmt.decode(fmt.encode(x)) - x) <= (gap / 2 + 1 / 16) * a + 1e-6).all()


def sqnr(x, w) -> float:
    """Signal to quantization noise in dB."""
    return 10 * float(np.log10(np.mean(x.astype(np.float64) ** 2) / np.mean((w.dequantize(np.float64) - x) ** 2)))


@every_bits
@given(rng=seeds(), exponent=st.integers(-9, 1), heavy=st.booleans())
def test_signal_to_noise(bits, rng, exponent, heavy):
    """Signal to noise is at least that of the table for normal weights; E4M4 costs less than 1.5 dB."""
    x = rng.standard_t(3, (64, 256)) if heavy else rng.standard_normal((64, 256))
    x = np.clip(x * 2.0**exponent, -31, 31).astype(np.float32)
    small, half = (sqnr(x, qgemm.quantize(x, f"kbit{bits}", absmax=kind)) for kind in ("e4m4", "float16"))
    assert half - small < 1.5
    if not heavy:
        assert min(small, half) > SQNR[bits]
