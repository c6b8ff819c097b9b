"""ggml types that the gguf package decodes and this library does not yet: on the CPU, with `a16` alone.

Some have an encoder here. A module of this folder that defines a format of the same name takes its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats

from . import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs

PACKAGE = "gguf"
# Modules with the DTYPE and `encode` of a type, which of some takes an importance as well.
ENCODED: dict[str, Any] = {
    "iq1_m": iq1_m, "iq1_s": iq1_s, "iq2_s": iq2_s, "iq2_xs": iq2_xs, "iq2_xxs": iq2_xxs, "iq3_s": iq3_s,
    "iq3_xxs": iq3_xxs,
}  # fmt: skip
NEED_IMPORTANCE = ("iq1_s", "iq2_xs", "iq2_xxs")  # have no other encoder
SLICE = 1 << 16  # weights decoded at a time: the package takes up to 19 bytes a weight


def formats() -> dict[str, Format]:
    """A format for each codec of the package, by name: there a codec is a class named like its type."""
    return {kind.name.lower(): _format(kind) for kind in GGML_QUANT_SIZES if hasattr(quants, kind.name)}


def _format(kind: GGMLQuantizationType) -> Format:
    weights, size = GGML_QUANT_SIZES[kind]

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> their weights [n, 1, weights] float32, as they are."""
        rows = np.ascontiguousarray(blocks).view(np.uint8).reshape(len(blocks), size)
        values: Floats = np.empty((len(blocks), 1, weights), np.float32)
        step = max(1, SLICE // weights)
        with np.errstate(all="ignore"):  # scales may be any bit pattern
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                values[start : start + step, 0] = quants.dequantize(part.reshape(-1), kind).reshape(len(part), weights)
        return Levels(values)

    name = kind.name.lower()
    by = ENCODED.get(name)
    dtype, encode = (np.dtype([("bytes", "u1", size)]), None) if by is None else (by.DTYPE, by.encode)
    return Format(
        name, weights, dtype, encode, levels, ggml_type=int(kind), weighted=encode,
        needs_importance=name in NEED_IMPORTANCE,
        scattered_scale=iq1_m.scale if name == "iq1_m" else None, decoded_by=PACKAGE,
    )  # fmt: skip
