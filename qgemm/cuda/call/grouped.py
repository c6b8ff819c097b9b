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
from qgemm.cuda.kernels.moe_prefill_sm90 import rows_of_x
from qgemm.cuda.kernels.moe_sort import MAX_EXPERTS, MAX_SLOTS, combine_launch, sort_launch
from qgemm.cuda.kernels.routes import route, sorts, token_tile
from qgemm.cuda.problem import C_TYPES, ITEMSIZE, ExpertStride, Output, Problem, Routed, gpu
from qgemm.cuda.tensor import DeviceExperts
from qgemm.routing import Layer

from .arrays import NOTHING, SIZES, Array, Call, Pointer
from .plan import enter, prepared, scratch

SCRATCH_ALIGNMENT = 256
INDEX = 4  # bytes of a slot or row


class ExpertProduct(NamedTuple):
    """One product of a launch: expert 0's tiles and the largest magnitudes of its rows, y, bias, the gate's values."""

    tiles: Pointer
    row_absmax: Pointer
    y: Array
    bias: Array
    residual: Array = NOTHING


def token_tile_of(call: Call, x: Array, ids: Array, experts: int, *sizes: Size) -> int:
    """Rows of a token tile where sorting pays, else 0: few slots, or x that tensor cores do not multiply."""
    sm, sms = gpu(call.device)[1:]
    slots = ids.values.shape[0] * ids.values.shape[1]
    fitting = sorts(C_TYPES[x.dtype], sm) and experts <= MAX_EXPERTS
    if not fitting or slots == 0 or any(size.n * size.k == 0 for size in sizes):
        return 0
    return token_tile(sizes, min(slots, MAX_SLOTS), experts, sms, sm)


class Chunk(NamedTuple):
    """Tokens of a call whose slots are sorted together: the number of the first, their count, their slots."""

    first: int
    tokens: int
    slots: int


