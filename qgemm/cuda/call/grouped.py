"""Products by experts of many tokens: their rows are sorted by expert, multiplied together, and added up by token.

    ids, x --moe_sort--> token tiles, sorted x --moe_prefill--> sorted products --moe_combine--> y

Kernels that multiply only halves read x of bf16 as ScaledRows: x is scaled before it is sorted, the input of a second
product after the first one.

moe_prefill stands for moe_prefill_sm90 (wgmma) on sm_90, moe_prefill_sm80 (mma.sync) on other GPUs, and
moe_decode_tiles where each expert has few tokens. The host knows sizes from the shape of ids; kernels alone read ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from qgemm.cuda.jit.twins import TokenTile, TokenTiles
from qgemm.cuda.kernels.expert_tiles import Size, max_token_tiles
from qgemm.cuda.kernels.kernel import Kernel
from qgemm.cuda.kernels.moe_sort import MAX_EXPERTS, MAX_SLOTS, combine_launch, sort_launch
from qgemm.cuda.kernels.routes import route, sorts, token_tile
from qgemm.cuda.kernels.sm90_token_tiles import rows_of_x
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.problem import C_TYPES, SCALED_ROWS, Routed, gpu
from qgemm.cuda.tensor import DeviceExperts, DeviceTensor

from .arrays import ABSOLUTE, NOTHING, SIZES, Array, Call, Pointer
from .plan import Product, Source, enter, gated_pair, prepared, problem, scaled, scratch

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


class Rows(NamedTuple):
    """Rows in memory: number of columns, NumPy's name of their type, and the kernels' name of the form of a row."""

    columns: int
    dtype: str
    kind: str


class Sorted:
    """The sorted slots of a chunk, and scratch memory for rows in their order: `rows`, an array for each Rows."""

    def __init__(self, call: Call, experts: int, chunk: Chunk, tile: int, *rows: Rows) -> None:
        """tile: rows of a token tile. rows: the arrays of sorted rows that the call needs."""
        self.call, self.experts, self.chunk, self.tile = call, experts, chunk, tile
        count = rows_of_x(chunk.slots, tile)
        tiles = max_token_tiles(chunk.slots, experts, tile) * ctypes.sizeof(TokenTile)
        row_bytes = [row.columns * SIZES[row.dtype] for row in rows]
        sizes = ctypes.sizeof(TokenTiles), tiles, chunk.slots * INDEX, *(count * width for width in row_bytes)
        *starts, nbytes = accumulate(map(_aligned, sizes), initial=0)
        base = scratch(call, nbytes)
        (self.counts, self.token_tiles, self.row_of_slots, *pointers) = map(base.plus, starts)
        self.rows = [Array(None, pointer, row.dtype) for pointer, row in zip(pointers, rows, strict=True)]

    def sort(self, ids: Array, x: Array, form: Rows, sorted_rows: Array, slots_of_x: int) -> None:
        """ids of the chunk -> token tiles, the order of the slots, and in it rows of x [T, K] or [T, top_k, K].

        form: of the sorted rows.
        """
        device, chunk, top_k = self.call.device, self.chunk, ids.values.shape[1]
        k, of_token = x.values.shape[-1], top_k // slots_of_x  # of_token: rows of x
        rows = x.element(chunk.first * of_token * k)
        if form.kind == SCALED_ROWS:
            rows = scaled(self.call, rows, chunk.tokens * of_token, k)
        row_bytes = form.columns * SIZES[form.dtype]
        sort = sort_launch(
            device, gpu(device).sms, ids.dtype, chunk.slots, self.experts, self.tile, row_bytes, slots_of_x
        )  # fmt: skip
        slots = ids.element(chunk.first * top_k)
        enter(self.call, sort, slots, self.counts, self.token_tiles, self.row_of_slots, rows, sorted_rows.pointer)

    def multiply(self, x: Array, form: Rows, products: Sequence[Product], second: bool = False) -> None:
        """Multiply sorted rows of x by the experts of one product, or of a gate and the product that it gates.

        form: of x. second: whether the launch before has waited for the sort.
        """
        first, last = products[0], products[-1]
        w, outputs = first.w, tuple(p.output for p in products)
        routed = Routed(experts=self.experts, stride=first.stride, tokens=self.tile, ids_are_known=second)
        p = problem(w, Source(self.chunk.slots, w.shape[-1], x.dtype))._replace(
            n=first.n, outputs=outputs, exponent=0, gated=len(products) == 2, routed=routed, x=form.kind
        )
        if (kernel := _kernel(w, x.dtype, self.tile)).uses_exponent:
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
        slot, target = chunk.first * top_k, y.element(chunk.first * (tokens // chunk.tokens) * n)
        inputs = products.pointer, self.row_of_slots, ids.element(slot), weights.element(slot), bias.pointer
        enter(self.call, combine, *inputs, target)


def matmul(call: Call, x: Array, ids: Array, product: Product, tile: int) -> None:
    """y [T, top_k, N] = x @ w[ids].T + bias. Without a bias products are rounded once, to y's type."""
    experts, top_k = product.w.shape[0], ids.values.shape[1]
    dtype = "float32" if product.bias.dtype else product.y.dtype
    form = _form(product.w, x.dtype, tile)
    for chunk in chunks(ids):
        slots = Sorted(call, experts, chunk, tile, form, _plain(product.n, dtype))
        rows, products = slots.rows
        slots.sort(ids, x, form, rows, top_k if x.values.ndim == 2 else 1)
        slots.multiply(rows, form, [product._replace(y=products, bias=NOTHING)])
        slots.combine(products, ids, NOTHING, product, False)


