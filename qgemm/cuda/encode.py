"""Values on a GPU into the blocks of a format there, byte for byte as the CPU encodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from qgemm.arguments import Array
from qgemm.arrays import as_cupy, on_cuda, stream_of
from qgemm.codec.format import Format
from qgemm.codec.search import check_importance
from qgemm.errors import ShapeError, UnsupportedError

from . import upload
from .kernels.transforms import (
    ENCODE,
    ENCODE_GROUPS,
    ENCODE_STATS,
    ENCODE_THREADS,
    ENCODE_WEIGHTED,
    blocks_per_warp,
    encodes,
    encodes_groups,
    encodes_weighted,
)
from .problem import C_TYPES, c_type, gpu
from .tensor import DeviceTensor

if TYPE_CHECKING:
    import cupy

CTAS = 8  # CTAs of an SM, which draw work items of blocks until none is left


def quantize(x: Array, fmt: Format, importance: ArrayLike | None = None) -> DeviceTensor:
    """`qgemm.quantize` for x [N, K] on a CUDA device: packed from blocks that equal those of the CPU.

    importance: [K] or [N, K], on the host or on the device.
    """
    import cupy

    check(fmt, importance is not None)
    with stream_of(x):
        array = as_cupy(x)
        if array.ndim != 2:
            raise ShapeError(f"only a matrix (N, K) is packed into tiles, got an array of shape {array.shape}")
        values = array if array.dtype.name in C_TYPES else array.astype(np.float32)
        count = fmt.blocks_in(array.shape[1])
        weights = None if importance is None else _importance(array.shape, importance)
        blocks, checks = encode(cupy.ascontiguousarray(values), c_type(values.dtype), fmt, weights)
        refused = checks.get().view(ENCODE_STATS)["refused"].min(initial=len(array) * count)
        fmt.check_first(array, int(refused), cupy.asnumpy, weights)
        return DeviceTensor(fmt, array.shape, *upload.pack(fmt, blocks, len(array), count))


def _importance(shape: tuple[int, ...], importance: Any) -> cupy.ndarray:
    """An importance of values of this shape as contiguous float32 on the current device, once it is checked."""
    import cupy

    values = as_cupy(importance) if on_cuda(importance) else cupy.asarray(np.asarray(importance, np.float32))
    weights = cupy.ascontiguousarray(values.astype(np.float32, copy=False))
    check_importance(shape, weights.shape, bool((cupy.isfinite(weights) & (weights >= 0)).all()))
    return weights


def encode(
    values: cupy.ndarray, kind: str, fmt: Format, importance: cupy.ndarray | None = None
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Contiguous values, whose type kernels call `kind`, -> their blocks, on the current stream.

    importance: float32, for all values, or for a whole number of blocks and then repeated. Both results are bytes on
    the device: the blocks, in whole work items, and a ENCODE_STATS by CTA.
    """
    import cupy

    groups, item = encodes_groups(fmt), blocks_per_warp(fmt)
    if groups:  # that kernel spends so much time on a value that a copy does not count
        values = _as_float32(values, kind)
    count = values.size // fmt.weights
    items, warps = -(-count // item), ENCODE_THREADS // 32
    ctas = min(CTAS * gpu(cupy.cuda.runtime.getDevice()).sms, -(-items // warps))
    blocks = cupy.empty(items * item * fmt.block_bytes, np.uint8)
    checks = cupy.empty(ctas * ENCODE_STATS.itemsize, np.uint8)
    if not count:
        return blocks, checks
    values, importance = _aligned(values), None if importance is None else _aligned(importance)
    if importance is not None:
        kernel = ENCODE_WEIGHTED.load(fmt, WEIGHTED=1)
        arguments: tuple[Any, ...] = values, importance, np.int64(importance.size // fmt.weights), blocks, checks
    elif groups:
        kernel = ENCODE_GROUPS.load(fmt, WEIGHTED=0)
        arguments = values, np.uint64(0), np.int64(1), blocks, checks
    else:
        kernel = ENCODE.load(fmt, In=kind)
        arguments = values, blocks, checks
    kernel((ctas,), (ENCODE_THREADS,), (*arguments, np.int64(count)))
    return blocks, checks


def _as_float32(values: cupy.ndarray, kind: str) -> cupy.ndarray:
    """Values of a type that kernels call `kind` as float32; bf16 comes as its bits where CuPy has no such type."""
    if kind == "bf16" and values.dtype.itemsize == 2 and values.dtype.kind in "uV":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _aligned(values: cupy.ndarray) -> cupy.ndarray:
    """The array, or a copy of a view, so that kernels can read 16 bytes at a time."""
    return values.copy() if values.data.ptr % 16 else values


def takes(fmt: Format) -> bool:
    """Whether a kernel encodes this format."""
    return encodes(fmt) or encodes_groups(fmt)


def takes_weighted(fmt: Format) -> bool:
    """Whether a kernel encodes this format with an importance."""
    return encodes_weighted(fmt)


def check(fmt: Format, weighted: bool = False) -> None:
    """UnsupportedError unless a kernel encodes this format, with an importance if `weighted`."""
    if not takes(fmt):
        raise UnsupportedError(f"{fmt} has no encoder on a GPU; quantize an array of the host")
    if weighted and not takes_weighted(fmt):
        raise UnsupportedError(f"{fmt} has no encoder on a GPU for an importance matrix; quantize an array of the host")
