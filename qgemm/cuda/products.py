"""The first call of its kind: arguments checked, arrays taken in, what kernels cannot read or write by way of copies.

Nothing but this file looks into x: its library, its stream, its rows. What goes on to a plan is its address, and as
Source how many rows it has, how long, of what type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from qgemm.arguments import (
    NO_EPILOGUE,
    Epilogue,
    Gated,
    check_activation,
    check_apart,
    check_elements,
    check_epilogue,
    check_gated,
    check_out,
    check_prepared,
    check_shapes,
    check_weights,
    output_dtype,
)
from qgemm.arrays import as_cupy, check_floats, check_no_grad, current_stream, like, on_cuda, on_device, stream_of
from qgemm.errors import UnsupportedError
from qgemm.gating import gated_by
from qgemm.packed import Packed
from qgemm.placement import misplaced
from qgemm.tensor import Tensor

from .activations import ALIGNMENT, DeviceActivations
from .driver.workspace import relaxed_capture
from .libraries import Library, cupy_library, library_for
from .plan import Call, Plan, Served, Source, gated_plan_of, launched, plan_of, served
from .problem import C_TYPES, Output
from .tensor import DeviceTensor


class Product(NamedTuple):
    """One product of a call: its weights, its output, and what is added to it."""

    w: DeviceTensor
    y: Any
    epilogue: Epilogue


class Made(NamedTuple):
    """What a call made: each y, and the plan that serves every call of arrays of these shapes and types, if one does.

    library: of the arrays, None if only DLPack reads them. activation, dtype: of the plan; dtype by NumPy's name.
    """

    ys: list[Any]
    plan: Plan | None
    library: Library | None
    activation: str
    dtype: str


def multiply(
    x: Any,
    weights: Sequence[DeviceTensor],
    activation: str | None,
    epilogues: Sequence[Epilogue],
    outs: Sequence[Any],
    dtype: DTypeLike | None,
) -> Made:
    """y = x @ w.T + epilogue of each of the weights, as `qgemm.matmul_many` has it."""
    with _taken(x, weights, activation) as (values, source, library, kind):
        for w in weights:
            check_shapes(values.shape, w)
        shapes, name = [(*values.shape[:-1], w.shape[0]) for w in weights], output_dtype(dtype).name
        made = [
            _new(shape, name, library, w.device) if out is None else out
            for out, shape, w in zip(outs, shapes, weights, strict=True)
        ]
        ys = [_target(y, shape, dtype) for y, shape in zip(made, shapes, strict=True)]
        check_apart([y for y, out in zip(ys, outs, strict=True) if out is not None])
        added = [_contiguous(epilogue, y, ys) for epilogue, y in zip(epilogues, ys, strict=True)]
        products = [Product(*p) for p in zip(weights, ys, added, strict=True)]
        plan = _into(values, products, kind, library or cupy_library())
        if library is None:
            made = [like(source, y) if out is None else out for y, out in zip(ys, outs, strict=True)]
        return Made(made, plan, library, kind, name)


def multiply_gated(
    x: Any, w: DeviceTensor, gated: Gated, activation: str | None, bias: Any, out: Any, dtype: DTypeLike | None
) -> Made:
    """y = function(x @ gate.T + bias) * (x @ up.T + its bias), as `qgemm.gated` has it."""
    with _taken(x, [w, gated.up], activation) as (values, source, library, kind):
        check_gated(w, gated.up)
        check_shapes(values.shape, w)
        shape, name = (*values.shape[:-1], w.shape[0]), output_dtype(dtype).name
        made = _new(shape, name, library, w.device) if out is None else out
        y = _target(made, shape, dtype)
        added = [NO_EPILOGUE if one is None else _contiguous(Epilogue(one), y, [y]) for one in (bias, gated.bias)]
        what = gated._replace(bias=added[1].bias)
        plan = _gated_into(values, Product(w, y, added[0]), what, kind, library or cupy_library())
        if library is None and out is None:
            made = like(source, y)
        return Made([made], plan, library, kind, name)


@contextmanager
def _taken(x: Any, weights: Sequence[Any], activation: str | None) -> Iterator[tuple[Any, Any, Library | None, str]]:
    """On x's device and its library's stream: x as CuPy's over the same memory, or as it was prepared.

    Besides an array of the library that y is to be of, that library, None if only DLPack reads it, and the kind of
    activations.
    """
    prepared = x.activation if isinstance(x, DeviceActivations) else None
    kind = check_activation(activation, prepared)
    source = x.like if prepared else x
    library = library_for(type(source))
    there = on_cuda(source) if library is None else not library.grad or source.is_cuda  # torch has tensors elsewhere
    for w in weights:
        if not there or isinstance(w, Tensor) or not isinstance(w, Packed):
            raise misplaced(x, w)
        check_weights(w, kind)
    check_prepared(prepared, kind)
    device = int(source.__dlpack_device__()[1]) if library is None else library.device(source)
    for w in weights:
        if w.device != device:
            raise UnsupportedError(f"x is on cuda:{device}, w on cuda:{w.device}; they must share a device")
    with relaxed_capture(), stream_of(source) if library is None else on_device(device, library.stream):
        values = x if prepared else as_cupy(x) if library is None else _over(x, library)
        yield values, source, library, kind


def _over(x: Any, library: Library) -> Any:
    """An array [..., K] of floats of a library as CuPy's over the same memory."""
    import cupy

    found = cupy.from_dlpack(x.detach()) if library.grad else x
    check_floats(found.dtype, found.shape)
    return found


