"""Products on the host: arguments checked, arrays of any library taken in, each product described for its engine.

Nothing but this file looks into x: it goes on as rows [M, K], or as blocks if it was quantized before, to compiled code
(native/products.py) or to NumPy (reference.py), which the products alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm import arguments
from qgemm.arguments import Array, Epilogue, Request, output_dtype
from qgemm.arrays import as_numpy, as_target, like, rounds_itself, torch_of, written
from qgemm.codec import group_activations, q8_1_f32
from qgemm.codec.float_types import DType, dtype_name
from qgemm.codec.format import FLOATS, float_name, floats
from qgemm.codec.group_activations import E4M3
from qgemm.errors import UnsupportedError
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.gating import gated_by
from qgemm.placement import is_on_device, misplaced, prepared_for
from qgemm.tensor import Tensor

from . import reference
from .native import products as native
from .native.calls import GATES
from .native.products import Product

QUANTIZED = (q8_1_f32.FORMAT, Q8_1, *group_activations.FORMATS.values())  # formats of x


class Job(NamedTuple):
    """One product of a call: its weights, the memory of y [..., N], and the terms that are added to it."""

    w: Tensor
    y: NDArray[Any]
    epilogue: Epilogue


def multiply(x: Array, request: Request, activation: str | None, dtype: DType | None) -> list[Any]:
    """The outputs of a request, in its `outs` or as arrays of x's library; "a8" quantizes x once for all products."""
    weights, epilogues, outs, function = request
    values, kind = _read(x, weights, activation)
    if function:
        arguments.check_gated(*weights)
    for w in weights:
        _check(values, w, kind)
    dtype_of_y, rounds = _output(x, dtype)
    shapes = [(*values.shape[:-1], w.shape[0]) for w in weights]
    ys = [
        np.empty(shape, dtype_of_y) if out is None else target_of(out, shape, dtype)
        for shape, out in zip(shapes, outs, strict=not function)
    ]
    terms = map(_terms, epilogues, shapes)
    jobs = [Job(*job) for job in zip(weights, ys * 2 if function else ys, terms, strict=True)]
    targets = [y for y, out in zip(ys, outs, strict=True) if out is not None]
    arguments.check_apart(targets)
    if targets:
        values = _unshared(values, targets)
        jobs = [_apart(job, targets) for job in jobs]
    if function:
        _compute_gated(values, jobs, function, kind)
    else:
        _compute(values, jobs, kind)
    pairs = zip(ys, outs, strict=True)
    return [_returned(x, y, rounds) if out is None else written(out, y) for y, out in pairs]


def _read(x: Array, weights: Sequence[Any], activation: str | None) -> tuple[NDArray[Any] | Tensor, str]:
    """x as an array of NumPy, or as it was quantized before, and the kind of activations."""
    values: Any = x
    plain = type(x) is np.ndarray and x.ndim > 0 and dtype_name(x.dtype) in FLOATS  # other x is examined elsewhere
    kind = arguments.check_activation(activation, None if plain else prepared_for(x))
    elsewhere = not plain and is_on_device(x)
    for w in weights:
        if elsewhere or not isinstance(w, Tensor):
            raise misplaced(x, w)
    if plain or isinstance(x, Tensor):
        return values, kind
    return arguments.check_not_scalar(floats(as_numpy(x, "x"))), kind


def _check(x: NDArray[Any] | Tensor, w: Tensor, activation: str) -> None:
    """The error about weights that x, of a kind of activations, cannot be multiplied by."""
    arguments.check_weights(w, activation)
    if isinstance(x, Tensor):
        arguments.check_prepared(prepared_for(x), activation)
        if x.format not in QUANTIZED:
            raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {x!r} for {activation!r}")
    arguments.check_shapes(x.shape, w)


def _output(x: Array, dtype: DType | None) -> tuple[np.dtype[Any], bool]:
    """The dtype of a new y, and whether y is float32 that x's library rounds to bfloat16."""
    if dtype is None:
        return np.dtype(np.float32), False
    name = float_name(dtype)
    rounds = type(x) is not np.ndarray and rounds_itself(x, name)
    return output_dtype(np.float32 if rounds else name), rounds


def _returned(x: Array, y: NDArray[Any], rounds: bool) -> Any:
    """A new y as an array of x's library."""
    return y if type(x) is np.ndarray else like(x, y, rounds)


def target_of(out: Array, shape: tuple[int, ...], dtype: DType | None) -> NDArray[Any]:
    """The memory of `out`, if it fits."""
    memory = as_target(out)
    arguments.check_out(memory if torch_of(out) is None else out, shape, dtype)
    arguments.check_elements(memory)
    return memory


def handed_back(
    x: Array, y: NDArray[np.float32], out: Array | None, target: NDArray[Any] | None, dtype: DType | None
) -> Any:
    """A new float32 y in `out`, whose memory is `target`, or as an array of x's library and the dtype."""
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        if target is not None:
            target[...] = y
            return written(out, target)
        dtype_of_y, rounds = _output(x, dtype)
        return _returned(x, y.astype(dtype_of_y, copy=False), rounds)


