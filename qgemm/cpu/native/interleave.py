"""Weights interleaved by 16 rows in memory, for many products: kernels/cpu/interleaved.h."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.tensor import Tensor

from .calls import LANES, Target
from .libraries import loaded, serves, source
from .pool import run

ALIGNED = 64  # bytes: a vector


class Interleaving(ctypes.Structure):
    """W [n, k] and its interleaved copy, `interleaving` of kernels/cpu/calls.h."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    )  # fmt: skip


def interleaved(w: Tensor, blocks: Blocks) -> NDArray[np.uint8] | None:
    """The weights of a matrix, from its blocks, as uint8 [runs of 16 rows, bytes], read-only.

    Rows are filled up to a multiple of 16, columns to one of 256.

    None where products have no use for it: without compiled code, for weights that are floats or have one scale for a
    lane (kernels/cpu/lane_rows.h), and for experts.
    """
    if w.ndim != 2 or 0 in w.shape or not serves(w.format) or source(w.format) is None or not w.format.integer:
        return None
    engine: Any = loaded(w.format)
    if engine is None or not hasattr(engine, "qgemm_interleave"):
        return None
    size = engine.qgemm_interleaved_bytes
    size.argtypes, size.restype = [ctypes.c_int64], ctypes.c_int64
    n, k = w.shape
    if blocks.strides[-1] != w.format.block_bytes:
        blocks = np.ascontiguousarray(blocks)
    runs, nbytes = -(-n // LANES), LANES * size(k)
    memory = np.empty(runs * nbytes + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    result = memory[start : start + runs * nbytes].reshape(runs, nbytes)
    run(engine.qgemm_interleave, Interleaving(blocks.ctypes.data, blocks.strides[0], n, k, result.ctypes.data), runs, 1)
    result.flags.writeable = False
    return result


def read_interleaved(target: Target, copy: NDArray[np.uint8]) -> None:
    """Let a product read the interleaved copy of its weights."""
    target.interleaved, target.interleaved_row = copy.ctypes.data, copy.strides[0] // LANES
