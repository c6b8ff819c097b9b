"""What the decode kernels are told of the products of one launch: the twin of `Products` in kernels/split.cuh."""

from __future__ import annotations

import ctypes

MOST = 4  # products in a launch: Q, K and V, or gate and up
TYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}  # of an array; 0: there is none


class Array(ctypes.Structure):
    """An array of a type that a kernel learns at run time, or none."""

    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int64)]


class Product(ctypes.Structure):
    """One y [m, n] = x @ w [n, k].T + bias [n] + residual [m, n]; `end` is the CTA after its last."""

    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("y", Array),
        ("bias", Array),
        ("residual", Array),
        ("n", ctypes.c_int64),
        ("end", ctypes.c_int64),
    ]
    POINTERS = ("tiles", "y", "bias", "residual")


class Products(ctypes.Structure):
    """The products of a launch."""

    _fields_ = [("of", Product * MOST)]

    def pointers(self, count: int) -> list[ctypes.c_void_p]:
        """The places of the pointers of the first `count` products, in order: tiles, y, bias, residual of each."""
        size = ctypes.sizeof(Product)
        offsets = [getattr(Product, name).offset for name in Product.POINTERS]
        return [ctypes.c_void_p.from_buffer(self, size * i + offset) for i in range(count) for offset in offsets]
