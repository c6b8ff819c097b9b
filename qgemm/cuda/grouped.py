"""Products by experts of many tokens: their rows are sorted by expert, multiplied together, and added up by token.

    ids, x --moe_sort--> token tiles, sorted x --moe_prefill--> sorted products --moe_combine--> y

moe_prefill is that of sm_90 by wgmma, on other GPUs that of sm_80 by mma.sync; where experts have few tokens each it
is moe_decode_tiles.
All sizes follow from those of ids: what ids hold is read by kernels alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from qgemm.routing import Layer

from .expert_arrays import NOTHING, SIZES, Call, Given, Part
from .jit.twins import TokenTile, TokenTiles
from .kernels.expert_tiles import Size, max_token_tiles
from .kernels.moe_sort import MAX_EXPERTS, MAX_SLOTS, combine_launch, sort_launch
from .kernels.routes import launch, route, sorts, token_tile
from .kernels.sm90_token_tiles import rows_of_x
from .problem import C_TYPES, ITEMSIZE, ExpertStride, Output, Problem, Routed, gpu

ROOM_ALIGNMENT = 256
INDEX = 4  # bytes of a slot or row


def token_tile_of(call: Call, x: Given, ids: Given, experts: int, *sizes: Size) -> int:
    """Rows of a token tile where sorting pays, else 0: few slots, or x that tensor cores do not take."""
    on, slots = gpu(call.device), ids.array.shape[0] * ids.array.shape[1]
    fitting = sorts(C_TYPES[x.name], on.sm) and experts <= MAX_EXPERTS
    if not fitting or slots == 0 or any(size.n * size.k == 0 for size in sizes):
        return 0
    return token_tile(sizes, min(slots, MAX_SLOTS), experts, on.sms, on.sm)


class Chunk(NamedTuple):
    """Some tokens of a call whose slots are sorted together: the first of them, how many, and their slots."""

    first: int
    tokens: int
    slots: int


class Sorted:
    """The sorted slots of a chunk and memory for rows in their order; `rows` has a pointer for each width asked for."""

    def __init__(self, call: Call, experts: int, chunk: Chunk, tile: int, *row_bytes: int) -> None:
        """tile: rows of a token tile. row_bytes: of the arrays of sorted rows that the call needs."""
        self.call, self.experts, self.chunk, self.tile = call, experts, chunk, tile
        found = max_token_tiles(chunk.slots, experts, tile)
        many = rows_of_x(chunk.slots, tile)
        sizes = ctypes.sizeof(TokenTiles), found * ctypes.sizeof(TokenTile), chunk.slots * INDEX
        starts = [0, *accumulate(_aligned(size) for size in (*sizes, *(many * width for width in row_bytes)))]
        base = call.room(starts[-1])
        at = [base + start for start in starts[:-1]]
        (self.counts, self.token_tiles, self.row_of_slots), self.rows = at[:3], at[3:]

    def sort(self, ids: Given, x: Given, to: int, slots_of_x: int) -> None:
        """ids of the chunk -> token tiles, the order of the slots, and in it rows of x [T, K] or [T, top_k, K]."""
        device, chunk, top_k = self.call.device, self.chunk, ids.array.shape[1]
        row_bytes = x.array.shape[-1] * SIZES[x.name]
        one = sort_launch(
            device, gpu(device).sms, ids.name, chunk.slots, self.experts, self.tile, row_bytes, slots_of_x
        )  # fmt: skip
        at = ids.pointer + chunk.first * top_k * SIZES[ids.name]
        x_at = x.pointer + chunk.first * (top_k // slots_of_x) * row_bytes
        self.call.launch(one, at, self.counts, self.token_tiles, self.row_of_slots, x_at, to)

    def multiply(self, p: Problem, x: int, parts: list[Part], y: int) -> None:
        """Sorted rows of x by the experts of a part, or of a gate and what it gates."""
        first, second = parts[0], parts[-1]
        pointers = (
            first.tiles,
            second.tiles,
            first.row_absmax,
            second.row_absmax,
            first.bias.pointer,
            second.bias.pointer,
        )
        self.call.launch(launch(route(p).kernel, p), x, self.counts, self.token_tiles, *pointers, y)

    def combine(
        self, products: int, source: str, ids: Given, weights: Given, bias: Given, y: Given, n: int, summed: bool
    ) -> None:
        """y [T, n] of the sums over a token's experts, or [T, top_k, n] of the products in their places."""
        chunk, top_k = self.chunk, ids.array.shape[1]
        tokens, terms = (chunk.tokens, top_k) if summed else (chunk.slots, 1)
        one = combine_launch(
            self.call.device, source, y.name, tokens, n, terms, ids.name, weights.name, bias.name
        )  # fmt: skip
        slot = chunk.first * top_k
        at = [given.pointer + slot * SIZES[given.name] if given.name else 0 for given in (ids, weights)]
        to = y.pointer + chunk.first * (tokens // chunk.tokens) * n * SIZES[y.name]
        self.call.launch(one, products, self.row_of_slots, *at, bias.pointer, to)

    def problem(
        self, weights: Sequence[Any], x: Given, n: int, stride: ExpertStride, outputs: tuple[Output, ...],
        second: bool = False,
    ) -> Problem:  # fmt: skip
        """The product of sorted rows by experts, of n rows: those of one tensor, or of a gate and what it gates.

        second: whether the launch before has waited for the sort.
        """
        w = weights[0]
        on = gpu(self.call.device)
        routed = Routed(experts=self.experts, stride=stride, tokens=self.tile, ids_are_known=second)
        k, x_type, gated = w.shape[2], C_TYPES[x.name], len(outputs) == 2
        p = Problem(
            w.format, "a16", self.chunk.slots, n, k, on.sm, x_type, outputs, 0, on.device, on.sms, gated, routed
        )  # fmt: skip
        return p._replace(exponent=max(w.exponent for w in weights)) if route(p).kernel.uses_exponent else p


def matmul(call: Call, w: Any, x: Given, ids: Given, part: Part, stride: ExpertStride, tile: int) -> None:
    """y [T, top_k, N] = x @ w[ids].T + bias. Without a bias products are rounded once, to y's type."""
    n, source = w.shape[1], "float32" if part.bias.name else part.y.name
    top_k, k = ids.array.shape[1], w.shape[2]
    for chunk in chunks(ids):
        made = Sorted(call, len(w), chunk, tile, k * ITEMSIZE[x.name], n * ITEMSIZE[source])
        rows, products = made.rows
        made.sort(ids, x, rows, top_k if x.array.ndim == 2 else 1)
        made.multiply(
            made.problem([w], x, n, stride, (Output(n, source),)), rows, [part._replace(bias=NOTHING)], products
        )
        made.combine(products, source, ids, NOTHING, part.bias, part.y, n, False)


def feed_forward(
    call: Call, layer: Layer, x: Given, ids: Given, weights: Given, parts: list[Part], strides: list[ExpertStride],
    tile: int,
) -> None:  # fmt: skip
    """y [T, K] of a layer; parts, strides: of gate, up and down. Between the kernels are values of x's type, and before
    the sum over experts products of y's.
    """
    (gate, up, down), first, last = parts, layer.gate_up[0], layer.down
    n, f, width, source = last.shape[1], layer.width, ITEMSIZE[x.name], down.y.name
    outputs = Output(f, x.name, gate.bias.name, gate=layer.gate), Output(f, "", up.bias.name)
    for chunk in chunks(ids):
        made = Sorted(call, len(last), chunk, tile, first.shape[2] * width, f * width, n * ITEMSIZE[source])
        rows, between, products = made.rows
        made.sort(ids, x, rows, ids.array.shape[1])
        made.multiply(made.problem(layer.gate_up, x, f, strides[0], outputs), rows, [gate, up], between)
        alone = [down._replace(bias=NOTHING)]
        made.multiply(made.problem([last], x, n, strides[-1], (Output(n, source),), True), between, alone, products)
        made.combine(products, source, ids, weights, down.bias, down.y, n, True)


def chunks(ids: Given) -> Iterator[Chunk]:
    """All tokens of a call, so many at a time that their sorted rows take a bounded workspace."""
    t, top_k = ids.array.shape
    step = max(1, MAX_SLOTS // top_k)
    for first in range(0, t, step):
        tokens = min(step, t - first)
        yield Chunk(first, tokens, tokens * top_k)


def _aligned(size: int) -> int:
    return -(-size // ROOM_ALIGNMENT) * ROOM_ALIGNMENT
