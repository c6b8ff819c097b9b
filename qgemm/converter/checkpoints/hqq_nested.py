"""Scales and zeros of HQQ that are quantized themselves, in qmodel.pt of older versions: quant_zero and quant_scale.

    MODULE.zero_q                     uint8  codes in eight bits, as [G, C] for axis 0, [C, G] for axis 1
    MODULE.meta_zero.scale, .zero     float  C numbers, of columns (axis 0) or rows (axis 1) of the codes; C may be 1
    MODULE.meta_zero.shape, .axis, .packing, .nbits, .compute_dtype   settings

zero = (code - zero of zeros) * scale of zeros, both steps rounded to compute_dtype, float16 or float32; so for scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.files.pickled import Call, Global
from qgemm.files.safetensors import Entry
from qgemm.files.torch_archive import SIZE

from ..array_weights import Stored
from .matrix import FLOATS, floats_of

DTYPES = {"torch.float16": "F16", "torch.float32": "F32"}


class _Decoded(NamedTuple):
    """A quantized tensor that is decoded as it is read, with the interface of a file."""

    path: str
    codes: Stored
    scale: NDArray[Any]
    zero: NDArray[Any]
    axis: int

    def read(self, entry: Entry, start: int, stop: int) -> NDArray[Any]:
        """Elements start to stop."""
        codes = self.codes.file.read(self.codes.entry, start, stop).astype(entry.dtype)
        position, count = np.arange(start, stop), len(self.scale)
        group = position % count if self.axis == 0 else position // (prod(self.codes.entry.shape) // count)
        with np.errstate(all="ignore"):  # the file may hold any bits
            numbers: NDArray[Any] = (codes - self.zero[group]) * self.scale[group]
        return numbers


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
    across = len(rows) == 2 and axis in (0, 1) and count == rows[1 - axis]
    fits = type(shape) is tuple and all(type(n) is int for n in shape) and prod(shape) == prod(rows)
    if codes.entry.type != "U8" or not fits or not (across or count == 1) or prod(zero.entry.shape) != count:
        raise refuse(f"{part}_q {list(rows)} does not fit {count} scales along axis {shown(str(axis))}")
    if scale.entry.type not in FLOATS or zero.entry.type not in FLOATS:
        raise refuse(f"meta_{part} has scales of {scale.entry.type} and zeros of {zero.entry.type}")
    entry = Entry(kind, shape, 0)
    numbers = (floats_of(p, p.file.read(p.entry, 0, count)).astype(entry.dtype) for p in (scale, zero))
    return Stored(_Decoded(path, codes, *numbers, axis if across else 0), entry)
