"""Speed of quantizing to kbit planes and decoding them on the GPU, beside only reading the same number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from qgemm.cli.timing import Call, capture, compare, rotation
from qgemm.codec.format import Format, float_dtype
from qgemm.cuda import planes
from qgemm.cuda.problem import C_TYPES

from . import baselines
from .results import Row

SHAPE = 8192, 8192  # (N, K)
NOISE = 1 << 20  # random values, which are repeated


def rows(stream: Any, formats: Sequence[Format], rotate: int) -> Iterator[Row]:
    """For each kbit format, kernel and type of the values: us, gbs, share.

    gbs: bytes read and written a second in 1e9. share: speed relative to only reading the same number of bytes.
    """
    import cupy

    noise = cupy.asarray(np.random.default_rng(0).standard_normal(NOISE, np.float32))
    for fmt in formats:
        if not fmt.tile.bit_planes:
            continue
        for name in C_TYPES:
            values = cupy.resize(noise.astype(float_dtype(name)), SHAPE)
            parts = planes.quantize(values, fmt)
            size = values.nbytes + parts.nbytes
            count = max(2, -(-rotate // size))
            copies = [(values.copy(), parts.absmax.copy(), parts.planes.copy()) for _ in range(count)]
            refused = cupy.zeros(1, np.uint64)
            cupy.cuda.Device().synchronize()
            turns = rotation(copies, size)
            kernels: dict[str, list[Call]] = {
                "quantize_codebook": [partial(planes.launch_quantize, fmt, x, d, q, refused) for x, d, q in turns],
                "dequantize_codebook": [partial(planes.launch_dequantize, fmt, x, d, q) for x, d, q in turns],
            }
            loops = [capture(stream, calls) for calls in kernels.values()]
            read = baselines.read(stream, [cupy.zeros(size, np.uint8) for _ in copies])
            *medians, least = compare(stream, [*loops, read])
            for kernel, time in zip(kernels, medians, strict=True):
                rate, share = round(size / time.us / 1e3, 1), round(least.us / time.us, 3)
                yield {"format": fmt.name, "kernel": kernel, "dtype": name, "us": time.us, "gbs": rate, "share": share}
