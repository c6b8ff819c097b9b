"""Rows of a matrix by their index, for embeddings: tiles by the kernel gather_rows, floats by gather_floats."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError

from .driver.launch import Launch
from .kernels.transforms import GATHER_FLOATS, GATHER_ROWS, GATHER_THREADS
from .layout.tile import K_BLOCK
from .libraries import library_of
from .problem import C_TYPES

QUAD = 4  # threads that decode a k_block of a row
COLUMNS = 8  # columns of a row of floats that a thread copies


def gathered(fmt: Format, shape: tuple[int, int], weights: int, device: int, index: Any, dtype: str) -> Any:
    """Rows of a matrix by their index, decoded: `DeviceTensor.rows`. weights: the address of tiles or floats."""
    library, (n, k) = library_of(index), shape
    if library is None or library.device(index) != device:
        raise UnsupportedError(f"an index of rows is a CuPy array or torch tensor on cuda:{device}, got {index!r}")
    if library.name(index.dtype) != "int64" or not library.contiguous(index) or dtype not in C_TYPES:
        raise UnsupportedError(
            f"rows are {', '.join(C_TYPES)} by a contiguous index of int64; got {dtype} by {library.name(index.dtype)}"
        )
    current = library.current_device
    with nullcontext() if current is None or current() == device else library.on_device(device):
        rows = library.new((*index.shape, k), library.dtype(dtype), device)()
        if count := len(index.reshape(-1)) if k else 0:
            launch = gather_launch(device, fmt, C_TYPES[dtype], n, k, count)
            launch(library.stream(device), weights, library.pointer(index), library.pointer(rows))
    return rows


@lru_cache(1024)
def gather_launch(device: int, fmt: Format, out: str, n: int, k: int, count: int) -> Launch:
    """The kernel that decodes `count` rows of W [n, k]. Its pointers are the weights, the index and the rows."""
    pointers = (ctypes.c_void_p * 3)()
    size = ctypes.sizeof(ctypes.c_void_p)
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in range(0, 3 * size, size))
    kernel, threads = (GATHER_FLOATS, -(-k // COLUMNS)) if fmt.plain else (GATHER_ROWS, QUAD * -(-k // K_BLOCK))
    grid = count, -(-threads // GATHER_THREADS)
    arguments = (*arrays, ctypes.c_int64(n), ctypes.c_int64(k))
    function = kernel.load(fmt, Out=out)
    return Launch(function, grid, GATHER_THREADS, 0, arguments, pointers, 3, programmatic=False)
