"""Products by the experts that a router chose for each token; nothing waits for its ids."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from qgemm import arguments
from qgemm.codec.float_types import DType
from qgemm.cuda.kernels.expert_tiles import Size
from qgemm.cuda.kernels.routes import MAX_SLOTS, MAX_TOP_K, route
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.libraries import library_of
from qgemm.cuda.problem import C_TYPES, ExpertStride, Output, Problem, Routed, gpu
from qgemm.cuda.tensor import DeviceExperts
from qgemm.errors import UnsupportedError
from qgemm.routing import INTEGERS, Layer, check_of_experts, check_routing, check_weights_of, layer_of

from . import grouped
from .arrays import ABSOLUTE, NOTHING, SIZES, Array, Call, Pointer, X
from .grouped import ExpertProduct
from .plan import enter, prepared, scratch
from .products import contiguous, finish, overlap, read, recording, target, temporary, view
from .replay import CallArrays, Scalars, remember, replayed


def matmul(
    w: DeviceExperts,
    x: arguments.Array,
    ids: arguments.Array,
    bias: arguments.Array | None,
    out: arguments.Array | None,
    dtype: DType | None,
) -> Any:
    """y [T, top_k, N] = x @ w[ids].T + bias[ids], by the launches of a call before or by the slow path."""
    y = replayed_matmul(w, x, ids, bias, out, dtype)
    if y is not None:
        return y
    check_routing(x, w, ids)
    if bias is not None:
        check_of_experts(bias, w)
    with recording(x, [w]) as call:
        rows, chosen, added = _read(call, x, ids, ("bias", bias))
        _, n, k = w.shape
        y, stored = _target(call, (*ids.shape, n), out, dtype, [rows, chosen, added])
        product = _product(w, stored, added)
        tile = grouped.token_tile_of(call, rows, chosen, len(w), Size(w.format, n, k))
        if tile:
            grouped.matmul(call, w, rows, chosen, product, stride_of(w), tile)
        else:
            routed = Routed(len(w), ids.shape[1], chosen.dtype, "", len(x.shape) == 3, False, stride_of(w))
            _launch(call, w, routed, rows, chosen, NOTHING, n, [product])
        return _finished(call, w, _product_key(x, ids, bias, out, dtype), y, stored, out)


def feed_forward(
    x: arguments.Array, gate_up: Sequence[DeviceExperts], down: DeviceExperts, ids: arguments.Array,
    weights: arguments.Array, activation: str, biases: Sequence[arguments.Array | None] | None,
    out: arguments.Array | None, dtype: DType | None,
) -> Any:  # fmt: skip
    """y [T, K], by the launches of a call before or by the slow path.

    Both products of gate and up are one launch where they share a format; then comes the sum over experts.
    """
    y = replayed_layer(down, x, gate_up, ids, weights, activation, biases, out, dtype)
    if y is not None:
        return y
    layer = layer_of(gate_up, down, biases, activation)
    check_routing(x, layer.gate_up[0], ids, shared=True)
    check_weights_of(weights, ids)
    every = *layer.gate_up, down
    for bias, w in zip(layer.biases, every, strict=True):
        if bias is not None:
            check_of_experts(bias, w)
    with recording(x, every) as call:
        rows, chosen, factors, *added = _read(
            call, x, ids, ("weights", weights), *(("bias", bias) for bias in layer.biases)
        )
        y, stored = _target(call, tuple(x.shape), out, dtype, [rows, chosen, factors, *added])
        products = [*_gate_and_up(layer, added), _product(down, stored, added[-1])]
        tile = _token_tile(call, layer, rows, chosen)
        if tile:
            grouped.feed_forward(call, layer, rows, chosen, factors, products, [stride_of(w) for w in every], tile)
        else:
            _by_slots(call, layer, rows, chosen, factors, products)
        return _finished(
            call, down, _layer_key(x, gate_up, ids, weights, activation, biases, out, dtype), y, stored, out
        )


def replayed_matmul(
    w: DeviceExperts,
    x: arguments.Array,
    ids: arguments.Array,
    bias: arguments.Array | None,
    out: arguments.Array | None,
    dtype: DType | None,
) -> Any:
    """y of `qgemm.moe_matmul` by the launches of a call before; None if there is none like it."""
    return replayed(w.plans, *_product_key(x, ids, bias, out, dtype))


def replayed_layer(
    down: DeviceExperts, x: arguments.Array, gate_up: arguments.Weights | Sequence[arguments.Weights],
    ids: arguments.Array, weights: arguments.Array, function: str, biases: Sequence[arguments.Array | None] | None,
    out: arguments.Array | None, dtype: DType | None,
) -> Any:  # fmt: skip
    """y of `qgemm.moe` by the launches of a call before; None if there is none like it."""
    try:
        scalars, arrays = _layer_key(x, gate_up, ids, weights, function, biases, out, dtype)
    except (AttributeError, TypeError):  # weights that are no experts of a device
        return None
    return replayed(down.plans, scalars, arrays)


def _product_key(
    x: arguments.Array,
    ids: arguments.Array,
    bias: arguments.Array | None,
    out: arguments.Array | None,
    dtype: DType | None,
) -> tuple[Scalars, CallArrays]:
    """The scalar arguments and the arrays of a product."""
    arrays = (x, ids) if out is None else (x, out, ids)
    return ("", dtype, out is None, bias is None), arrays if bias is None else (*arrays, bias)


def _layer_key(
    x: arguments.Array,
    gate_up: Any,
    ids: arguments.Array,
    weights: arguments.Array,
    function: str,
    biases: Sequence[arguments.Array | None] | None,
    out: arguments.Array | None,
    dtype: DType | None,
) -> tuple[Scalars, CallArrays]:
    """The scalar arguments and the arrays of a layer."""
    first = function, dtype, out is None
    if type(gate_up) in (tuple, list):
        scalars: Scalars = (*first, *[w.serial for w in gate_up])
    else:
        scalars = *first, gate_up.serial
    arrays = (x, ids, weights) if out is None else (x, out, ids, weights)
    if biases is None:
        return scalars, arrays
    return (*scalars, *[bias is None for bias in biases]), (*arrays, *[bias for bias in biases if bias is not None])


# ---------------------------------------------------------------- the slow path


def stride_of(w: DeviceExperts) -> ExpertStride:
    """From an expert to the next."""
    return ExpertStride(int(w.data.shape[1]), w.shape[1])


def _read(call: Call, x: arguments.Array, ids: arguments.Array, *others: tuple[str, Any]) -> list[Array]:
    """x, ids and other arrays, with their names, as kernels read them."""
    rows, chosen = read(call, x, "x", base=X), read(call, ids, "ids", INTEGERS)
    return [rows, chosen, *[read(call, array, name) for name, array in others]]


def _target(
    call: Call, shape: tuple[int, ...], out: arguments.Array | None, dtype: DType | None, reads: Sequence[Array]
) -> tuple[Array, Array]:
    """y, and the array that kernels store it into: the same, or float32 where they cannot write in place."""
    y = target(call, out, shape, dtype)
    direct = y.dtype in C_TYPES and contiguous(y)
    if out is not None:
        direct = direct and library_of(out) is call.library and not any(overlap(array, y) for array in reads)
    return y, y if direct else temporary(call, shape)


def _finished(
    call: Call, w: DeviceExperts, key: tuple[Scalars, CallArrays], y: Array, stored: Array, out: arguments.Array | None
) -> Any:
    """y as the caller gets it, once the last weights of a call remember it."""
    if stored is not y:
        view(y)[...] = view(stored)
    finish(call, [y], [out])
    remember(w.plans, call, *key, copies=False)
    return call.ys[0]


def _product(w: DeviceExperts, y: Array, bias: Array) -> ExpertProduct:
    return ExpertProduct(Pointer(ABSOLUTE, w.pointer), Pointer(ABSOLUTE, w.row_absmax), y, bias)


def _token_tile(call: Call, layer: Layer, x: Array, ids: Array) -> int:
    """Rows of a token tile where the layer's tokens are sorted by expert, else 0."""
    (first, *_), down = layer.gate_up, layer.down
    if len({w.format for w in layer.gate_up}) > 1:
        return 0
    sizes = Size(first.format, 2 * layer.width, first.shape[2], True), Size(down.format, down.shape[1], layer.width)
    return grouped.token_tile_of(call, x, ids, len(down), *sizes)


