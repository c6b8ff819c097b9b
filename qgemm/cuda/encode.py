"""Values on a GPU into the blocks of a format there, byte for byte as the CPU encodes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qgemm.arrays import as_cupy, stream_of
from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError

from . import upload
from .kernels.transforms import BLOCKS_PER_WARP, ENCODE, ENCODE_THREADS, FOUND, encodes
from .problem import C_TYPES, c_type, gpu
from .tensor import DeviceTensor

CTAS = 8  # of an SM, which take turns of blocks until none is left


def quantize(x: Any, fmt: Format) -> DeviceTensor:
    """`qgemm.quantize` for x [N, K] on a CUDA device: packed there from the blocks that the CPU makes, and refuses."""
    import cupy

    check(fmt)
    with stream_of(x):
        given = as_cupy(x)
        if given.ndim != 2:
            raise UnsupportedError(f"only a matrix (N, K) is packed into tiles, got an array of shape {given.shape}")
        values = given if given.dtype.name in C_TYPES else given.astype(np.float32)
        count = fmt.blocks_in(given.shape[1])
        blocks, found = encode(cupy.ascontiguousarray(values), c_type(values.dtype), fmt)
        refused = found.get().view(FOUND)["refused"].min(initial=len(given) * count)
        fmt.check_first(given, int(refused), cupy.asnumpy)
        return DeviceTensor(fmt, given.shape, *upload.pack(fmt, blocks, len(given), count))


def encode(values: Any, kind: str, fmt: Format) -> tuple[Any, Any]:
    """Contiguous values, whose type kernels call `kind`, -> their blocks, on the current stream.

    Both results are bytes on the device: the blocks, in whole turns, and a FOUND of each CTA.
    """
    import cupy

    count = values.size // fmt.weights
    turns, warps = -(-count // BLOCKS_PER_WARP), ENCODE_THREADS // 32
    ctas = min(CTAS * gpu(cupy.cuda.runtime.getDevice()).sms, -(-turns // warps))
    blocks = cupy.empty(turns * BLOCKS_PER_WARP * fmt.block_bytes, np.uint8)
    found = cupy.empty(ctas * FOUND.itemsize, np.uint8)
    if count:
        if values.data.ptr % 16:  # a view into an array: the kernel reads 16 bytes at a time
            values = values.copy()
        kernel = ENCODE.load(fmt, In=kind)
        kernel((ctas,), (ENCODE_THREADS,), (values, blocks, found, np.int64(count)))
    return blocks, found


def check(fmt: Format) -> None:
    """UnsupportedError unless the kernel encodes this format."""
    if not encodes(fmt):
        raise UnsupportedError(f"{fmt} has no encoder on a GPU; quantize an array of the host")