class Sorted:
    """The sorted slots of a chunk, and scratch memory for rows in their order: `rows`, a pointer by width."""

    def __init__(self, call: Call, experts: int, chunk: Chunk, tile: int, *row_bytes: int) -> None:
        """tile: rows of a token tile. row_bytes: of the arrays of sorted rows that the call needs."""
        self.call, self.experts, self.chunk, self.tile = call, experts, chunk, tile
        count = rows_of_x(chunk.slots, tile)
        tiles = max_token_tiles(chunk.slots, experts, tile) * ctypes.sizeof(TokenTile)
        sizes = ctypes.sizeof(TokenTiles), tiles, chunk.slots * INDEX, *(count * width for width in row_bytes)
        *starts, nbytes = accumulate(map(_aligned, sizes), initial=0)
        base = scratch(call, nbytes)
        (self.counts, self.token_tiles, self.row_of_slots, *self.rows) = map(base.plus, starts)

    def sort(self, ids: Array, x: Array, to: Pointer, slots_of_x: int) -> None:
        """ids of the chunk -> token tiles, the order of the slots, and in it rows of x [T, K] or [T, top_k, K]."""
        device, chunk, top_k = self.call.device, self.chunk, ids.values.shape[1]
        k = x.values.shape[-1]
        sort = sort_launch(
            device, gpu(device).sms, ids.dtype, chunk.slots, self.experts, self.tile, k * SIZES[x.dtype], slots_of_x
        )  # fmt: skip
        rows = x.element(chunk.first * (top_k // slots_of_x) * k)
        slots = ids.element(chunk.first * top_k)
        enter(self.call, sort, slots, self.counts, self.token_tiles, self.row_of_slots, rows, to)

    def multiply(self, p: Problem, x: Pointer, products: Sequence[ExpertProduct], y: Pointer) -> None:
        """Sorted rows of x by the experts of a product, or of a gate and of the product that it gates."""
        first, second = products[0], products[-1]
        pointers = (
            first.tiles,
            second.tiles,
            first.row_absmax,
            second.row_absmax,
            first.bias.pointer,
            second.bias.pointer,
        )
        enter(self.call, prepared(self.call, route(p).kernel, p), x, self.counts, self.token_tiles, *pointers, y)

    def combine(
        self, products: Pointer, source: str, ids: Array, weights: Array, bias: Array, y: Array, n: int, summed: bool
    ) -> None:
        """y [T, n] of the sums over a token's experts, or [T, top_k, n] of the products in their places."""
        chunk, top_k = self.chunk, ids.values.shape[1]
        tokens, terms = (chunk.tokens, top_k) if summed else (chunk.slots, 1)
        combine = combine_launch(
            self.call.device, source, y.dtype, tokens, n, terms, ids.dtype, weights.dtype, bias.dtype
        )  # fmt: skip
        slot, to = chunk.first * top_k, y.element(chunk.first * (tokens // chunk.tokens) * n)
        inputs = products, self.row_of_slots, ids.element(slot), weights.element(slot), bias.pointer
        enter(self.call, combine, *inputs, to)

    def problem(
        self, weights: Sequence[DeviceExperts], x: Array, n: int, stride: ExpertStride, outputs: tuple[Output, ...],
        second: bool = False,
    ) -> Problem:  # fmt: skip
        """The product of sorted rows by experts, of n rows: of one tensor, or of a gate and the tensor that it gates.

        second: whether the launch before has waited for the sort.
        """
        w, on = weights[0], gpu(self.call.device)
        routed = Routed(experts=self.experts, stride=stride, tokens=self.tile, ids_are_known=second)
        k, x_type, gated = w.shape[2], C_TYPES[x.dtype], len(outputs) == 2
        p = Problem(
            w.format, "a16", self.chunk.slots, n, k, on.sm, x_type, outputs, 0, on.device, on.sms, gated, routed
        )  # fmt: skip
        return p._replace(exponent=max(w.exponent for w in weights)) if route(p).kernel.uses_exponent else p


def matmul(
    call: Call, w: DeviceExperts, x: Array, ids: Array, product: ExpertProduct, stride: ExpertStride, tile: int
) -> None:
    """y [T, top_k, N] = x @ w[ids].T + bias. Without a bias products are rounded once, to y's type."""
    n, source = w.shape[1], "float32" if product.bias.dtype else product.y.dtype
    top_k, k = ids.values.shape[1], w.shape[2]
    for chunk in chunks(ids):
        slots = Sorted(call, len(w), chunk, tile, k * ITEMSIZE[x.dtype], n * ITEMSIZE[source])
        rows, products = slots.rows
        slots.sort(ids, x, rows, top_k if x.values.ndim == 2 else 1)
        problem = slots.problem([w], x, n, stride, (Output(n, source),))
        slots.multiply(problem, rows, [product._replace(bias=NOTHING)], products)
        slots.combine(products, source, ids, NOTHING, product.bias, product.y, n, False)


def feed_forward(
    call: Call, layer: Layer, x: Array, ids: Array, weights: Array, products: Sequence[ExpertProduct],
    strides: Sequence[ExpertStride], tile: int,
) -> None:  # fmt: skip
    """y [T, K] of a layer; products, strides: of gate, up and down.

    Values between the kernels are of x's type, products before the sum over experts of y's.
    """
    (gate, up, down), first, last = products, layer.gate_up[0], layer.down
    n, f, width, source = last.shape[1], layer.width, ITEMSIZE[x.dtype], down.y.dtype
    outputs = Output(f, x.dtype, gate.bias.dtype, gate=layer.gate), Output(f, "", up.bias.dtype)
    for chunk in chunks(ids):
        slots = Sorted(call, len(last), chunk, tile, first.shape[2] * width, f * width, n * ITEMSIZE[source])
        rows, between, sums = slots.rows
        slots.sort(ids, x, rows, ids.values.shape[1])
        slots.multiply(slots.problem(layer.gate_up, x, f, strides[0], outputs), rows, [gate, up], between)
        problem = slots.problem([last], x, n, strides[-1], (Output(n, source),), True)
        slots.multiply(problem, between, [down._replace(bias=NOTHING)], sums)
        slots.combine(sums, source, ids, weights, down.bias, down.y, n, True)


def chunks(ids: Array) -> Iterator[Chunk]:
    """All tokens of a call, in chunks whose sorted rows fit in bounded scratch memory."""
    t, top_k = ids.values.shape
    step = max(1, MAX_SLOTS // top_k)
    for first in range(0, t, step):
        tokens = min(step, t - first)
        yield Chunk(first, tokens, tokens * top_k)


def _aligned(size: int) -> int:
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
