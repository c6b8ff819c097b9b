"""Products by experts of many tokens: their rows are sorted by expert, multiplied together, and added up by token.

    ids, x --moe_sort--> token tiles, sorted x --moe_prefill--> sorted products --moe_combine--> y

moe_prefill is the kernel for sm_90 by wgmma, on other GPUs the one for sm_80 by mma.sync; where experts have few tokens
each it is moe_decode_tiles. All sizes follow from the shape of ids: their values are read by kernels alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from qgemm.cuda.jit.twins import TokenTile, TokenTiles
from qgemm.cuda.kernels.expert_tiles import Size, max_token_tiles
from qgemm.cuda.kernels.moe_sort import MAX_EXPERTS, MAX_SLOTS, combine_launch, sort_launch
from qgemm.cuda.kernels.routes import route, sorts, token_tile
from qgemm.cuda.kernels.sm90_token_tiles import rows_of_x
from qgemm.cuda.problem import C_TYPES, Routed, gpu

from .arrays import ABSOLUTE, NOTHING, SIZES, Array, Call, Pointer
from .plan import Product, Source, enter, gated_pair, prepared, problem, scratch

SCRATCH_ALIGNMENT = 256
INDEX = 4  # bytes of a slot or row


def token_tile_of(call: Call, x: Array, ids: Array, experts: int, *sizes: Size) -> int:
    """Rows of a token tile where sorting pays, else 0: few slots, plain weights, or x without tensor cores for it."""
    sm, sms = gpu(call.device)[1:]
    slots = ids.values.shape[0] * ids.values.shape[1]
    fitting = sorts(C_TYPES[x.dtype], sm) and experts <= MAX_EXPERTS and all(size.format.tiled for size in sizes)
    if not fitting or slots == 0 or any(size.n * size.k == 0 for size in sizes):
        return 0
    return token_tile(sizes, min(slots, MAX_SLOTS), experts, sms, sm)


class Chunk(NamedTuple):
    """Tokens of a call whose slots are sorted together: the number of the first, their count, their slots."""

    first: int
    tokens: int
    slots: int


class Sorted:
    """The sorted slots of a chunk, and scratch memory for rows in their order: `rows`, an array by columns and type."""

    def __init__(self, call: Call, experts: int, chunk: Chunk, tile: int, *rows: tuple[int, str]) -> None:
        """tile: rows of a token tile. rows: columns and type of the arrays of sorted rows that the call needs."""
        self.call, self.experts, self.chunk, self.tile = call, experts, chunk, tile
        count = rows_of_x(chunk.slots, tile)
        tiles = max_token_tiles(chunk.slots, experts, tile) * ctypes.sizeof(TokenTile)
        row_bytes = [columns * SIZES[dtype] for columns, dtype in rows]
        sizes = ctypes.sizeof(TokenTiles), tiles, chunk.slots * INDEX, *(count * width for width in row_bytes)
        *starts, nbytes = accumulate(map(_aligned, sizes), initial=0)
        base = scratch(call, nbytes)
        (self.counts, self.token_tiles, self.row_of_slots, *pointers) = map(base.plus, starts)
        self.rows = [Array(None, pointer, dtype) for pointer, (_, dtype) in zip(pointers, rows, strict=True)]

    def sort(self, ids: Array, x: Array, to: Array, slots_of_x: int) -> None:
        """ids of the chunk -> token tiles, the order of the slots, and in it rows of x [T, K] or [T, top_k, K]."""
        device, chunk, top_k = self.call.device, self.chunk, ids.values.shape[1]
        k = x.values.shape[-1]
        sort = sort_launch(
            device, gpu(device).sms, ids.dtype, chunk.slots, self.experts, self.tile, k * SIZES[x.dtype], slots_of_x
        )  # fmt: skip
        rows = x.element(chunk.first * (top_k // slots_of_x) * k)
        slots = ids.element(chunk.first * top_k)
        enter(self.call, sort, slots, self.counts, self.token_tiles, self.row_of_slots, rows, to.pointer)

    def multiply(self, x: Array, products: Sequence[Product], second: bool = False) -> None:
        """Sorted rows of x by the experts of a product, or of a gate and of the product that it gates.

        second: whether the launch before has waited for the sort.
        """
        first, last = products[0], products[-1]
        w, outputs = first.w, tuple(p.output for p in products)
        routed = Routed(experts=self.experts, stride=first.stride, tokens=self.tile, ids_are_known=second)
        p = problem(w, Source(self.chunk.slots, w.shape[-1], x.dtype))._replace(
            n=first.n, outputs=outputs, exponent=0, gated=len(products) == 2, routed=routed
        )
        if (kernel := route(p).kernel).uses_exponent:
            p = p._replace(exponent=max(product.w.exponent for product in products))
        pair = first, last
        absmax = [Pointer(ABSOLUTE, product.w.row_absmax + product.row * SIZES["float32"]) for product in pair]
        biases = [product.bias.element(product.row) for product in pair]
        arrays = x.pointer, self.counts, self.token_tiles, first.tiles, last.tiles, *absmax, *biases, first.y.pointer
        enter(self.call, prepared(self.call, kernel, p), *arrays)

    def combine(self, products: Array, ids: Array, weights: Array, product: Product, summed: bool) -> None:
        """y [T, n] of the sums over a token's experts, or [T, top_k, n] of the products in their places."""
        (n, y, bias), chunk, top_k = product[1:4], self.chunk, ids.values.shape[1]
        tokens, terms = (chunk.tokens, top_k) if summed else (chunk.slots, 1)
        combine = combine_launch(
            self.call.device, products.dtype, y.dtype, tokens, n, terms, ids.dtype, weights.dtype, bias.dtype
        )  # fmt: skip
        slot, to = chunk.first * top_k, y.element(chunk.first * (tokens // chunk.tokens) * n)
        inputs = products.pointer, self.row_of_slots, ids.element(slot), weights.element(slot), bias.pointer
        enter(self.call, combine, *inputs, to)


def matmul(call: Call, x: Array, ids: Array, product: Product, tile: int) -> None:
    """y [T, top_k, N] = x @ w[ids].T + bias. Without a bias products are rounded once, to y's type."""
    experts, k, top_k = product.w.shape[0], product.w.shape[-1], ids.values.shape[1]
    dtype = "float32" if product.bias.dtype else product.y.dtype
    for chunk in chunks(ids):
        slots = Sorted(call, experts, chunk, tile, (k, x.dtype), (product.n, dtype))
        rows, products = slots.rows
        slots.sort(ids, x, rows, top_k if x.values.ndim == 2 else 1)
        slots.multiply(rows, [product._replace(y=products, bias=NOTHING)])
        slots.combine(products, ids, NOTHING, product, False)


def feed_forward(
    call: Call, function: str, x: Array, ids: Array, weights: Array, products: Sequence[Product], tile: int
) -> None:
    """y [T, K] of a layer; products: gate, up and down.

    Values between the kernels are of x's type, products before the sum over experts of y's.
    """
    gate, up, down = products
    experts, k = gate.w.shape[0], gate.w.shape[-1]
    for chunk in chunks(ids):
        slots = Sorted(call, experts, chunk, tile, (k, x.dtype), (gate.n, x.dtype), (down.n, down.y.dtype))
        rows, between, terms = slots.rows
        slots.sort(ids, x, rows, ids.values.shape[1])
        slots.multiply(rows, gated_pair(call, [gate, up], between, function, True))
        slots.multiply(between, [down._replace(y=terms, bias=NOTHING)], True)
        slots.combine(terms, ids, weights, down, True)


def chunks(ids: Array) -> Iterator[Chunk]:
    """All tokens of a call, in chunks whose sorted rows fit in bounded scratch memory."""
    t, top_k = ids.values.shape
    step = max(1, MAX_SLOTS // top_k)
    for first in range(0, t, step):
        tokens = min(step, t - first)
        yield Chunk(first, tokens, tokens * top_k)


def _aligned(size: int) -> int:
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