def _by_slots(
    call: Call, layer: Layer, x: Array, ids: Array, weights: Array, products: Sequence[ExpertProduct]
) -> None:
    """A layer of few tokens: every token looks up its experts."""
    (gate, up, last), first, down = products, layer.gate_up[0], layer.down
    (t, top_k), f = ids.values.shape, layer.width
    _check_top_k(top_k)

    def middle_of(dtype: str) -> Array:
        return Array(None, scratch(call, t * top_k * f * SIZES[dtype]), dtype)

    middle = middle_of(x.dtype)
    routed = Routed(len(down), top_k, ids.dtype, weights.dtype, False, False, stride_of(first))
    if len({w.format for w in layer.gate_up}) == 1:
        _launch(call, first, routed, x, ids, weights, f, [gate._replace(y=middle), up], layer.gate)
    else:
        values, second = middle_of("float32"), layer.gate_up[1]
        alone = routed._replace(weights="")
        _launch(call, first, alone, x, ids, NOTHING, f, [gate._replace(y=values)])
        gated = up._replace(y=middle, residual=values)
        routed = routed._replace(stride=stride_of(second))
        _launch(call, second, routed, x, ids, weights, f, [gated], layer.gate)
    summed = routed._replace(x_of_slots=True, summed=True, stride=stride_of(down), ids_are_known=True)
    _launch(call, down, summed, middle, ids, weights, down.shape[1], [last])


