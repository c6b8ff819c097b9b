"""FP8 tensors of a checkpoint, and their scales. See reference.py."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .reference import Tensor, need

BLOCK = (128, 128)
SCALES = ("_scale", "_scale_inv", "_scales", ".scale", ".scale_weight")
INPUTS = (".input_scale", ".scale_input")


def number(code: int, kind: str) -> float:
    """The value of a code."""
    exponent_bits, bias = (4, 7) if kind == "F8_E4M3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    if kind == "F8_E4M3" and code & 127 == 127:
        return float("nan")
    if kind == "F8_E5M2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias)


def floats(tensor: Tensor) -> Any:
    """A tensor of floats, in float32."""
    kind, shape, data = tensor
    if kind == "F8_E8M0":
        need(255 not in data, "a scale that is no number")
        return np.array([2.0 ** (e - 127) for e in data], np.float32).reshape(shape)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[kind]).astype(np.float32).reshape(shape)


def matrix(name: str, tensors: dict[str, Tensor], block: tuple[int, int] | None) -> tuple[set[str], Any]:
    """The names that belong to a tensor, and its values or None without a scale. block: from the config."""
    kind, shape, data = tensors[name]
    shape, stem = shape or (1,), name.removesuffix(".weight")
    scales = {prefix + end for prefix in (name, stem) for end in SCALES} & tensors.keys()
    need(len(scales) <= 1, "scales twice")
    if not scales:
        need(block is None or len(shape) < 2, "no scale")
        return {name}, None
    [scale] = scales
    need(tensors[scale][0] in ("F32", "F16", "BF16", "F8_E8M0"), "type of the scale")
    with np.errstate(all="ignore"):
        values = np.array([number(code, kind) for code in data], np.float32).reshape((1,) * (len(shape) < 2) + shape)
        values = values * spread(floats(tensors[scale]), values.shape, block or BLOCK)
    return {name, scale, *(stem + end for end in INPUTS)}, values


def spread(scale: Any, shape: tuple[int, ...], block: tuple[int, int]) -> Any:
    """The scale of each weight."""
    *lead, n, k = shape
    if prod(scale.shape) == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    need(0 not in shape, "a scale of nothing")
    whole = [(*lead, n, 1), (*lead, 1, k), (*lead, 1, 1)]
    blocks = *lead, -(-n // block[0]), -(-k // block[1])
    if scale.shape == (*lead, n):
        scale = scale[..., None]
    elif scale.shape not in whole:
        need(scale.shape == blocks, "scales of another shape")
        scale = scale.repeat(block[0], -2)[..., :n, :].repeat(block[1], -1)[..., :k]
    return np.broadcast_to(scale, shape)
