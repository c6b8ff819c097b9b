"""Values on a GPU into the blocks of a format there, byte for byte as the CPU encodes them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from qgemm.arguments import Array
from qgemm.arrays import check_floats, on_cuda
from qgemm.codec.format import Format
from qgemm.codec.search import check_importance, importance_array
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
from .libraries import Library, library_or_default, on_device_of
from .problem import C_TYPES, gpu
from .tensor import DeviceTensor

CTAS = 8  # CTAs of an SM, which draw work items of blocks until none is left


def quantize(x: Array, fmt: Format, importance: ArrayLike | None = None) -> DeviceTensor:
    """`qgemm.quantize` for x [N, K] on a CUDA device: packed from blocks that equal those of the CPU.

    importance: [K] or [N, K], on the host or on the device.
    """
    check(fmt, importance is not None)
    with on_device_of(x) as (array, library, device):
        name = library.name(array.dtype)
        check_floats(name, array.shape)
        if array.ndim != 2:
            raise ShapeError(f"only a matrix (N, K) is packed into tiles, got an array of shape {tuple(array.shape)}")
        n, k = array.shape
        values = array if name in C_TYPES else library.cast(array, "float32")
        count = fmt.blocks_in(k)
        weights = None if importance is None else _importance((n, k), importance, library, device)
        blocks, checks = encode(_contiguous(values, library), C_TYPES.get(name, "float"), fmt, weights)
        refused = library.host(checks).view(ENCODE_STATS)["refused"].min(initial=n * count)
        fmt.check_first(array, int(refused), library.host, weights)
        memory = upload.pack(fmt, blocks, n, count, library, device)
        return DeviceTensor(fmt, (n, k), *upload.split(fmt, memory, n, k, library))


def _importance(shape: tuple[int, int], importance: Any, library: Library, device: int) -> Any:
    """An importance of values of this shape as contiguous float32 on the current device, once it is checked."""
    if on_cuda(importance):
        values = library.wrap(importance)
        check_floats(library.name(values.dtype), values.shape, "imatrix")
        values = library.cast(values, "float32")
    else:
        values = library.uploaded(importance_array(importance), device)
    weights = _contiguous(values, library)
    fine = not prod(weights.shape) or bool(((weights >= 0) & (weights < np.inf)).all())  # false for NaN
    check_importance(shape, tuple(weights.shape), fine)
    return weights


def encode(values: Any, kind: str, fmt: Format, importance: Any = None) -> tuple[Any, Any]:
    """Contiguous values, whose type kernels call `kind`, -> their blocks, on the current stream of their library.

    importance: float32, for all values, or for a whole number of blocks and then repeated. Both results are bytes on
    the device: the blocks, in whole work items, and a ENCODE_STATS by CTA.
    """
    library = library_or_default(values)
    device, groups, item = library.device(values), encodes_groups(fmt), blocks_per_warp(fmt)
    with library.on_device(device):
        if groups:  # the kernel of groups needs more time for a value than a copy
            values = _as_float32(values, kind, library)
        count = prod(values.shape) // fmt.weights
        items, warps = -(-count // item), ENCODE_THREADS // 32
        ctas = min(CTAS * gpu(device).sms, -(-items // warps))
        blocks = library.scratch(items * item * fmt.block_bytes, device)()
        checks = library.scratch(ctas * ENCODE_STATS.itemsize, device)()
        if not count:
            return blocks, checks
        values, importance = _aligned(values, library), None if importance is None else _aligned(importance, library)
        source, *written = map(library.pointer, (values, blocks, checks))
        if importance is not None:
            kernel, rows = ENCODE_WEIGHTED.load(fmt, WEIGHTED=1), prod(importance.shape) // fmt.weights
            arguments: tuple[Any, ...] = source, library.pointer(importance), np.int64(rows), *written
        elif groups:
            kernel = ENCODE_GROUPS.load(fmt, WEIGHTED=0)
            arguments = source, np.uint64(0), np.int64(1), *written
        else:
            kernel = ENCODE.load(fmt, In=kind)
            arguments = source, *written
        kernel((ctas,), (ENCODE_THREADS,), (*arguments, np.int64(count)), library.stream(device))
        return blocks, checks


def _as_float32(values: Any, kind: str, library: Library) -> Any:
    """Values of a type that kernels call `kind` as float32; bf16 comes as its bits where NumPy has no such type."""
    if kind == "bf16" and isinstance(values.dtype, np.dtype):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return library.cast(values, "float32")


def _contiguous(values: Any, library: Library) -> Any:
    return values if library.contiguous(values) else library.copy(values)


def _aligned(values: Any, library: Library) -> Any:
    """The array, or a copy of a view, so that kernels can read 16 bytes at a time."""
    return library.copy(values) if library.pointer(values) % upload.CHUNK else values


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
