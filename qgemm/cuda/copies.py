"""Copies of weights on a GPU with their rows in another order, so that a timed loop reads memory and no cache."""

from __future__ import annotations

from typing import Any

from .layout.tile import ROWS
from .tensor import DeviceTensor
from .upload import empty_tiles, split


def repeated_rows(base: DeviceTensor, shape: tuple[int, int], shift: int) -> DeviceTensor:
    """A matrix [N, K] of this shape that repeats the rows of `base`, starting from row_block `shift`."""
    if base.row_absmax is None:
        return DeviceTensor(base.format, shape, repeated(base.data, shape[0] // len(base.data), shift))
    fmt, (n, k), library = base.format, shape, base.library
    memory = empty_tiles(fmt, n, fmt.blocks_in(k), library, base.device)
    data, row_absmax = split(fmt, memory, n, k, library)
    times = -(-len(data) // len(base.data))
    data[...] = repeated(base.data, times, shift)[: len(data)]
    row_absmax[...] = repeated(base.row_absmax.reshape(-1, ROWS), times, shift)[: len(data)].reshape(-1)
    return DeviceTensor(base.format, shape, data, row_absmax)


def repeated(base: Any, times: int, shift: int) -> Any:
    """An array `times` as long along its first axis: the entries of `base` in turn, starting from entry `shift`."""
    import cupy

    return cupy.take(base, (cupy.arange(times * len(base)) + shift) % len(base), axis=0)
