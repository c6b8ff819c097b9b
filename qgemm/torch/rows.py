"""Decode rows of packed weights: a range of them, for a backward, or those of an index, for an embedding."""

from __future__ import annotations

import torch

from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.libraries import library_or_default
from qgemm.cuda.problem import C_TYPES
from qgemm.cuda.tensor import DeviceTensor
from qgemm.tensor import Tensor

HOST = ("float16", "float32", "float64")  # dtypes that NumPy has as well
NUMBERS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
}  # dtypes of plain formats


def decoded(
    packed: Tensor | DeviceTensor, weight: torch.Tensor, start: int, stop: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows start to stop of a weight as `dtype` [stop - start, K] on its device; start is a multiple of 64.

    They are exact in float32, and rounded once from it to a type of 16 bits.
    """
    if isinstance(packed, Tensor):
        return torch.from_numpy(packed[start:stop].dequantize()).to(dtype)
    plain, shape = packed.format.plain, (stop - start, packed.shape[1])
    part = packed.data[start:stop] if plain else packed.data[start // tiles.ROWS : -(-stop // tiles.ROWS)]
    return DeviceTensor(packed.format, shape, library_or_default(weight).wrap(part)).dequantize(dtype)


def selected(
    packed: Tensor | DeviceTensor, weight: torch.Tensor, index: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a weight by an index of any shape, as `dtype` [*index.shape, K] on its device.

    An index out of range raises IndexError; on a GPU it aborts the device, as in torch's own embedding.
    """
    if isinstance(packed, Tensor):
        name = str(dtype).removeprefix("torch.")
        rows = packed.rows(index.numpy(), name if name in HOST else "float32")
        return torch.from_numpy(rows).to(dtype)
    if packed.format.plain:
        numbers = weight.view(NUMBERS[packed.format.name]).view(packed.shape)
        return torch.nn.functional.embedding(index, numbers).to(dtype)
    name = str(dtype).removeprefix("torch.")
    rows = packed.rows(index.detach().long().contiguous(), name if name in C_TYPES else "float32")
    return rows if rows.dtype is dtype else rows.to(dtype)
