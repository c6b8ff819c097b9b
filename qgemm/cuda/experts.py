"""Weights of experts on a GPU, and products by those that a router chose for each token; nothing waits for its ids."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from qgemm.arguments import check_out, described, output_dtype
from qgemm.arrays import as_cupy, check_no_grad, like, on_cuda
from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.routing import Layer, check_of_experts, check_routing, check_weights_of
from qgemm.tensor import Tensor

from . import upload
from .driver.device import require
from .kernels.moe_decode import MAX_SLOTS, MAX_TOP_K
from .kernels.routes import launch, route
from .layout import tile as tiles
from .libraries import Library, cupy_library, library_of
from .problem import C_TYPES, ITEMSIZE, ExpertStride, Output, Problem, Routed, gpu
from .tensor import DeviceTensor, check_tiled

ALIGNMENT = 16  # of x, which kernels read 16 bytes at a time
SIZES = {**ITEMSIZE, "int32": 4, "int64": 8, "float64": 8}


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

    @classmethod
    def pack(cls, tensor: Tensor) -> DeviceExperts:
        """Upload a Tensor's blocks to the current device, one expert after the other."""
        check_tiled(tensor)
        fmt, (e, n, k) = tensor.format, tensor.shape
        if fmt.plain:
            raise UnsupportedError(f"{tensor!r}: no GPU kernel multiplies by experts of plain numbers; quantize them")
        require("to_device()")
        import cupy

        data = cupy.empty((e, upload.tiles_nbytes(fmt, n, k)), np.uint8)
        for expert in range(e if data.size else 0):
            upload.upload(fmt, tensor[expert].blocks, data[expert])
        return cls(fmt, (e, n, k), data, tensor.name)

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


# ---------------------------------------------------------------- arrays of a call


class Given(NamedTuple):
    """An array of a call as kernels read it; pointer 0 and name "" for none."""

    array: Any
    pointer: int
    name: str

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.pointer + (prod(self.array.shape) * SIZES[self.name] if self.name else 0)


NOTHING = Given(None, 0, "")


class Call:
    """What arrays of a call are read by: the library of x, on the device of the experts, whose stream it works on."""

    def __init__(self, x: Any, w: DeviceExperts) -> None:
        self.source, self.device = x, w.device
        found = library_of(x)
        self.library: Library = found or cupy_library()
        self.x = x if found is not None else as_cupy(x)
        self.reads: list[Given] = []
        if self.library.device(self.x) != self.device:
            raise UnsupportedError(f"x is on cuda:{self.library.device(self.x)}, {w!r}")

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device current where another one is."""
        import cupy

        known = self.library.current_device
        return nullcontext() if known is None or known() == self.device else cupy.cuda.Device(self.device)

    def read(self, array: Any, who: str, types: tuple[str, ...] = tuple(C_TYPES)) -> Given:
        """An array, contiguous and of one of some types; float64 becomes float32. None is nothing."""
        if array is None:
            return NOTHING
        library = self.library
        if not on_cuda(array):
            raise UnsupportedError(f"{who} is on the host, the product is on a CUDA device; got {described(array)}")
        if library_of(array) is not library:
            if library is not cupy_library():
                raise UnsupportedError(f"{who} is of another library than x: {described(array)}")
            array = as_cupy(array, who)
        if library.device(array) != self.device:
            raise UnsupportedError(f"{who} is on cuda:{library.device(array)}, the experts on cuda:{self.device}")
        if library.name(array.dtype) not in types:
            array = library.cast(array, "float32")
        if not library.contiguous(array) or library.pointer(array) % ALIGNMENT:
            array = library.copy(array)
        found = Given(array, library.pointer(array), library.name(array.dtype))
        self.reads.append(found)
        return found

    def target(self, shape: tuple[int, ...], out: Any, dtype: DTypeLike | None) -> Given:
        """The memory of y: that of `out` if a kernel can write there, else a new array."""
        name = output_dtype(dtype).name
        if out is not None:
            if not on_cuda(out):
                raise UnsupportedError(f"out must be on the CUDA device of the experts, got {type(out).__name__}")
            check_no_grad(out)
            check_out(out, shape, dtype)
            name = str(out.dtype).removeprefix("torch.")
            if library_of(out) is self.library and self.library.contiguous(out) and name in C_TYPES:
                given = Given(out, self.library.pointer(out), name)
                if all(given.end <= one.pointer or one.end <= given.pointer for one in self.reads):
                    return given
        made_in = name if name in C_TYPES and out is None else "float32"
        made = self.new(shape, made_in)
        return Given(made, self.library.pointer(made), made_in)

    def new(self, shape: tuple[int, ...], name: str) -> Any:
        """A new array."""
        return self.library.new(shape, self.library.dtype(name), self.device)()

    def handed_back(self, y: Given, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as an array of x's library and of a type."""
        if out is not None:
            if out is not y.array:
                (as_cupy(out, "out") if library_of(out) is not self.library else out)[...] = y.array
            return out
        name = output_dtype(dtype).name
        made = y.array if name == y.name else self.library.cast(y.array, name)
        return like(self.source, made)


