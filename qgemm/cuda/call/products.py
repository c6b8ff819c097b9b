"""The slow path of products: arguments checked, arrays of any library taken in, copies where kernels cannot use them.

Nothing but this file looks into x: its library, its stream, its rows. A plan gets a pointer, and as Source how many
rows x has, how long they are, and their type. Products by experts (experts.py) take their arrays in from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from qgemm import arguments
from qgemm.arguments import Epilogue, Request
from qgemm.arrays import check_floats, check_no_grad, like, on_cuda
from qgemm.codec.float_types import DType, float_name
from qgemm.cuda.activations import ALIGNMENT, DeviceActivations
from qgemm.cuda.driver.workspace import relaxed_capture
from qgemm.cuda.kernels.add_epilogue import gate_launch
from qgemm.cuda.libraries import library_for, library_or_default
from qgemm.cuda.problem import C_TYPES
from qgemm.cuda.tensor import DeviceTensor
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed
from qgemm.placement import described, misplaced
from qgemm.tensor import Tensor

from .arrays import NOTHING, SIZES, Array, Call, Pointer, X, Y
from .plan import Product, Served, Source, enter, launch_gated, launch_products, served


def multiply(x: Any, request: Request, activation: str | None, dtype: DType | None) -> Call:
    """The call of a request: y = x @ w.T + epilogue of each product, or one gated y of two."""
    weights, epilogues, outs, function = request
    prepared = x.activation if isinstance(x, DeviceActivations) else None
    kind = arguments.check_activation(activation, prepared)
    with recording(x.like if prepared else x, weights, len(outs)) as call:
        for w in weights:
            arguments.check_weights(w, kind)
        arguments.check_prepared(prepared, kind)
        if prepared:
            values, shape = Array(x.data, Pointer(X), x.dtype.name), x.shape
            call.addresses[X], call.nbytes[X] = x.pointer, x.data.nbytes
        else:
            values = read(call, x, "x", base=X)
            shape = tuple(values.values.shape)
        if function:
            arguments.check_gated(*weights)
        for w in weights:
            arguments.check_shapes(shape, w)
        source = Source(prod(shape[:-1]), shape[-1], values.dtype, prepared or "")
        ys = [target(call, out, (*shape[:-1], weights[i].shape[0]), dtype, i) for i, out in enumerate(outs)]
        arguments.check_apart([y.values for y, out in zip(ys, outs, strict=True) if out is not None])
        products = [
            Product(w, w.shape[0], y, *_read_epilogue(call, epilogue, y, ys))
            for w, y, epilogue in zip(weights, ys * 2 if function else ys, epilogues, strict=True)
        ]
        pointer = values.pointer if prepared else _copy_if_shared(call, values, ys).pointer
        if function:
            _launch_gated(call, pointer, source, products, function, kind)
        else:
            _launch(call, pointer, source, products, kind)
        finish(call, ys, outs)
        return call


@contextmanager
def recording(x: Any, weights: Sequence[Any], outputs: int = 1) -> Iterator[Call]:
    """A new call on the current stream of x's library, with x's device current."""
    library = library_for(type(x))
    x_on_gpu = on_cuda(x) if library is None else not library.grad or x.is_cuda  # torch has tensors elsewhere
    for w in weights:
        if not x_on_gpu or isinstance(w, Tensor) or not isinstance(w, Packed):
            raise misplaced(x, w)
    device = int(x.__dlpack_device__()[1]) if library is None else library.device(x)
    for w in weights:
        if w.device != device:
            raise UnsupportedError(f"x is on cuda:{device}, w on cuda:{w.device}; they must share a device")
    reader, bases = library or library_or_default(x), Y + outputs
    with relaxed_capture(), reader.on_device(device):
        stream, zeros = reader.stream(device), [0] * bases
        call = Call(x, reader, device, stream, zeros, zeros.copy(), [1] * bases, library is not None)
        try:
            yield call
        finally:
            for lock in call.locks:
                lock.release()


def multiply_by(x: Any, w: DeviceTensor, out: Any, choice: Served) -> None:
    """out = x @ w.T by a kernel that the caller chooses instead of the route table: a candidate of `qgemm tune`."""
    with recording(x, [w], 1) as call:
        values = read(call, x, "x", base=X)
        source = Source(choice.problem.m, choice.problem.k, values.dtype)
        y = target(call, out, tuple(out.shape), None)
        _launch(call, values.pointer, source, [Product(w, w.shape[0], y)], choice.problem.activation, [choice])


def _launch(
    call: Call, x: Pointer, source: Source, products: Sequence[Product], activation: str,
    choices: Sequence[Served] | None = None,
) -> None:  # fmt: skip
    """Launch all products of x. Where a kernel cannot store y, the call's library adds the epilogue and stores it.

    choices: the kernels, if not those of the routes.
    """
    filled = [p for p in products if p.n] if source.m else []
    call.replayable = call.replayable and len(filled) == len(products) and source.k > 0
    if source.k == 0:
        for p in filled:
            sums = view(temporary(call, tuple(p.y.values.shape)))
            call.library.assign(sums, 0)
            _store(call, p, sums)
    elif filled:
        kernels = choices or [served(p.w, source, activation) for p in filled]
        computed = [
            p if _stores(call, p, kernel) else Product(p.w, p.n, temporary(call, tuple(p.y.values.shape)))
            for p, kernel in zip(filled, kernels, strict=True)
        ]
        launch_products(call, kernels, computed, source, x)
        for p, product in zip(filled, computed, strict=True):
            if product is not p:
                _store(call, p, view(product.y))


def _launch_gated(
    call: Call, x: Pointer, source: Source, pair: Sequence[Product], function: str, activation: str
) -> None:
    """y = function(product by gate) * (product by up) of a pair of products with one y.

    Kernels that add store y (`launch_gated`). The products of other kernels are gated by a launch of its own.
    """
    y, shape = pair[0].y, tuple(pair[0].y.values.shape)
    kernels = [served(p.w, source, activation) for p in pair] if prod(shape) * source.k else []
    if not prod(shape):
        return
    if not all(kernel.kernel.adds for kernel in kernels) or not source.k:
        gate, up = (p._replace(y=temporary(call, shape)) for p in pair)
        _launch(call, x, source, [gate, up], activation)
        stored = y if contiguous(call, y) and y.dtype in C_TYPES else temporary(call, shape)
        gated = gate_launch(call.device, function, stored.dtype, prod(shape))
        enter(call, gated, up.y.pointer, stored.pointer, NOTHING.pointer, gate.y.pointer)
    else:
        stored = y if _stores(call, pair[0], kernels[0]) else temporary(call, shape)
        launch_gated(call, kernels, pair, stored, function, source, x)
    if stored is not y:
        call.library.assign(view(y), view(stored))


def _stores(call: Call, p: Product, served: Served) -> bool:
    """Whether the kernel that serves a product can add the epilogue and store into y directly."""
    stores = served.kernel.stores(served.problem.x, p.y.dtype)
    return contiguous(call, p.y) and stores and (served.kernel.adds or not (p.bias.dtype or p.residual.dtype))


def _store(call: Call, p: Product, sums: Any) -> None:
    """y = sums + bias + residual."""
    for added in (p.bias, p.residual):
        if added.dtype:
            sums += view(added)
    call.library.assign(view(p.y), sums)


# ---------------------------------------------------------------- arrays in and out


def read(
    call: Call, array: arguments.Array | None, who: str, types: Sequence[str] = tuple(C_TYPES),
    alignment: int = ALIGNMENT, base: int | None = None,
) -> Array:  # fmt: skip
    """An array as kernels read it: contiguous, aligned, of a type of `types`, else cast to float32. None is NOTHING.

    base: X for x, whose device is known; else the array gets a new one.
    """
    if array is None:
        return NOTHING
    library = library_for(type(array))
    if base is None and not on_cuda(array):
        raise UnsupportedError(f"{who} is on the host, the product is on a CUDA device; got {described(array)}")
    if library is not call.library:
        array, library, call.replayable = call.library.wrap(array), call.library, False
    if library.device(array) != call.device:
        raise UnsupportedError(f"{who} is on cuda:{library.device(array)}, the product on cuda:{call.device}")
    dtype = library.name(array.dtype)
    if not array.shape or dtype not in types:
        check_floats(dtype, array.shape, who)
    if dtype not in types:
        array, dtype, call.replayable = library.cast(array, "float32"), "float32", False
    if not library.contiguous(array) or library.pointer(array) % alignment:
        array = library.copy(array)
    if base is None:
        base = new_base(call)
    call.alignments[base] = alignment
    return _array_at(call, array, dtype, base)


def target(
    call: Call, out: arguments.Array | None, shape: tuple[int, ...], dtype: DType | None, index: int = 0
) -> Array:
    """An output by its index: the memory of `out`, whatever its type and strides, or a new array."""
    if out is None:
        return _new_array(call, shape, float_name("float32" if dtype is None else dtype), Y + index)
    if not on_cuda(out):
        raise UnsupportedError(f"out must be on the CUDA device of w, got {type(out).__name__}")
    check_no_grad(out)
    arguments.check_out(out, shape, dtype)
    values = call.library.wrap(out)
    arguments.check_elements(values)
    call.outs += 1
    return _array_at(call, values, call.library.name(values.dtype), Y + index)


def temporary(call: Call, shape: tuple[int, ...]) -> Array:
    """A float32 array for a product that no kernel can store into its output; such a call is not replayed."""
    call.replayable = False
    return _new_array(call, shape, "float32", new_base(call))


def new_base(call: Call) -> int:
    """Add an array to the call, and return its base."""
    for facts in (call.addresses, call.nbytes, call.alignments):
        facts.append(0)
    return len(call.addresses) - 1


def _new_array(call: Call, shape: tuple[int, ...], dtype: str, base: int) -> Array:
    library = call.library
    return _array_at(call, library.new(shape, library.dtype(dtype), call.device)(), dtype, base)


def _array_at(call: Call, values: arguments.Array, dtype: str, base: int) -> Array:
    """An array of a type, at the start of a base."""
    library = call.library
    call.addresses[base], call.nbytes[base] = library.pointer(values), prod(values.shape) * SIZES[dtype]
    call.memory.append(values)
    return Array(values, Pointer(base), dtype)


def overlap(call: Call, array: Array, y: Array) -> bool:
    """Whether the bounds of an array and of an output overlap in memory."""
    if not array.dtype:
        return False
    (start, stop), (y_start, y_stop) = _extent(call, array), _extent(call, y)
    return start < y_stop and y_start < stop


def _extent(call: Call, array: Array) -> tuple[int, int]:
    """The addresses of an array's first byte and of the first byte after it; equal if it has no elements."""
    start, shape = call.library.pointer(array.values), array.values.shape
    if not prod(shape):
        return start, start
    reaches = [(size - 1) * step for size, step in zip(shape, call.library.strides(array.values), strict=True)]
    first, last = sum(min(0, reach) for reach in reaches), sum(max(0, reach) for reach in reaches)
    return start + first, start + last + SIZES[array.dtype]


