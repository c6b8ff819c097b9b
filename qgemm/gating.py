"""Gates: functions of two products, as in SwiGLU and GEGLU; in float32, by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .errors import UnsupportedError

Gate = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
Array = Any

SLOPE, LIMIT = 1.702, 7.0  # the constants of gpt-oss, in its reference implementation and in ggml's swiglu_oai

# erf(x) = 1 - t (C0 + C1 t + ...) exp(-x^2) for x >= 0, t = 1 / (1 + P x), to 1.5e-7: Abramowitz and Stegun, 7.1.26.
P, C = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    z = np.abs(x) * np.float32(np.sqrt(0.5))
    t, sum_ = 1 / (1 + np.float32(P) * z), np.zeros_like(z)
    for c in reversed(C):
        sum_ = (sum_ + np.float32(c)) * t
    erf = np.copysign(1 - sum_ * np.exp(-z * z), x)
    return x * (1 + erf) / 2


def _gelu_tanh(x: Array) -> Array:
    """x / 2 * (1 + tanh(z)), which is x / (1 + exp(-2 z))."""
    z = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return x / (1 + np.exp(-2 * z))


def _times_up(function: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda gate, up: function(gate) * up


def _swiglu_oai(gate: Array, up: Array) -> Array:
    """As in gpt-oss: both are clamped, and 1 is added to up."""
    gate, slope, limit = np.minimum(gate, np.float32(LIMIT)), np.float32(SLOPE), np.float32(LIMIT)
    return gate / (1 + np.exp(-slope * gate)) * (np.clip(up, -limit, limit) + 1)


GATES: dict[str, Callable[[Array, Array], Array]] = {
    "silu": _times_up(_silu), "gelu": _times_up(_gelu), "gelu_tanh": _times_up(_gelu_tanh), "swiglu_oai": _swiglu_oai,
}  # fmt: skip


def check_gate(name: str) -> str:
    """The name; UnsupportedError unless it is one of GATES."""
    if not isinstance(name, str) or name not in GATES:
        raise UnsupportedError(f"function is {', '.join(map(repr, GATES))}, got {name!r}")
    return name


def gated_by(name: str, gate: Array, up: Array) -> Array:
    """y of gate and up, arrays of NumPy."""
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        return GATES[name](gate, up)