def _terms(epilogue: Epilogue, shape: tuple[int, ...]) -> Epilogue:
    """Bias and residual as NumPy arrays that fit y of this shape."""
    if not epilogue.adds:
        return epilogue
    names = zip(epilogue, Epilogue._fields, strict=True)
    arrays = Epilogue(*(None if array is None else as_numpy(array, name) for array, name in names))
    arguments.check_epilogue(arrays, shape)
    return arrays


def _unshared(x: NDArray[Any] | Tensor, targets: Sequence[NDArray[Any]]) -> NDArray[Any] | Tensor:
    """x, copied if some y is written to its memory."""
    if not isinstance(x, Tensor) and any(np.may_share_memory(x, y) for y in targets):
        return x.copy()
    return x


def _apart(job: Job, targets: Sequence[NDArray[Any]]) -> Job:
    """The job with copies of terms that other outputs overwrite; its own y is written once all is added."""
    others = [y for y in targets if y is not job.y]
    if not others or not job.epilogue.adds:
        return job
    copies = (
        added if added is None or not any(np.may_share_memory(added, y) for y in others) else added.copy()
        for added in job.epilogue
    )
    return job._replace(epilogue=Epilogue(*copies))


def _compute(x: NDArray[Any] | Tensor, jobs: Sequence[Job], activation: str) -> None:
    """y = x @ w.T + epilogue of each job: all by compiled code at once, else each by compiled code or by NumPy."""
    rows = _rows(x, activation)
    memory = [_rows_of(job.y) for job in jobs]
    products = [_product(job, y) for job, y in zip(jobs, memory, strict=True)]
    if native.multiplies(products, activation):
        native.multiply(rows, products, activation)
    else:
        compiled = [len(products) > 1 and native.multiplies([p], activation) for p in products]
        for p, served in zip(products, compiled, strict=True):
            if served:
                native.multiply(rows, [p], activation)
        others = [p for p, served in zip(products, compiled, strict=True) if not served]
        if others:
            reference.multiply(rows, others, activation)
    for job, y in zip(jobs, memory, strict=True):
        _store(job.y, y)


def _compute_gated(x: NDArray[Any] | Tensor, jobs: Sequence[Job], function: str, activation: str) -> None:
    """y = function(product by gate) * (product by up) of two jobs with one y."""
    gate, up = jobs
    memory = _rows_of(gate.y)
    pair = [
        _product(gate, memory)._replace(gate=GATES[function]),
        Product(up.w, None, _bias(up.epilogue.bias, gate.y)),
    ]
    if native.multiplies(pair, activation):
        native.multiply(_rows(x, activation), pair, activation)
        _store(gate.y, memory)
        return
    parts = [job._replace(y=np.empty(gate.y.shape, np.float32)) for job in jobs]
    _compute(x, parts, activation)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
        gate.y[...] = gated_by(function, *(job.y for job in parts))


def _rows(x: NDArray[Any] | Tensor, activation: str) -> NDArray[Any]:
    """x as [M, K], or as blocks of activations [M, K / 32]."""
    if activation == E4M3 and not isinstance(x, Tensor):
        x = reference.prepared(x, activation)  # NumPy alone rounds to e4m3
    m = prod(x.shape[:-1])
    if not isinstance(x, Tensor):
        return _native(x).reshape(m, x.shape[-1])
    blocks = x.blocks.reshape(m, x.blocks.shape[-1])
    return q8_1_f32.of_q8_1(blocks) if x.format == Q8_1 else blocks


def _product(job: Job, y: NDArray[Any]) -> Product:
    """A job as engines read it, for y [M, N] in memory of its own or the job's."""
    residual = job.epilogue.residual
    if residual is not None:
        residual = _readable(residual.reshape(y.shape), y)
    return Product(job.w, y, _bias(job.epilogue.bias, job.y), residual)


def _rows_of(y: NDArray[Any]) -> NDArray[Any]:
    """Memory for y as contiguous rows [M, N] of the machine's byte order: its own if it is like that."""
    m, n = prod(y.shape[:-1]), y.shape[-1]
    if y.flags.c_contiguous and y.flags.aligned and y.dtype.isnative:
        return y.reshape(m, n)
    return np.empty((m, n), y.dtype.newbyteorder("="))


def _store(y: NDArray[Any], rows: NDArray[Any]) -> None:
    """Copy rows [M, N] to y, unless they are its own memory."""
    if not np.may_share_memory(y, rows):
        y[...] = rows.reshape(y.shape)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """The array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _bias(bias: NDArray[Any] | None, y: NDArray[Any]) -> NDArray[np.float32] | None:
    """A bias as contiguous float32 in memory that y is not written to."""
    if bias is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 is infinite
        plain = np.ascontiguousarray(bias, np.float32)
    return plain.copy() if np.may_share_memory(plain, y) else plain


def _readable(residual: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """A residual [M, N] with contiguous rows, each number of which is read before y is written to its memory."""
    plain = _native(residual)
    if plain.strides[-1] != plain.itemsize:
        plain = np.ascontiguousarray(plain)
    same = plain.__array_interface__["data"] == y.__array_interface__["data"] and plain.strides == y.strides
    same = same and plain.dtype == y.dtype
    return plain if same or not np.may_share_memory(plain, y) else plain.copy()
