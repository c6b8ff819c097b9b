"""Products by the experts that a router chose for each token; nothing waits for its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qgemm.arguments import Array as AnyArray
from qgemm.arguments import Weights
from qgemm.codec.float_types import DType
from qgemm.cuda.kernels.expert_tiles import Size
from qgemm.cuda.kernels.routes import MAX_SLOTS, MAX_TOP_K, route
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.libraries import library_of
from qgemm.cuda.problem import C_TYPES, Routed
from qgemm.cuda.tensor import DeviceExperts
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.routing import INTEGERS, Layer, check_layer, check_of_experts, check_product, check_routing, check_weights_of

from . import grouped
from .arrays import NOTHING, SIZES, Array, Call, X
from .plan import Product, Source, enter, gated_pair, prepared, problem, scratch
from .products import contiguous, finish, overlap, read, recording, target, temporary, view
from .replay import remember, replayed


def matmul(
    x: AnyArray, w: DeviceExperts, ids: AnyArray, activation: str | None, bias: AnyArray | None, out: AnyArray | None,
    dtype: DType | None, check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, top_k, N] = x @ w[ids].T + bias[ids], by a replay or by the slow path."""
    if check_ids or activation not in (None, "a16"):
        _check_product(x, w, ids, activation, check_ids)
    arrays = (x, ids) if out is None else (x, out, ids)
    key = ("", dtype, out is None, bias is None), arrays if bias is None else (*arrays, bias)
    y = replayed(w.plans, *key) if type(w) is DeviceExperts else None
    if y is not None:
        return y
    _check_product(x, w, ids, activation)
    check_routing(x, w, ids)
    if bias is not None:
        check_of_experts(bias, w)
    with recording(x, [w]) as call:
        reads = rows, chosen, added = _read(call, x, ids, ("bias", bias))
        _, n, k = w.shape
        y, stored = _target(call, (*ids.shape, n), out, dtype, reads)
        product = Product(w, n, stored, added)
        tile = grouped.token_tile_of(call, rows, chosen, len(w), Size(w.format, n, k))
        if tile:
            grouped.matmul(call, rows, chosen, product, tile)
        else:
            _launch(call, rows, chosen, NOTHING, [product], x_of_slots=len(x.shape) == 3)
        _finish(call, y, stored, out)
        return remember(w.plans, call, *key, copies=False)


def feed_forward(
    x: AnyArray, gate_up: Weights | Sequence[Weights], down: DeviceExperts, ids: AnyArray, weights: AnyArray,
    activation: str, biases: Sequence[AnyArray | None] | None, out: AnyArray | None, dtype: DType | None,
    check_ids: bool,
) -> Any:  # fmt: skip
    """y [T, K] of a layer, by a replay or by the slow path."""
    pair: Any = gate_up
    if type(pair) not in (tuple, list):
        pair = (pair,) if isinstance(pair, Packed) else tuple(pair)
    if check_ids:
        check_layer(x, pair, down, ids, activation, biases, check_ids)
    arrays = (x, ids, weights) if out is None else (x, out, ids, weights)
    absent: Sequence[bool] = ()
    if biases is not None:
        arrays, absent = (*arrays, *[bias for bias in biases if bias is not None]), [bias is None for bias in biases]
    key = (activation, dtype, out is None, *[getattr(w, "serial", None) for w in pair], *absent), arrays
    y = replayed(down.plans, *key) if type(down) is DeviceExperts else None
    if y is not None:
        return y
    layer = check_layer(x, pair, down, ids, activation, biases, False)
    check_routing(x, layer.gate_up[0], ids, shared=True)
    check_weights_of(weights, ids)
    every = *layer.gate_up, down
    for bias, w in zip(layer.biases, every, strict=True):
        if bias is not None:
            check_of_experts(bias, w)
    with recording(x, every) as call:
        others = ("weights", weights), *[("bias", bias) for bias in layer.biases]
        reads = rows, chosen, factors, *terms = _read(call, x, ids, *others)
        y, stored = _target(call, tuple(x.shape), out, dtype, reads)
        products = *_gate_and_up(layer, terms), Product(down, down.shape[1], stored, terms[-1])
        tile = _token_tile(call, layer, rows, chosen)
        if tile:
            grouped.feed_forward(call, layer.gate, rows, chosen, factors, products, tile)
        else:
            _by_slots(call, layer.gate, rows, chosen, factors, products)
        _finish(call, y, stored, out)
        return remember(down.plans, call, *key, copies=False)


# ---------------------------------------------------------------- the slow path


def _check_product(
    x: AnyArray, w: DeviceExperts, ids: AnyArray, activation: str | None, check_ids: bool = False
) -> None:
    if check_product(x, w, ids, activation, check_ids) != "a16":
        raise UnsupportedError("products by experts on a GPU have activation 'a16' only")


