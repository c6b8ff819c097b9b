"""What the decode kernels are told of the products of one launch: the twin of `Products` in
kernels/warp_split_k.cuh."""

from __future__ import annotations

import ctypes

MOST = 4  # products in a launch: Q, K and V, or gate and up
TYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}  # of an array; 0: there is none


class Arrays(ctypes.Structure):
    """The arrays of one y [m, n] = x @ w [n, k].T + bias [n] + residual [m, n]."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tiles", "y", "bias", "residual")]


class Types(ctypes.Structure):
    """The TYPE_CODES of a product's arrays: `Types` in kernels/epilogue.cuh."""

    _fields_ = [(name, ctypes.c_int32) for name in ("y", "bias", "residual", "padding")]


class Product(ctypes.Structure):
    """N of a product, the CTA after its last, and the types of its arrays."""

    _fields_ = [("n", ctypes.c_int64), ("end", ctypes.c_int64), ("types", Types)]


class Products(ctypes.Structure):
    """Products that share x [m, k] and a launch. First come the pointers, which change from call to call."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("arrays", Arrays * MOST),
        ("of", Product * MOST),
        ("k", ctypes.c_int64),
        ("m", ctypes.c_int64),
    ]