def _rows(x: Any, k: int) -> Any:
    """x [..., K] as contiguous rows [M, K] of a type that the kernels read, at an address where they can."""
    if x.dtype.name not in C_TYPES:
        x = x.astype(np.float32)
    if not x.flags.c_contiguous or x.data.ptr % ALIGNMENT:
        x = x.copy()
    return x.reshape(x.size // k if k else 0, k)


def _into(x: Any, products: Sequence[Product], activation: str, library: Library) -> Plan | None:
    """All products of x, a CuPy array [..., K] or DeviceActivations, on the current stream.

    library: of the caller's arrays. Returns the plan if it serves every call of arrays of these shapes and types.
    """
    import cupy

    k, m, prepared = x.shape[-1], prod(x.shape[:-1]), isinstance(x, DeviceActivations)
    products = [p for p in products if p.w.shape[0]]
    if m == 0 or not products:
        return None
    if k == 0:
        for p in products:
            acc = cupy.zeros(p.y.shape, np.float32)
            _add(p, acc)
            p.y[...] = acc
        return None
    if not prepared and any(cupy.may_share_memory(x, p.y) for p in products):
        x = x.copy()
    values = x if prepared else _rows(x, k)
    source = Source(m, k, values.dtype.name, x.activation if prepared else "")
    asked = [served(p.w, source, activation) for p in products]
    direct = [_direct(p, one) for p, one in zip(products, asked, strict=True)]
    computed = [
        p if as_it_is else Product(p.w, cupy.empty(p.y.shape, np.float32), NO_EPILOGUE)
        for p, as_it_is in zip(products, direct, strict=True)
    ]
    call = Call(current_stream(), values.pointer if prepared else values.data.ptr, pointers_of(computed))
    plan = launched(call, plan_of, asked, outputs_of(computed), source, library)
    for p, made in zip(products, computed, strict=True):
        if made is not p:
            _add(p, made.y)
            p.y[...] = made.y
    return plan if all(direct) and x.dtype.name in C_TYPES else None


def _gated_into(x: Any, first: Product, gated: Gated, activation: str, library: Library) -> Plan | None:
    """y = function(x @ gate.T + bias) * (x @ up.T + its bias) on the current stream; first: gate, y and bias.

    Returns the plan if it serves every call of arrays of these shapes and types.
    """
    import cupy

    gate, y, (bias, _) = first
    k, m, prepared = x.shape[-1], prod(x.shape[:-1]), isinstance(x, DeviceActivations)
    if y.size == 0:
        return None
    if not prepared and cupy.may_share_memory(x, y):
        x = x.copy()
    values = x if prepared or not k else _rows(x, k)
    source = Source(m, k, values.dtype.name, x.activation if prepared else "")
    weights, biases = (gate, gated.up), (bias, gated.bias)
    asked = [served(w, source, activation) for w in weights] if k else []
    if not k or not all(one.kernel.adds for one in asked):
        made = [cupy.empty(y.shape, np.float32) for _ in weights]
        added = [Product(*p) for p in zip(weights, made, map(Epilogue, biases), strict=True)]
        _into(x, added, activation, library)
        y[...] = gated_by(gated.function, made[0], made[1], cupy)
        return None
    direct = _direct(first, asked[0])
    target = y if direct else cupy.empty(y.shape, np.float32)
    names = ["" if added is None else added.dtype.name for added in biases]
    pointers = pointers_of([Product(w, target, Epilogue(added)) for w, added in zip(weights, biases, strict=True)])
    call = Call(current_stream(), values.pointer if prepared else values.data.ptr, pointers)
    plan = launched(call, gated_plan_of, asked, target.dtype.name, names, gated.function, source, library)
    if not direct:
        y[...] = target
    return plan if direct and x.dtype.name in C_TYPES else None


def outputs_of(products: Sequence[Product]) -> tuple[Output, ...]:
    """The sizes and types of products, as kernels are told them."""
    return tuple(
        Output(p.w.shape[0], p.y.dtype.name, *("" if a is None else a.dtype.name for a in p.epilogue)) for p in products
    )


def pointers_of(products: Sequence[Product]) -> list[int]:
    """The pointers of a launch behind that of x: w, y, bias and residual of each product, 0 for none."""
    pointers: list[int] = []
    for p in products:
        pointers += [p.w.pointer, p.y.data.ptr, *(0 if a is None else a.data.ptr for a in p.epilogue)]
    return pointers


def _direct(p: Product, by: Served) -> bool:
    """Whether the kernel that serves a product can store into y as it is, the epilogue added."""
    stores = by.kernel.stores(by.problem.x, p.y.dtype.name)
    return bool(p.y.flags.c_contiguous) and stores and (by.kernel.adds or not p.epilogue.adds)


def _add(p: Product, acc: Any) -> None:
    for added in p.epilogue:
        if added is not None:
            acc += added


def _new(shape: tuple[int, ...], name: str, library: Library | None, device: int) -> Any:
    """An array for y, of the library if that is read without DLPack, else CuPy's."""
    by = library or cupy_library()
    return by.new(shape, by.dtype(name), device)()


def _target(out: Any, shape: tuple[int, ...], dtype: DTypeLike | None) -> Any:
    """An array for y as CuPy's, over the same memory."""
    if not on_cuda(out):
        raise UnsupportedError(f"out must be on the CUDA device of w, got {type(out).__name__}")
    check_no_grad(out)
    check_out(out, shape, dtype)
    out = as_cupy(out, "out")
    check_elements(out)
    return out


def _contiguous(epilogue: Epilogue, y: Any, outs: Sequence[Any]) -> Epilogue:
    """Bias and residual as contiguous CuPy arrays that no output overwrites too early."""
    if not epilogue.adds:
        return epilogue
    names = zip(epilogue, Epilogue._fields, strict=True)
    arrays = Epilogue(*(None if added is None else as_cupy(added, name) for added, name in names))
    check_epilogue(arrays, y.shape)
    return Epilogue(*(None if added is None else _fetched(added, y, outs) for added in arrays))


def _fetched(added: Any, y: Any, outs: Sequence[Any]) -> Any:
    import cupy

    if added.dtype.name not in C_TYPES:
        added = added.astype(np.float32)
    added = cupy.ascontiguousarray(added)
    return added.copy() if _clash(added, y, outs) else added


def _clash(added: Any, y: Any, outs: Sequence[Any]) -> bool:
    """Whether an output would overwrite a bias or residual before it is read; a residual may be its own y."""
    import cupy

    same = added.data.ptr == y.data.ptr and added.dtype == y.dtype and added.shape == y.shape
    return any(cupy.may_share_memory(added, other) for other in outs if not (same and other is y))