def _read(call: Call, x: AnyArray, ids: AnyArray, *others: tuple[str, Any]) -> list[Array]:
    """x, ids and other arrays, with their names, as kernels read them."""
    rows, chosen = read(call, x, "x", base=X), read(call, ids, "ids", INTEGERS)
    return [rows, chosen, *[read(call, array, name) for name, array in others]]


def _target(
    call: Call, shape: tuple[int, ...], out: AnyArray | None, dtype: DType | None, reads: Sequence[Array]
) -> tuple[Array, Array]:
    """y, and the array that kernels store it into: the same, or float32 where they cannot write in place."""
    y = target(call, out, shape, dtype)
    direct = y.dtype in C_TYPES and contiguous(call, y)
    if out is not None:
        direct = direct and library_of(out) is call.library and not any(overlap(call, array, y) for array in reads)
    return y, y if direct else temporary(call, shape)


def _finish(call: Call, y: Array, stored: Array, out: AnyArray | None) -> None:
    """Copy the kernels' result into y where they could not store it, and make y the output of the call."""
    if stored is not y:
        call.library.assign(view(y), view(stored))
    finish(call, [y], [out])


def _token_tile(call: Call, layer: Layer, x: Array, ids: Array) -> int:
    """Rows of a token tile where the layer's tokens are sorted by expert, else 0."""
    (first, *_), down = layer.gate_up, layer.down
    if len({w.format for w in layer.gate_up}) > 1:
        return 0
    sizes = Size(first.format, 2 * layer.width, first.shape[2], True), Size(down.format, down.shape[1], layer.width)
    return grouped.token_tile_of(call, x, ids, len(down), *sizes)


def _gate_and_up(layer: Layer, biases: Sequence[Array]) -> list[Product]:
    """The products by gate and up, without a y; in one tensor they begin at rows 0 and F of every expert."""
    f, both = layer.width, layer.gate_up[0]
    if len(layer.gate_up) == 2:
        return [Product(w, f, bias=bias) for w, bias in zip(layer.gate_up, biases[:2], strict=True)]
    if f % tiles.ROWS and both.format.tiled:
        reason = f"F is a multiple of {tiles.ROWS} where gate and up are one tensor"
        raise UnsupportedError(f"{reason}, got {f} of {both!r}; give them as two")
    return [Product(both, f, bias=biases[0], row=row) for row in (0, f)]


def _by_slots(call: Call, function: str, x: Array, ids: Array, weights: Array, products: Sequence[Product]) -> None:
    """A layer of few tokens: every token looks up its experts."""
    gate, up, down = products
    t, top_k = ids.values.shape
    if top_k > MAX_TOP_K:
        raise UnsupportedError(f"a layer sums at most {MAX_TOP_K} experts of a token by this kernel, got {top_k}")
    middle = Array(None, scratch(call, t * top_k * gate.n * SIZES[x.dtype]), x.dtype)
    fused = gate.w.format == up.w.format
    pair = gated_pair(call, [gate, up], middle, function, fused)
    if fused:
        _launch(call, x, ids, weights, pair)
    else:
        _launch(call, x, ids, NOTHING, pair[:1])
        _launch(call, x, ids, weights, pair[1:])
    _launch(call, middle, ids, weights, [down], x_of_slots=True, summed=True, ids_are_known=True)


def _launch(
    call: Call, x: Array, ids: Array, weights: Array, products: Sequence[Product], *, x_of_slots: bool = False,
    summed: bool = False, ids_are_known: bool = False,
) -> None:  # fmt: skip
    """Products by experts of one format, of as many tokens at a time as a grid holds; the flags are those of Routed."""
    (t, top_k), w, n = ids.values.shape, products[0].w, products[0].n
    k = w.shape[-1]
    if t * top_k * n == 0 or k == 0:
        for p in products:
            if p.y.values is not None:  # scratch memory between the products has no values then
                call.library.assign(view(p.y), 0)
        return
    routed = Routed(
        w.shape[0], top_k, ids.dtype, weights.dtype, x_of_slots, summed, products[0].stride, ids_are_known=ids_are_known
    )  # fmt: skip
    outputs = tuple(p.output for p in products)
    y_rows, x_rows = 1 if summed else top_k, top_k if x_of_slots else 1
    step = MAX_SLOTS // y_rows
    for first in range(0, t, step):
        launched = problem(w, Source(min(step, t - first), k, x.dtype))._replace(
            n=n, outputs=outputs, exponent=0, gated=len(products) == 2, routed=routed
        )
        slot, row = first * top_k, first * y_rows * n
        pointers = [pointer for product in products for pointer in product.pointers(row)]
        arrays = ids.element(slot), weights.element(slot), x.element(first * x_rows * k)
        enter(call, prepared(call, route(launched).kernel, launched), *arrays, *pointers)
