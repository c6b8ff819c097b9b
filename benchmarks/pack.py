"""Speed of packing on the GPU: from blocks in its memory into tiles, beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from qgemm.cli.timing import capture, compare, rotation
from qgemm.codec.format import Format
from qgemm.cuda.kernels.transforms import PACK
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.upload import launch

SHAPE = 8192, 8192  # (N, K)
NOISE = 1 << 20  # random bytes, which are repeated


def rates(stream: Any, formats: Sequence[Format], rotate: int) -> dict[str, dict[str, float]]:
    """For each format `gbs`, bytes read and written a second in 1e9, and `share`, relative to a device copy."""
    return {fmt.name: rate(stream, fmt, rotate) for fmt in formats if fmt.tiled}


def rate(stream: Any, fmt: Format, rotate: int) -> dict[str, float]:
    """GB/s of packing one format, on copies that together exceed `rotate` bytes."""
    import cupy

    n, count = SHAPE[0], fmt.blocks_in(SHAPE[1])
    packed = n * count * fmt.block_bytes
    noise = cupy.asarray(np.frombuffer(np.random.default_rng(0).bytes(NOISE), np.uint8))
    sources = [cupy.resize(noise, packed) for _ in range(max(2, -(-rotate // packed)))]
    shape = -(-n // tiles.ROWS), -(-SHAPE[1] // tiles.columns(fmt)), tiles.tile_dtype(fmt).itemsize
    pairs = [(source, cupy.empty(shape, np.uint8)) for source in sources]
    row_absmax, kernel = cupy.zeros(shape[0] * tiles.ROWS, np.float32), PACK.load(fmt)
    cupy.cuda.Device().synchronize()
    turns = rotation(pairs, 2 * packed)
    packs = [
        partial(launch, kernel, fmt, source.data.ptr, target.data.ptr, (row_absmax.data.ptr,), n, count, stream.ptr)
        for source, target in turns
    ]
    copies = [partial(target.data.copy_from_device_async, source.data, packed, stream) for source, target in turns]
    ours, copy = compare(stream, [capture(stream, packs), capture(stream, copies)])
    return {"gbs": round(2 * packed / ours.us / 1e3, 1), "share": round(copy.us / ours.us, 3)}