# ---------------------------------------------------------------- products


class Part(NamedTuple):
    """One product of a launch: the address of expert 0's tiles, y, bias, and the gate's values or nothing."""

    tiles: int
    y: Given
    bias: Given
    residual: Given = NOTHING


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
        routed = Routed(len(w), ids.shape[1], chosen.name, "", len(x.shape) == 3, False, stride_of(w))
        _launch(call, w, routed, given, chosen, NOTHING, n, [Part(w.pointer, y, added)])
        return call.handed_back(y, out, dtype)


def feed_forward(x: Any, layer: Layer, ids: Any, weights: Any, out: Any, dtype: DTypeLike | None) -> Any:
    """y [T, K]: both products of gate and up in one launch where they share a format, then the sum over experts."""
    first, down = layer.gate_up[0], layer.down
    call = Call(x, first)
    check_routing(x, first, ids, shared=True)
    check_weights_of(weights, ids)
    if ids.shape[1] > MAX_TOP_K:
        raise UnsupportedError(f"a layer sums at most {MAX_TOP_K} experts of a token on a GPU, got {ids.shape[1]}")
    for bias, w in zip(layer.biases, (*layer.gate_up, down), strict=True):
        if w.device != call.device:
            raise UnsupportedError(f"experts are on one device, got {first!r} and {w!r}")
        if bias is not None:
            check_of_experts(bias, w)
    with call.current():
        given, chosen = call.read(call.x, "x"), call.read(ids, "ids", ("int32", "int64"))
        factors = call.read(weights, "weights")
        biases = [call.read(bias, "bias") for bias in layer.biases]
        y = call.target(tuple(x.shape), out, dtype)
        shape = (*ids.shape, layer.width)
        between = call.new(shape, given.name)
        middle = Given(between, call.library.pointer(between), given.name)
        routed = Routed(len(down), ids.shape[1], chosen.name, factors.name, False, False, stride_of(first))
        gate, up = _gate_and_up(layer, biases, middle)
        if len({w.format for w in layer.gate_up}) == 1:
            _launch(call, first, routed, given, chosen, factors, layer.width, [gate, up], layer.gate)
        else:
            values = call.new(shape, "float32")
            made, second = Given(values, call.library.pointer(values), "float32"), layer.gate_up[1]
            alone = routed._replace(weights="")
            _launch(call, first, alone, given, chosen, NOTHING, layer.width, [gate._replace(y=made)])
            gated = up._replace(y=middle, residual=made)
            routed = routed._replace(stride=stride_of(second))
            _launch(call, second, routed, given, chosen, factors, layer.width, [gated], layer.gate)
        summed = routed._replace(x_of_slots=True, summed=True, stride=stride_of(down))
        parts = [Part(down.pointer, y, biases[-1])]
        _launch(call, down, summed, middle, chosen, factors, down.shape[1], parts)
        return call.handed_back(y, out, dtype)


def stride_of(w: DeviceExperts) -> ExpertStride:
    """From an expert to the next."""
    return ExpertStride(int(w.data.shape[1]), w.shape[1])


def _gate_and_up(layer: Layer, biases: list[Given], y: Given) -> tuple[Part, Part]:
    """Both products of the first launch; those of one tensor begin at rows 0 and F of each expert."""
    if len(layer.gate_up) == 2:
        gate, up = (Part(w.pointer, y, bias) for w, bias in zip(layer.gate_up, biases[:2], strict=True))
        return gate, up._replace(y=NOTHING)
    both, bias, f = layer.gate_up[0], biases[0], layer.width
    if f % tiles.ROWS:
        why = f"F is a multiple of {tiles.ROWS} where gate and up are one tensor"
        raise UnsupportedError(f"{why}, got {f} of {both!r}; give them as two")
    shape = tiles.tiles_shape(both.format, f, both.shape[2])
    second = bias._replace(pointer=bias.pointer + f * SIZES[bias.name]) if bias.name else bias
    return Part(both.pointer, y, bias), Part(both.pointer + prod(shape), NOTHING, second)


def _launch(
    call: Call, w: DeviceExperts, routed: Routed, x: Given, ids: Given, weights: Given, n: int, parts: list[Part],
    gate: str = "",
) -> None:  # fmt: skip
    """Products by experts of w's format, of as many tokens at a time as a grid holds."""
    (t, top_k), k, fused = ids.array.shape, w.shape[2], len(parts) == 2
    if t * top_k * n == 0 or k == 0:
        for part in parts:
            if part.y.name:
                part.y.array[...] = 0
        return
    on = gpu(call.device)
    outputs = tuple(Output(n, part.y.name, part.bias.name, part.residual.name) for part in parts)
    outputs = (outputs[0]._replace(gate=gate), *outputs[1:])
    per_token = 1 if routed.summed else top_k
    rows_of_x = top_k if routed.x_of_slots else 1
    step, stream = MAX_SLOTS // per_token, call.library.stream(call.device)
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
        launch(route(p).kernel, p)(stream, *pointers)
