"""The gates of qgemm.gated in float64, and the bound of a gated product's error."""

from __future__ import annotations

import math

import numpy as np
from measured_errors import Expected

SLOPE = 1.13  # the steepest of all gates, at some 1.4
FLOAT32 = 2.0**-23


def function(name, x):
    """The gate in float64."""
    x = np.asarray(x, np.float64)
    if name == "silu":
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))
    if name == "gelu":
        return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
    if name == "swiglu_oai":
        x = np.minimum(x, 7)
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-1.702 * x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gated_up(name, up):
    """The operand that the gate multiplies, in float64."""
    up = np.asarray(up, np.float64)
    return np.clip(up, -7, 7) + 1 if name == "swiglu_oai" else up


def gated_noise(name, gate, up, dtype):
    """The predicted RMS error of a gated product that is rounded to dtype twice, from both Expected products."""
    factor, second = function(name, gate.y), gated_up(name, up.y)
    step = 2.0**-10 * (1 + np.abs(gate.y))
    slope = (function(name, gate.y + step) - function(name, gate.y - step)) / (2 * step)
    product = Expected(factor * second, 0.0, np.hypot(slope * gate.noise * second, factor * up.noise))
    return product.rounded(dtype).rounded(dtype).noise + 2 * FLOAT32 * np.abs(product.y) + 2.0**-26


def gated_product(name, gate, up, dtype="float32"):
    """A gated product of two Expected ones, rounded to dtype."""
    want = function(name, gate.y) * gated_up(name, up.y)
    bound = gated_bound(name, gate.y, up.y, gate.bound, up.bound, dtype)
    return Expected(want, bound, gated_noise(name, gate, up, dtype))


def gated_bound(name, gate, up, gate_bound, up_bound, dtype="float32"):
    """The bound of y's error, from the bounds of both products and the rounding of y to dtype."""
    factor, up = np.abs(function(name, gate)), gated_up(name, up)
    of_factor = SLOPE * gate_bound + 4 * FLOAT32 * np.abs(gate)
    error = of_factor * (np.abs(up) + up_bound) + factor * up_bound
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    return error + (2 * FLOAT32 + unit) * (factor * np.abs(up) + error) + 2.0**-24
