"""Scales and zeros of HQQ that are quantized themselves, in qmodel.pt of older versions: quant_zero and quant_scale.

    MODULE.zero_q                     uint8  codes in eight bits, as [G, C] for axis 0, [C, G] for axis 1
    MODULE.meta_zero.scale, .zero     float  C numbers, of columns (axis 0) or rows (axis 1) of the codes; C may be 1
    MODULE.meta_zero.shape, .axis, .packing, .nbits, .compute_dtype   settings

zero = (code - zero of zeros) * scale of zeros, both steps rounded to compute_dtype, float16 or float32; so for scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.files.pickled import Call, Global
from qgemm.files.safetensors import Entry
from qgemm.files.torch_archive import SIZE

from ..array_weights import Computed, Stored
from .matrix import FLOATS, floats_of

DTYPES = {"torch.float16": "F16", "torch.float32": "F32"}


def decoded(path: str, module: str, part: str, stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Stored:
    """A module's "zero" or "scale" from its codes; CheckpointError if they do not fit their settings."""
    meta = f"{module}.meta_{part}"

    def refuse(rule: str) -> CheckpointError:
        return CheckpointError(f"{shown_path(path)}: hqq tensor {shown(module)}: quant_{part}: {rule}")

    parts = [stored.get(name) for name in (f"{module}.{part}_q", f"{meta}.scale", f"{meta}.zero")]
    dtype = settings.get(f"{meta}.compute_dtype", Global("torch.float16"))
    kind = DTYPES.get(dtype.name) if type(dtype) is Global else None
    if kind is None:
        raise refuse(f"compute_dtype is none of {', '.join(DTYPES)}")
    packing, axis = settings.get(f"{meta}.packing"), settings.get(f"{meta}.axis", 0)
    shape = settings.get(f"{meta}.shape")
    shape = shape.arguments[0] if type(shape) is Call and shape.function == SIZE and shape.arguments else shape
    codes, scale, zero = parts
    if codes is None or scale is None or zero is None or packing != "8bit_u8" or settings.get(f"{meta}.view_as_float"):
        raise refuse(f"{part}_q and meta_{part} are no codes of eight bits with a scale and a zero")
    rows, count = codes.entry.shape, prod(scale.entry.shape)
    axis = 0 if count == 1 else axis  # one scale for all
    across = len(rows) == 2 and axis in (0, 1) and count == rows[1 - axis]
    shape = shape if type(shape) is tuple and all(type(n) is int for n in shape) else ()
    if (
        codes.entry.type != "U8"
        or prod(shape) != prod(rows)
        or not (across or count == 1)
        or prod(zero.entry.shape) != count
    ):
        raise refuse(f"{part}_q {list(rows)} does not fit {count} scales along axis {axis if type(axis) is int else 0}")
    if scale.entry.type not in FLOATS or zero.entry.type not in FLOATS:
        raise refuse(f"meta_{part} has scales of {scale.entry.type} and zeros of {zero.entry.type}")
    entry = Entry(kind, tuple(shape), 0)
    scales, zeros = (floats_of(p, p.file.read(p.entry, 0, count)).astype(entry.dtype) for p in (scale, zero))

    def compute(start: int, stop: int) -> NDArray[Any]:
        position = np.arange(start, stop)
        group = position % count if axis == 0 else position // (prod(rows) // count)
        numbers = codes.file.read(codes.entry, start, stop).astype(entry.dtype)
        with np.errstate(all="ignore"):  # the file may hold any bits
            weights: NDArray[Any] = (numbers - zeros[group]) * scales[group]
        return weights

    return Stored(Computed(path, compute), entry)
