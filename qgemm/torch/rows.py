"""Rows of packed weights as floats: a span of them, for a backward, or those of an index, for an embedding.

On a GPU a row lies in tiles of 64 rows (qgemm/cuda/layout/tile.py), of which four lanes own rows g and g + 8 of a warp,
a pair. The words of pairs are gathered into tiles of their own, 32 rows of the index in each, and decoded there: twice
what is asked for is decoded, in place of 64 times. Nothing waits for the GPU, so that CUDA graphs can capture it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qgemm.arrays import stream_of
from qgemm.codec.format import Format
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.tensor import DeviceTensor
from qgemm.tensor import Tensor

from .storage import torch_memory

PAIRS = tiles.ROWS // 2  # of rows in a tile; pair 8 * warp + g
DENSE = 1 << 25  # weights of gathered tiles that are decoded at a time: 64 MiB of float16
NUMBERS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}  # of plain formats that are decoded


def decoded(packed: Any, weight: Any, start: int, stop: int) -> Any:
    """Rows start to stop of a weight as float32 [stop - start, K] on its device; start is a multiple of 64."""
    if isinstance(packed, Tensor):
        return torch.from_numpy(packed[start:stop].dequantize())
    plain = packed.format.plain
    part = packed.data[start:stop] if plain else packed.data[start // tiles.ROWS : -(-stop // tiles.ROWS)]
    return _dense(packed.format, (stop - start, packed.shape[1]), part, "float32", weight)


def selected(packed: Any, weight: Any, index: Any, dtype: Any) -> Any:
    """Rows of a weight by an index of any shape, as `dtype` [*index.shape, K] on its device.

    IndexError for an index that is no row; on a GPU it stops the device, as in torch's own embedding.
    """
    n, k = packed.shape
    flat = index.reshape(-1)
    if isinstance(packed, Tensor):
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < n:
            raise IndexError(f"indices are {int(flat.min())} to {int(flat.max())}, {packed!r} has rows 0 to {n - 1}")
        rows = torch.from_numpy(packed[flat.numpy()].dequantize()).to(dtype)
    elif packed.format.plain:
        rows = torch.nn.functional.embedding(flat, weight.view(NUMBERS[packed.format.name]).view(n, k)).to(dtype)
    else:
        torch._assert_async(((flat >= 0) & (flat < n)).all())
        rows = torch.empty((flat.numel(), k), dtype=dtype, device=weight.device)
        step = max(1, DENSE // max(1, tiles.ROWS * k)) * PAIRS
        for start in range(0, flat.numel(), step):
            some = flat[start : start + step]
            words, at = gathered(packed.format, (n, k), weight, some)
            dense = _dense(packed.format, (len(words) * tiles.ROWS, k), words, "float32", weight)
            rows[start : start + step] = dense[at]
    return rows.reshape(*index.shape, k)


def gathered(fmt: Format, shape: tuple[int, int], weight: Any, index: Any) -> tuple[Any, Any]:
    """Tiles of an index's rows alone -> (bytes [row_blocks, tiles along K, bytes of a tile], the row there of each).

    weight: bytes of the tiles of a matrix [N, K].
    """
    size = tiles.tiles_shape(fmt, *shape)
    order = _pair_words(fmt, weight.device)
    count = -(-len(index) // PAIRS) * PAIRS
    padded = torch.nn.functional.pad(index.long(), (0, count - len(index)))
    row_block, row = padded // tiles.ROWS, padded % tiles.ROWS
    pair, upper = row // 16 * 8 + row % 8, row % 16 // 8
    along = torch.arange(size[1], device=weight.device)
    tile = (row_block[:, None] * size[1] + along)[..., None] * (size[2] // 4)
    words = weight[: prod(size)].view(torch.int32)[tile + order[pair][:, None]]  # [row, tile along K, word of the pair]
    of_tiles = words.view(-1, PAIRS, *words.shape[1:]).transpose(1, 2).flatten(2)
    made = torch.empty_like(of_tiles)
    made[..., order.flatten()] = of_tiles
    at = torch.arange(len(index), device=weight.device)
    slot = at % PAIRS
    return made.view(torch.uint8), at // PAIRS * tiles.ROWS + slot // 8 * 16 + upper[: len(index)] * 8 + slot % 8


@lru_cache(64)
def _pair_words(fmt: Format, device: Any) -> Any:
    """`pair_words` on a device, where it is kept: a CUDA graph that is being captured takes no copy from the host.

    Like tiles it lies in CuPy's memory, which belongs to no graph.
    """
    if device.type == "cpu":
        return torch.from_numpy(pair_words(fmt))
    import cupy

    with cupy.cuda.Device(device.index):
        return torch.from_dlpack(cupy.asarray(pair_words(fmt)))


def pair_words(fmt: Format) -> NDArray[np.int64]:
    """Which words of 4 bytes of a tile hold each pair of rows, [pairs, words]: all of them once."""
    tile: Any = tiles.tile_dtype(fmt)
    found = []
    for name in tile.names:
        field, offset = tile.fields[name][:2]
        if name != "k_blocks":  # [warp][g][...]
            found.append(offset // 4 + np.arange(field.itemsize // 4).reshape(PAIRS, -1))
            continue
        k_block = field.base
        for k_block_offset in range(offset, offset + field.itemsize, k_block.itemsize):
            for codes, at in (k_block.fields[each][:2] for each in k_block.names):  # [warp][...][lane = 4 g + t][chunk]
                words = np.arange(codes.itemsize // 4).reshape(tiles.WARPS, codes.shape[1], 8, -1)
                found.append((k_block_offset + at) // 4 + words.swapaxes(1, 2).reshape(PAIRS, -1))
    return np.concatenate(found, axis=1).astype(np.int64)


def _dense(fmt: Format, shape: tuple[int, int], data: Any, dtype: str, like: Any) -> Any:
    """The weights [rows, K] of tiles, or of numbers, that are in memory of CuPy or torch, on torch's stream."""
    import cupy

    with stream_of(like), torch_memory(like.device):
        array = data if isinstance(data, cupy.ndarray) else cupy.from_dlpack(data)
        return torch.from_dlpack(DeviceTensor(fmt, shape, array).dequantize(dtype))