def _check_top_k(top_k: int) -> None:
    """UnsupportedError for more experts of a token than the kernel sums: the only place here that asks one kernel."""
    if top_k > MAX_TOP_K:
        raise UnsupportedError(f"a layer sums at most {MAX_TOP_K} experts of a token by this kernel, got {top_k}")


def _gate_and_up(layer: Layer, biases: Sequence[Array]) -> tuple[ExpertProduct, ExpertProduct]:
    """Gate and up, without a y; in one tensor they begin at rows 0 and F of every expert."""
    if len(layer.gate_up) == 2:
        gate, up = (_product(w, NOTHING, bias) for w, bias in zip(layer.gate_up, biases[:2], strict=True))
        return gate, up
    both, bias, f = layer.gate_up[0], biases[0], layer.width
    if f % tiles.ROWS:
        why = f"F is a multiple of {tiles.ROWS} where gate and up are one tensor"
        raise UnsupportedError(f"{why}, got {f} of {both!r}; give them as two")
    gate = _product(both, NOTHING, bias)
    return gate, ExpertProduct(
        gate.tiles.plus(prod(tiles.tiles_shape(both.format, f, both.shape[2]))),
        gate.row_absmax.plus(f * SIZES["float32"]),
        NOTHING,
        bias._replace(pointer=bias.element(f)),
    )


def _launch(
    call: Call,
    w: DeviceExperts,
    routed: Routed,
    x: Array,
    ids: Array,
    weights: Array,
    n: int,
    products: Sequence[ExpertProduct],
    gate: str = "",
) -> None:
    """Products by experts of w's format, of as many tokens at a time as a grid holds."""
    (t, top_k), k, fused = ids.values.shape, w.shape[2], len(products) == 2
    if t * top_k * n == 0 or k == 0:
        for p in products:
            if p.y.values is not None:  # scratch memory between the products has no values then
                view(p.y)[...] = 0
        return
    on = gpu(call.device)
    outputs = tuple(Output(n, p.y.dtype, p.bias.dtype, p.residual.dtype) for p in products)
    outputs = (outputs[0]._replace(gate=gate), *outputs[1:])
    per_token = 1 if routed.summed else top_k
    rows_of_x = top_k if routed.x_of_slots else 1
    step = MAX_SLOTS // per_token
    for first in range(0, t, step):
        m = min(step, t - first)
        problem = Problem(
            w.format, "a16", m, n, k, on.sm, C_TYPES[x.dtype], outputs, 0, on.device, on.sms, fused, routed
        )  # fmt: skip
        slot, row = first * top_k, first * per_token * n
        pointers = [ids.element(slot), weights.element(slot), x.element(first * rows_of_x * k)]
        for p in products:
            pointers += [p.tiles, p.y.element(row), p.bias.pointer, p.residual.element(row)]
        enter(call, prepared(call, route(problem).kernel, problem), *pointers)
