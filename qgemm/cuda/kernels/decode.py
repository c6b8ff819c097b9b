"""Launching the decode kernels: one or several products with few rows of x, of which nothing but pointers changes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.load import load
from qgemm.cuda.layout import tile as tiles

from .decode_config import BARRIERS, decode_template, quantized_bytes, split_of
from .products import MOST, TYPE_CODES, Products, Types
from .routes import Route


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
    rings += quantized_bytes(row.kernel, source, tokens)
    sums = splits * tokens * (rows + 4) * 4  # they take the rings' place at the end
    products, end = Products(k=k, m=m), 0
    for product, shape in zip(products.of, shapes, strict=False):
        end += -(-shape.n // rows)
        product.n, product.end = shape.n, end
        product.types = Types(*(TYPE_CODES.get(name, 0) for name in shape[1:]))
    function = load(row.kernel, fmt, **template)
    shared = max(rings, sums, split.shared // 2 + BARRIERS)
    return Launch(function, end, 32 * splits, shared, (products,), products, 1 + 4 * len(shapes))
