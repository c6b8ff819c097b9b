"""Launching the decode kernels: one or several products with few rows of x, of which nothing but pointers changes."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from . import activations, jit, tiles
from .block import Format
from .launch import Launch
from .products import MOST, TYPE_CODES, Products, Types
from .routes import Route
from .splits import BARRIERS, decode_template, split_of


class Shape(NamedTuple):
    """What a product's launch depends on: N, and NumPy's names of the types of y, bias and residual ("" for none)."""

    n: int
    y: str
    bias: str = ""
    residual: str = ""


@cache
def decode_launch(
    row: Route, device: int, fmt: Format, k: int, m: int, source: str, shapes: tuple[Shape, ...]
) -> Launch:
    """The launch of a decode route for products of weights of one format with the same M rows of x.

    Its pointers are x, and for each product w, y, bias and residual (0 for none).
    """
    import cupy

    assert len(shapes) <= MOST
    sm = int(cupy.cuda.Device(device).compute_capability)
    tokens = row.tile(m)
    strips = sum(-(-shape.n // tiles.ROWS) for shape in shapes)
    split = split_of(fmt, row.kernel, tokens, m, strips, sm)
    template = decode_template(fmt, split, tokens, row.kernel, source, sm)
    splits, rows = int(template["SPLITS"]), 16 * split.groups
    rings = tiles.table_bytes(fmt) + splits * int(template["WARP_BYTES"])
    sums = splits * tokens * (rows + 4) * 4  # they take the rings' place at the end
    products, end = Products(k=k, m=m), 0
    for product, shape in zip(products.of, shapes, strict=False):
        end += -(-shape.n // rows)
        product.n, product.end = shape.n, end
        product.types = Types(*(TYPE_CODES.get(name, 0) for name in shape[1:]))
    function = jit.load(row.kernel, fmt, **template)
    shared = max(rings, sums, split.shared // 2 + BARRIERS)
    return Launch(function, end, 32 * splits, shared, (products,), products, 1 + 4 * len(shapes))


@cache
def quantize_launch(device: int, source: str, k: int, m: int) -> Launch:
    """The kernel that quantizes M rows of K activations. Its pointers are x and the blocks."""
    blocks = -(-k // tiles.SPAN) * activations.BLOCKS  # one a warp
    return _rows_launch(jit.load("quantize_activations", In=source), (m, -(-32 * blocks // THREADS)), k, m)


@cache
def dequantize_launch(device: int, out: str, k: int, m: int) -> Launch:
    """The kernel that decodes M rows of K quantized activations. Its pointers are the blocks and x."""
    return _rows_launch(jit.load("dequantize_activations", Out=out), (m, -(-k // (2 * THREADS))), k, m)


THREADS = 128  # of a CTA of these kernels


def _rows_launch(function: Any, grid: tuple[int, int], k: int, m: int) -> Launch:
    pointers = (ctypes.c_void_p * 2)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, ctypes.sizeof(ctypes.c_void_p)))
    arguments = (*arrays, ctypes.c_int64(k), ctypes.c_int(m))
    return Launch(function, grid, THREADS, 0, arguments, pointers, 2)


_workspaces: dict[tuple[int, int, int, int], Any] = {}


def workspace(stream: int, k: int, m: int) -> Any:
    """Where a stream's "a8" products of this size keep their quantized x, one after the other.

    It is never freed (16 rows of 16384 take 320 KB), so that a captured graph may be replayed whenever its stream's
    other work is done.
    """
    import cupy

    key = (cupy.cuda.runtime.getDevice(), stream, k, m)
    if key not in _workspaces:
        _workspaces[key] = cupy.empty((-(-k // tiles.SPAN), m, activations.DTYPE.itemsize), np.uint8)
    return _workspaces[key]
