"""Products on a GPU by arrays of any type and order: what kernels cannot read or write goes by way of copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from qgemm.arguments import NO_EPILOGUE, Epilogue, Gated
from qgemm.arrays import current_stream
from qgemm.gating import gated_by

from .activations import DeviceActivations, rows_of
from .libraries import Library
from .plan import Plan, Source, gated_plan_of, kernel_for, plan_of
from .problem import C_TYPES, Output
from .tensor import DeviceTensor


class Product(NamedTuple):
    """One product of a call: its weights, its output, and what is added to it."""

    w: DeviceTensor
    y: Any
    epilogue: Epilogue


def multiply(x: Any, products: Sequence[Product], activation: str, library: Library) -> Plan | None:
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
    values = x if prepared else rows_of(x, k)
    source = Source(m, k, values.dtype.name, x.activation if prepared else "")
    direct = [_direct(p, kernel_for(p.w, source, activation).adds) for p in products]
    computed = [
        p if as_it_is else Product(p.w, cupy.empty(p.y.shape, np.float32), NO_EPILOGUE)
        for p, as_it_is in zip(products, direct, strict=True)
    ]
    plan = plan_of([p.w for p in products], outputs_of(computed), source, activation, library)
    plan.enter(current_stream(), values.pointer if prepared else values.data.ptr, *pointers_of(computed))
    for p, made in zip(products, computed, strict=True):
        if made is not p:
            _add(p, made.y)
            p.y[...] = made.y
    return plan if all(direct) and x.dtype.name in C_TYPES else None


def multiply_gated(x: Any, first: Product, gated: Gated, activation: str, library: Library) -> Plan | None:
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
    values = x if prepared or not k else rows_of(x, k)
    source = Source(m, k, values.dtype.name, x.activation if prepared else "")
    weights, biases = (gate, gated.up), (bias, gated.bias)
    if not k or not all(kernel_for(w, source, activation).adds for w in weights):
        made = [cupy.empty(y.shape, np.float32) for _ in weights]
        added = [Product(*p) for p in zip(weights, made, map(Epilogue, biases), strict=True)]
        multiply(x, added, activation, library)
        y[...] = gated_by(gated.function, made[0], made[1], cupy)
        return None
    direct = _direct(first, adds=True)
    target = y if direct else cupy.empty(y.shape, np.float32)
    names = ["" if added is None else added.dtype.name for added in biases]
    plan = gated_plan_of(weights, target.dtype.name, names, gated.function, source, activation, library)
    pointers = pointers_of([Product(w, target, Epilogue(added)) for w, added in zip(weights, biases, strict=True)])
    plan.enter(current_stream(), values.pointer if prepared else values.data.ptr, *pointers)
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


def _direct(p: Product, adds: bool) -> bool:
    """Whether a kernel, which adds an epilogue or does not, can store into y as it is."""
    return bool(p.y.flags.c_contiguous) and p.y.dtype.name in C_TYPES and (adds or not p.epilogue.given)


def _add(p: Product, acc: Any) -> None:
    for added in p.epilogue:
        if added is not None:
            acc += added
