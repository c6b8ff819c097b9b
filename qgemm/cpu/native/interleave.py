"""Weights interleaved by 16 rows in memory, for many products: kernels/cpu/interleaved.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.locks import new_lock
from qgemm.system.process import advise_unused
from qgemm.tensor import Tensor

from .calls import LANES, Target
from .libraries import loaded, serves, source
from .library import by_blocks_alone
from .pool import run

ALIGNED = 64  # bytes: a vector
LEAST_PACKED = 1 << 18  # weights of a matrix that is packed by itself: calls of smaller ones cost more than the product
MOST_MEMORY = 4 / 3  # bytes of the copy over those of the blocks, likewise: grids (iq1 to iq3) need 2.6 to 6 times
SAMPLES = 8  # words of 8 bytes by which a copy tells that the blocks were overwritten

_lock = new_lock()


class Interleaving(ctypes.Structure):
    """W [n, k] and its interleaved copy, `interleaving` of kernels/cpu/calls.h."""

    _fields_ = (
        ("w", ctypes.c_void_p), ("w_row", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    )  # fmt: skip


class Copy(NamedTuple):
    """An interleaved copy that a product made, words of the blocks, and their bytes when it was made."""

    interleaved: NDArray[np.uint8]
    words: NDArray[np.uint64]
    expected: bytes

    def is_stale(self) -> bool:
        """Whether other blocks were written since. Torch does not count writes through `data` and NumPy."""
        return self.words.tobytes() != self.expected


_copies: WeakKeyDictionary[Tensor, Copy] = WeakKeyDictionary()  # tensors that pack themselves


def interleaved(w: Tensor, blocks: Blocks) -> NDArray[np.uint8] | None:
    """The weights of a matrix, from its blocks, as uint8 [runs of 16 rows, bytes], read-only.

    Rows are filled up to a multiple of 16, columns to one of 256.

    None where products have no use for it: without compiled code, for weights that are floats or have one scale for a
    lane (kernels/cpu/lane_rows.h), and for experts.
    """
    nbytes = run_bytes(w)
    if not nbytes:
        return None
    n, k = w.shape
    if blocks.strides[-1] != w.format.block_bytes:
        blocks = np.ascontiguousarray(blocks)
    runs = -(-n // LANES)
    memory = np.empty(runs * nbytes + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    copy = memory[start : start + runs * nbytes].reshape(runs, nbytes)
    job = Interleaving(blocks.ctypes.data, blocks.strides[0], n, k, copy.ctypes.data)
    run(loaded(w.format).qgemm_interleave, job, runs, 1)  # type: ignore[union-attr]
    copy.flags.writeable = False
    return copy


def run_bytes(w: Tensor) -> int:
    """Bytes of 16 rows in an interleaved copy; 0 where products have no use for one."""
    if w.ndim != 2 or 0 in w.shape or not serves(w.format) or source(w.format) is None or not w.format.integer:
        return 0
    engine: Any = loaded(w.format)
    if engine is None or not hasattr(engine, "qgemm_interleave"):
        return 0
    size = engine.qgemm_interleaved_bytes
    size.argtypes, size.restype = [ctypes.c_int64], ctypes.c_int64
    return LANES * int(size(w.shape[1]))


def copy_of(w: Tensor, blocks: Blocks) -> NDArray[np.uint8] | None:
    """The interleaved copy that a product reads, made now for weights that pack themselves; None for the blocks."""
    if not w.packs:
        return w.interleaved
    with _lock:
        copy = _copies.get(w)
        if copy is None or copy.is_stale():
            w.plans.clear()  # those of an earlier copy keep it
            copy = _packed(w, blocks)
        if copy is None:
            w.packs = False
            return None
        _copies[w], w.interleaved = copy, copy.interleaved
        return copy.interleaved


def _packed(w: Tensor, blocks: Blocks) -> Copy | None:
    """A copy of the weights of a layer; None where it does not pay, or where QGEMM_CPU=blocks asks for none."""
    n, k = w.shape if w.ndim == 2 else (0, 0)
    if n * k < LEAST_PACKED or by_blocks_alone() or not blocks.flags.c_contiguous:
        return None
    if not 0 < -(-n // LANES) * run_bytes(w) <= MOST_MEMORY * w.nbytes:
        return None
    step = blocks.nbytes // SAMPLES // 8 * 8
    words: NDArray[np.uint64] = np.ndarray(SAMPLES, "<u8", blocks.view(np.uint8).reshape(-1), 0, (step,))
    expected = words.tobytes()
    copy = interleaved(w, blocks)
    assert copy is not None, "it has bytes"
    advise_unused(blocks.ctypes.data, blocks.nbytes)
    return Copy(copy, words, expected)


def copies_of(weights: Iterable[Tensor]) -> list[Copy]:
    """The copies that weights made of themselves: a plan reads them while none of them is stale."""
    return [_copies[w] for w in weights if w in _copies]


def read_interleaved(target: Target, copy: NDArray[np.uint8]) -> None:
    """Let a product read the interleaved copy of its weights."""
    target.interleaved, target.interleaved_row = copy.ctypes.data, copy.strides[0] // LANES
