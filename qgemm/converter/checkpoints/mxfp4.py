"""Matrices of a checkpoint in MXFP4, as gpt-oss stores them: W [..., N, K] as two tensors of bytes.

    NAME_blocks  uint8  [..., N, K / 32, 16]  byte j: the code of weight 2 j in the low nibble, of 2 j + 1 in the high
    NAME_scales  uint8  [..., N, K / 32]      e, the power of two 2^(e - 127) that 32 weights share

Codes and scales are those of a .gguf file, which orders the nibbles differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Bytes, Floats, pack_nibbles, unpack_nibbles
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor

from ..array_weights import Stored
from ..weight import Weight, stored_shape, weight_from_tensor
from .methods import FourBits

MXFP4 = FORMATS["mxfp4"]
BYTES = MXFP4.weights // 2  # bytes of codes per block
MINUS_ZERO = 8  # code of a zero that is negative in the libraries of checkpoints, not in ggml's blocks
NAN = 255  # scale that is NaN by the standard; ggml reads a number
BLOCKS, SCALES = "_blocks", "_scales"


def matrices(path: str, stored: Mapping[str, Stored], method: FourBits) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a checkpoint, by the name of their first part, and the names of all parts."""
    names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
    weights = {name + BLOCKS: matrix(name, stored) for name in names}
    return weights, {name + end for name in names for end in (BLOCKS, SCALES)}


def matrix(name: str, stored: Mapping[str, Stored]) -> Weight:
    """The matrices whose parts are `name` plus a suffix; CheckpointError where the parts contradict each other."""
    blocks, scales = stored[name + BLOCKS], stored.get(name + SCALES)
    shape = blocks.entry.shape
    if (
        scales is None
        or {blocks.entry.type, scales.entry.type} != {"U8"}
        or len(shape) < 3
        or shape[-1] != BYTES
        or scales.entry.shape != shape[:-1]
    ):
        scale_text = "no scales" if scales is None else f"scales {scales.entry.type} {list(scales.entry.shape)}"
        rule = f"blocks {blocks.entry.type} {list(shape)} and {scale_text} are no MXFP4"
        raise CheckpointError(f"{shown_path(blocks.file.path)}: tensor {shown(name)}: {rule}")
    exponents = scales

    def read(start: int, stop: int) -> Blocks:
        pairs = blocks.file.read(blocks.entry, start * BYTES, stop * BYTES).reshape(-1, BYTES)
        return blocks_of(pairs, exponents.file.read(exponents.entry, start, stop))

    weights = stored_shape((*shape[:-2], shape[-2] * MXFP4.weights))
    return weight_of_blocks(name, weights, read, f"{shown_path(blocks.file.path)}: tensor {shown(name)}")


def weight_of_blocks(name: str, shape: tuple[int, ...], read: Callable[[int, int], Blocks], prefix: str) -> Weight:
    """A Weight of MXFP4 blocks that a function reads; `prefix` is the prefix of errors."""

    def checked(start: int, stop: int) -> Blocks:
        blocks = read(start, stop)
        if (blocks["e"] == NAN).any():
            raise CheckpointError(f"{prefix}: a scale is {NAN}, which is no number")
        return blocks

    def whole() -> Blocks:
        return checked(0, prod(shape) // MXFP4.weights).reshape(*shape[:-1], -1)

    def values(start: int, stop: int) -> Floats:
        blocks = checked(start // MXFP4.weights, stop // MXFP4.weights)
        numbers = np.array(MXFP4.decode(blocks)).reshape(-1)
        numbers[unpack_nibbles(blocks["qs"]).reshape(-1) == MINUS_ZERO] = -0.0
        return numbers

    tensor = Tensor(MXFP4, shape, whole, name, checked)
    return replace(weight_from_tensor(tensor), values=values)


def blocks_of(pairs: Bytes, exponents: Bytes) -> Blocks:
    """Bytes of two codes, the first in the low nibble, [n, 16], and exponents [n] -> blocks [n]."""
    blocks = np.empty(len(pairs), MXFP4.dtype)
    blocks["e"] = exponents
    blocks["qs"] = pack_nibbles(np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), MXFP4.weights))
    return blocks