def view(array: Array) -> Any:
    """The values of an array; for torch a tensor outside of autograd over the same memory."""
    values = array.values
    return values.detach() if hasattr(values, "detach") else values


def contiguous(call: Call, array: Array) -> bool:
    """Whether an array is in C order."""
    return call.library.contiguous(array.values)


def finish(call: Call, ys: Sequence[Array], outs: Sequence[Any]) -> None:
    """Set the outputs that the caller gets: its own `outs`, or new arrays of x's library."""
    foreign = library_for(type(call.source)) is None
    for y, out in zip(ys, outs, strict=True):
        call.ys.append((like(call.source, y.values) if foreign else y.values) if out is None else out)


def _copy_if_shared(call: Call, array: Array, ys: Sequence[Array]) -> Array:
    """An array that is read, copied where it shares memory with an output that the caller gave."""
    if call.outs == 0 or not any(overlap(call, array, y) for y in ys):
        return array
    return _array_at(call, call.library.copy(array.values), array.dtype, array.pointer.base)


def _read_epilogue(call: Call, epilogue: Epilogue, y: Array, ys: Sequence[Array]) -> tuple[Array, Array]:
    """Bias and residual as kernels read them, apart from all outputs; a residual may be its own y."""
    names = zip(epilogue, Epilogue._fields, strict=True)
    bias, residual = (read(call, array, name, alignment=1) for array, name in names)
    arrays = Epilogue(*(view(array) if array.dtype else None for array in (bias, residual)))
    arguments.check_epilogue(arrays, tuple(y.values.shape))
    others = ys
    if residual.dtype == y.dtype:
        call.residuals.add((y.pointer.base, residual.pointer.base))
        if call.addresses[y.pointer.base] == call.addresses[residual.pointer.base]:
            others = [other for other in ys if other is not y]
    return _copy_if_shared(call, bias, ys), _copy_if_shared(call, residual, others)