def feed_forward(
    call: Call, function: str, x: Array, ids: Array, weights: Array, products: Sequence[Product], tile: int
) -> None:
    """y [T, K] of a layer; products: gate, up and down.

    Values between the kernels are of x's type, products before the sum over experts of y's.
    """
    gate, up, down = products
    experts, form, second = gate.w.shape[0], _form(gate.w, x.dtype, tile), _form(down.w, x.dtype, tile)
    for chunk in chunks(ids):
        slots = Sorted(call, experts, chunk, tile, form, _plain(gate.n, x.dtype), _plain(down.n, down.y.dtype))
        rows, between, terms = slots.rows
        slots.sort(ids, x, form, rows, ids.values.shape[1])
        slots.multiply(rows, form, gated_pair(call, [gate, up], between, function, True))
        if second.kind == SCALED_ROWS:
            spare = rows_of_x(chunk.slots, tile) - chunk.slots
            between = between._replace(pointer=scaled(call, between.pointer, chunk.slots, gate.n, spare))
        slots.multiply(between, second, [down._replace(y=terms, bias=NOTHING)], True)
        slots.combine(terms, ids, weights, down, True)


def _kernel(w: DeviceTensor | DeviceExperts, dtype: str, tile: int) -> Kernel:
    """The kernel of sorted rows of x, of a type by NumPy's name."""
    return route(problem(w, Source(1, w.shape[-1], dtype))._replace(routed=Routed(tokens=tile))).kernel


def _form(w: DeviceTensor | DeviceExperts, dtype: str, tile: int) -> Rows:
    """Sorted rows of x as their kernel reads them."""
    k = w.shape[-1]
    (kind,) = _kernel(w, dtype, tile).reads(problem(w, Source(1, k, dtype)))
    return Rows(scaled_rows.pitch(k), "float16", kind) if kind == SCALED_ROWS else _plain(k, dtype)


def _plain(columns: int, dtype: str) -> Rows:
    return Rows(columns, dtype, C_TYPES[dtype])


def chunks(ids: Array) -> Iterator[Chunk]:
    """All tokens of a call, in chunks whose sorted rows fit in bounded scratch memory."""
    t, top_k = ids.values.shape
    step = max(1, MAX_SLOTS // top_k)
    for first in range(0, t, step):
        tokens = min(step, t - first)
        yield Chunk(first, tokens, tokens * top_k)


def _aligned(size: int) -> int:
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
