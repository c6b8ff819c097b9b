"""Weights of experts on a GPU, and products by those that a router chose for each token; nothing waits for its ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from qgemm.codec.format import Blocks, Format
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.routing import Layer, check_of_experts, check_routing, check_weights_of, layer_of
from qgemm.tensor import Tensor

from . import expert_plans, grouped, upload
from .expert_arrays import NOTHING, SIZES, Call, Given, Part
from .kernels.expert_tiles import Size
from .kernels.routes import MAX_SLOTS, MAX_TOP_K, launch, route
from .layout import tile as tiles
from .problem import C_TYPES, ExpertStride, Output, Problem, Routed, gpu
from .tensor import SERIALS, DeviceTensor, half_exponent


class DeviceExperts(Packed):
    """Weights [E, N, K] on a CUDA device, a matrix for each expert; made by `to_device()` of such a Tensor.

    data: a CuPy array of bytes [E, bytes of an expert], each as a DeviceTensor has them: tiles, and behind them bounds
    of the rows. `experts[e]` is the DeviceTensor of one, over the same memory.
    """

    shape: tuple[int, int, int]

    def __init__(self, format: Format, shape: tuple[int, int, int], data: Any, name: str = "") -> None:
        self.format, self.shape, self.data, self.name = format, shape, data, name
        self.pointer: int = data.data.ptr
        self.device: int = data.device.id
        self.serial = next(SERIALS)
        self.plans: dict[Any, Any] = {}  # see expert_plans.py

    @cached_property
    def exponent(self) -> int:
        """Of a power of two that brings all weights into the range of float16; waits for the device at first."""
        bounds = self.data[:, self.tiles_nbytes :].copy().view(np.float32)
        return half_exponent(float(bounds.max()) if bounds.size else 0.0)

    @classmethod
    def pack(cls, tensor: Tensor, blocks: Blocks) -> DeviceExperts:
        """Upload the blocks of a Tensor [E, N, K] to the current device, one expert after the other."""
        import cupy

        fmt, (e, n, k) = tensor.format, tensor.shape
        data = cupy.empty((e, upload.tiles_nbytes(fmt, n, k)), np.uint8)
        for expert in range(e if data.size else 0):
            upload.upload(fmt, blocks[expert], data[expert])
        made = cls(fmt, (e, n, k), data, tensor.name)
        _ = made.exponent  # now: a CUDA graph that is being captured could not wait
        return made

    @property
    def row_absmax(self) -> int:
        """Address of the rows' largest magnitudes of expert 0, behind its tiles."""
        return self.pointer + self.tiles_nbytes

    @property
    def tiles_nbytes(self) -> int:
        """Bytes of the tiles of an expert."""
        return prod(tiles.tiles_shape(self.format, *self.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes on the device: those of the blocks, and the padding to whole tiles."""
        return int(self.data.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> DeviceTensor:
        _, n, k = self.shape
        memory = self.data[int(expert)]
        shape = tiles.tiles_shape(self.format, n, k)
        size = prod(shape)
        bounds = memory[size:].view(np.float32)
        return DeviceTensor(self.format, (n, k), memory[:size].reshape(shape), bounds, self.name)

    def to_host(self) -> Tensor:
        """Back to a Tensor, byte for byte as it was packed."""
        e, n, k = self.shape
        blocks = np.empty((e, n, self.format.blocks_in(k)), self.format.dtype)
        for expert in range(e if blocks.size else 0):
            blocks[expert] = self[expert].to_host().blocks
        return Tensor(self.format, self.shape, blocks, self.name)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<DeviceExperts{name} {self.format} {' x '.join(map(str, self.shape))} on cuda:{self.device}>"


# ---------------------------------------------------------------- products


def matmul(x: Any, w: DeviceExperts, ids: Any, bias: Any, out: Any, dtype: DTypeLike | None) -> Any:
    """y [T, top_k, N] = x @ w[ids].T + bias[ids]."""
    call = Call(x, w)
    check_routing(x, w, ids)
    if bias is not None:
        check_of_experts(bias, w)
    with call.current():
        given, chosen = call.read(call.x, "x"), call.read(ids, "ids", ("int32", "int64"))
        added, n = call.read(bias, "bias"), w.shape[1]
        y = call.target((*ids.shape, n), out, dtype)
        part = Part(w.pointer, w.row_absmax, y, added)
        tile = grouped.token_tile_of(call, given, chosen, len(w), Size(w.format, n, w.shape[2]))
        if tile:
            grouped.matmul(call, w, given, chosen, part, stride_of(w), tile)
        else:
            routed = Routed(len(w), ids.shape[1], chosen.name, "", len(x.shape) == 3, False, stride_of(w))
            _launch(call, w, routed, given, chosen, NOTHING, n, [part])
        expert_plans.remember(call, w, *expert_plans.of_product(x, ids, bias, out, dtype), y, out, dtype)
        return call.handed_back(y, out, dtype)


def feed_forward(
    x: Any, gate_up: Sequence[Any], down: Any, ids: Any, weights: Any, activation: str, biases: Sequence[Any] | None,
    out: Any, dtype: DTypeLike | None,
) -> Any:  # fmt: skip
    """y [T, K]: both products of gate and up in one launch where they share a format, then the sum over experts."""
    layer = layer_of(gate_up, down, biases, activation)
    first = layer.gate_up[0]
    call = Call(x, first)
    check_routing(x, first, ids, shared=True)
    check_weights_of(weights, ids)
    for bias, w in zip(layer.biases, (*layer.gate_up, down), strict=True):
        if w.device != call.device:
            raise UnsupportedError(f"experts are on one device, got {first!r} and {w!r}")
        if bias is not None:
            check_of_experts(bias, w)
    with call.current():
        given, chosen = call.read(call.x, "x"), call.read(ids, "ids", ("int32", "int64"))
        factors = call.read(weights, "weights")
        added = [call.read(bias, "bias") for bias in layer.biases]
        y = call.target(tuple(x.shape), out, dtype)
        gate, up = _gate_and_up(layer, added)
        parts = [gate, up, Part(down.pointer, down.row_absmax, y, added[-1])]
        tile = _token_tile(call, layer, given, chosen)
        if tile:
            strides = [stride_of(w) for w in (*layer.gate_up, down)]
            grouped.feed_forward(call, layer, given, chosen, factors, parts, strides, tile)
        else:
            _by_slots(call, layer, given, chosen, factors, parts)
        words = expert_plans.of_layer(x, gate_up, ids, weights, activation, biases, out, dtype)
        expert_plans.remember(call, down, *words, y, out, dtype)
        return call.handed_back(y, out, dtype)


def _token_tile(call: Call, layer: Layer, x: Given, ids: Given) -> int:
    """Rows of a token tile where the layer's tokens are sorted by expert, else 0."""
    (first, *_), down = layer.gate_up, layer.down
    if len({w.format for w in layer.gate_up}) > 1:
        return 0
    sizes = Size(first.format, 2 * layer.width, first.shape[2], True), Size(down.format, down.shape[1], layer.width)
    return grouped.token_tile_of(call, x, ids, len(down), *sizes)


def _by_slots(call: Call, layer: Layer, x: Given, ids: Given, weights: Given, parts: list[Part]) -> None:
    """A layer of few tokens: each looks its experts up."""
    (gate, up, last), first, down = parts, layer.gate_up[0], layer.down
    (t, top_k), f = ids.array.shape, layer.width
    if top_k > MAX_TOP_K:
        raise UnsupportedError(f"a layer sums at most {MAX_TOP_K} experts of a token by this kernel, got {top_k}")

    def made(name: str) -> Given:
        return Given(None, call.room(t * top_k * f * SIZES[name]), name)

    middle = made(x.name)
    routed = Routed(len(down), top_k, ids.name, weights.name, False, False, stride_of(first))
    if len({w.format for w in layer.gate_up}) == 1:
        _launch(call, first, routed, x, ids, weights, f, [gate._replace(y=middle), up], layer.gate)
    else:
        values, second = made("float32"), layer.gate_up[1]
        alone = routed._replace(weights="")
        _launch(call, first, alone, x, ids, NOTHING, f, [gate._replace(y=values)])
        gated = up._replace(y=middle, residual=values)
        routed = routed._replace(stride=stride_of(second))
        _launch(call, second, routed, x, ids, weights, f, [gated], layer.gate)
    summed = routed._replace(x_of_slots=True, summed=True, stride=stride_of(down), ids_are_known=True)
    _launch(call, down, summed, middle, ids, weights, down.shape[1], [last])


def stride_of(w: DeviceExperts) -> ExpertStride:
    """From an expert to the next."""
    return ExpertStride(int(w.data.shape[1]), w.shape[1])


def _gate_and_up(layer: Layer, biases: list[Given]) -> tuple[Part, Part]:
    """Gate and up, without a y; those of one tensor begin at rows 0 and F of each expert."""
    if len(layer.gate_up) == 2:
        gate, up = (
            Part(w.pointer, w.row_absmax, NOTHING, bias) for w, bias in zip(layer.gate_up, biases[:2], strict=True)
        )
        return gate, up
    both, bias, f = layer.gate_up[0], biases[0], layer.width
    if f % tiles.ROWS:
        why = f"F is a multiple of {tiles.ROWS} where gate and up are one tensor"
        raise UnsupportedError(f"{why}, got {f} of {both!r}; give them as two")
    shape = tiles.tiles_shape(both.format, f, both.shape[2])
    second = bias._replace(pointer=bias.pointer + f * SIZES[bias.name]) if bias.name else bias
    up = Part(both.pointer + prod(shape), both.row_absmax + f * SIZES["float32"], NOTHING, second)
    return Part(both.pointer, both.row_absmax, NOTHING, bias), up


def _launch(
    call: Call, w: DeviceExperts, routed: Routed, x: Given, ids: Given, weights: Given, n: int, parts: list[Part],
    gate: str = "",
) -> None:  # fmt: skip
    """Products by experts of w's format, of as many tokens at a time as a grid holds."""
    (t, top_k), k, fused = ids.array.shape, w.shape[2], len(parts) == 2
    if t * top_k * n == 0 or k == 0:
        for part in parts:
            if part.y.array is not None:  # what is between the products has no values then
                part.y.array[...] = 0
        return
    on = gpu(call.device)
    outputs = tuple(Output(n, part.y.name, part.bias.name, part.residual.name) for part in parts)
    outputs = (outputs[0]._replace(gate=gate), *outputs[1:])
    per_token = 1 if routed.summed else top_k
    rows_of_x = top_k if routed.x_of_slots else 1
    step = MAX_SLOTS // per_token
    for first in range(0, t, step):
        m = min(step, t - first)
        p = Problem(
            w.format, "a16", m, n, k, on.sm, C_TYPES[x.name], outputs, 0, on.device, on.sms, fused, routed
        )  # fmt: skip

        def at(given: Given, row: int, first: int = first) -> int:
            return given.pointer + first * row * SIZES[given.name] if given.name else 0

        pointers = [at(ids, top_k), at(weights, top_k), at(x, rows_of_x * k)]
        for part in parts:
            row = per_token * n
            pointers += [part.tiles, at(part.y, row), part.bias.pointer, at(part.residual, row)]
        call.launch(launch(route(p).kernel, p), *pointers)
