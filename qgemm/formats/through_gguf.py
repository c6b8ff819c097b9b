"""ggml types that the gguf package decodes and this library does not: on the CPU, with `a16` alone.

A module of this folder that defines a format of the same name takes its place: of the types that the package has today
that is all of them, but not of those that a newer one may bring.
"""

from __future__ import annotations

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats

PACKAGE = "gguf"
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

    name, dtype = kind.name.lower(), np.dtype([("bytes", "u1", size)])
    return Format(name, weights, dtype, levels=levels, ggml_type=int(kind), decoded_by=PACKAGE)
