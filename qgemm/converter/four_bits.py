"""Matrices of a checkpoint in MXFP4, as gpt-oss has them: W [..., N, K] as two tensors of bytes.

    NAME_blocks  uint8  [..., N, K / 32, 16]  byte j: the code of weight 2 j in the low nibble, of 2 j + 1 in the high
    NAME_scales  uint8  [..., N, K / 32]      e, the power of two 2^(e - 127) that 32 weights share

The codes and scales are those of a .gguf file; the nibbles stand in another order there.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.codec.packing import pack_nibbles
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor

from .arrays import Stored
from .weight import Weight, of_tensor, stored_shape

MXFP4 = FORMATS["mxfp4"]
BLOCKS, SCALES = "_blocks", "_scales"


def matrix(name: str, stored: Mapping[str, Stored]) -> Weight:
    """The matrices whose parts are called `name` and an ending; CheckpointError where these do not fit each other."""
    blocks, scales = stored[name + BLOCKS], stored.get(name + SCALES)
    shape = blocks.entry.shape
    if (
        scales is None
        or {blocks.entry.type, scales.entry.type} != {"U8"}
        or len(shape) < 3
        or shape[-1] != MXFP4.weights // 2
        or scales.entry.shape != shape[:-1]
    ):
        said = "no scales" if scales is None else f"scales {scales.entry.type} {list(scales.entry.shape)}"
        what = f"blocks {blocks.entry.type} {list(shape)} and {said} are no MXFP4"
        raise CheckpointError(f"{shown_path(blocks.file.path)}: tensor {shown(name)}: {what}")
    exponents = scales

    def read(start: int, stop: int) -> Blocks:
        size = MXFP4.weights // 2
        pairs = blocks.file.read(blocks.entry, start * size, stop * size).reshape(-1, size)
        made = np.empty(len(pairs), MXFP4.dtype)
        made["e"] = exponents.file.read(exponents.entry, start, stop)
        made["qs"] = pack_nibbles(np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), MXFP4.weights))
        return made

    weights = stored_shape((*shape[:-2], shape[-2] * MXFP4.weights))
    count = prod(shape[:-1])
    return of_tensor(Tensor(MXFP4, weights, lambda: read(0, count).reshape(*weights[:-1], -1), name, read))
