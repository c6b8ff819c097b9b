"""Tensor maps: how the tensor memory accelerator of sm_90 finds a box of a matrix. The driver encodes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from qgemm.cuda.jit import twins
from qgemm.cuda.problem import EIGHT_BITS

from .launch import check, driver

TYPES = {"half": 6, "bf16": 9, EIGHT_BITS: 0}  # CU_TENSOR_MAP_DATA_TYPE_...; of bytes without a sign
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS = 0, 3, 3, 0
ITEMSIZE = {"half": 2, "bf16": 2, EIGHT_BITS: 1}
BOX_BYTES = 128  # of a row: what the swizzle permutes


class TensorMap(twins.TensorMap):
    """A CUtensorMap that the driver encodes."""

    @classmethod
    def aligned(cls) -> TensorMap:
        """A new one at an aligned address."""
        room = ctypes.create_string_buffer(ctypes.sizeof(cls) + cls.ALIGNMENT)
        found = cls.from_buffer(room, -ctypes.addressof(room) % cls.ALIGNMENT)
        return found

    def encode(self, pointer: int, kind: str, rows: int, columns: int, box_rows: int) -> None:
        """Encode a row-major matrix of numbers at a multiple of 16; boxes of 128 bytes a row, swizzled for wgmma."""
        of_shape = _of_shape(ITEMSIZE[kind], rows, columns, box_rows)
        status = driver().cuTensorMapEncodeTiled(
            ctypes.byref(self), TYPES[kind], 2, ctypes.c_void_p(pointer), *of_shape
        )
        check(status, f"no tensor map for x [{rows}, {columns}] of {kind} at {pointer:#x}")


@lru_cache
def _of_shape(itemsize: int, rows: int, columns: int, box_rows: int) -> tuple[Any, ...]:
    """The arguments of the encoder behind the pointer: sizes, strides, box and modes."""
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * itemsize)
    box, steps = (ctypes.c_uint32 * 2)(BOX_BYTES // itemsize, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    return sizes, strides, box, steps, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS
