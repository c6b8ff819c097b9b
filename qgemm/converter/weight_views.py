"""Weights derived from others without a copy: rows in another order, matrices stacked, numbers plus one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, lcm, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Floats
from qgemm.tensor import Tensor

from .weight import GROUP, Codes, Groups, Weight, numbers_of, weight_from_tensor

Read = Callable[[int, int], list[NDArray[Any]]]  # (start, stop) in units of weights -> arrays [stop - start, ...]
View = Callable[[Sequence[Read], int], Read]  # (readers of the sources, weights per unit) -> reader of the result


def reorder_rows(weight: Weight, order: NDArray[np.intp], batch: int = 0) -> Weight:
    """W [N, K] or [N], in batches of rows: row r of a batch is row order[r] of the same batch of the given weight.

    batch: rows of a batch of the given weight, more than len(order) where rows are left out (default: len(order)).
    """
    k = weight.shape[-1] if len(weight.shape) > 1 else 1
    batch = batch or len(order)

    def source_range(start: int, stop: int) -> tuple[int, int]:
        return start * batch // len(order), stop * batch // len(order)

    def view(reads: Sequence[Read], unit: int) -> Read:
        def reorder(array: NDArray[Any]) -> NDArray[Any]:
            batches = array.reshape(-1, batch, k // unit, *array.shape[1:])
            return batches[:, order].reshape(-1, *array.shape[1:])

        return lambda start, stop: list(map(reorder, reads[0](*source_range(start, stop))))

    step = lcm(weight.step, batch * k) // batch * len(order)
    *leading, n = weight.shape[:-1] if len(weight.shape) > 1 else weight.shape
    shape = (*leading, n // batch * len(order), *weight.shape[len(leading) + 1 :])
    reordered = _derived([weight], weight.name, shape, step, view)
    return replace(reordered, nbytes=weight.nbytes * len(order) // batch)


def transpose_matrices(weight: Weight) -> Weight:
    """W [..., N, K] of W [..., K, N]; each matrix is read whole."""
    *leading, k, n = weight.shape
    values = numbers_of(weight)

    def read(start: int, stop: int) -> Floats:
        return np.ascontiguousarray(values(start, stop).reshape(-1, k, n).swapaxes(1, 2)).reshape(-1)

    step = lcm(weight.step, k * n)
    return Weight(weight.name, (*leading, n, k), weight.type, weight.nbytes, step, values=read)


def stack_matrices(name: str, weights: Sequence[Weight]) -> Weight:
    """Stack matrices [N, K] of one shape to W [len(weights), N, K]."""
    size = weights[0].size

    def view(reads: Sequence[Read], unit: int) -> Read:
        matrix_units = size // unit

        def joined(start: int, stop: int) -> list[NDArray[Any]]:
            numbers = range(start // matrix_units, -(-stop // matrix_units))
            arrays_by_matrix = [
                reads[i](max(start - i * matrix_units, 0), min(stop - i * matrix_units, matrix_units)) for i in numbers
            ]
            return [np.concatenate(arrays) for arrays in zip(*arrays_by_matrix, strict=True)]

        return joined

    step = lcm(*(weight.step for weight in weights))
    return _derived(weights, name, (len(weights), *weights[0].shape), step, view)


def matrix_of(weight: Weight, index: int, name: str) -> Weight:
    """Matrix [N, K] of a stack W [count, N, K]."""
    count, *shape = weight.shape
    size = prod(shape)

    def view(reads: Sequence[Read], unit: int) -> Read:
        first = index * size // unit
        return lambda start, stop: reads[0](first + start, first + stop)

    return replace(_derived([weight], name, tuple(shape), weight.step, view), nbytes=weight.nbytes // count)


def join_rows(weights: Sequence[Weight]) -> Weight:
    """W [..., N, K] whose rows are those of W1 [..., N1, K], W2 ... in turn; a whole matrix is read at once."""
    *leading, _, k = weights[0].shape
    readers = [numbers_of(weight) for weight in weights]
    sizes = [weight.shape[-2] * k for weight in weights]
    step = sum(sizes)

    def read(start: int, stop: int) -> Floats:
        matrices = range(start // step, stop // step)
        return np.concatenate([
            values(i * size, (i + 1) * size) for i in matrices for values, size in zip(readers, sizes, strict=True)
        ])  # fmt: skip

    nbytes = sum(weight.nbytes for weight in weights)
    return Weight(weights[0].name, (*leading, step // k, k), weights[0].type, nbytes, step, values=read)


def reshaped(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """A weight in another shape of as many weights, in the same order."""
    return _derived([weight], weight.name, shape, weight.step, lambda reads, unit: reads[0])


def pad_rows(weight: Weight, rows: int) -> Weight:
    """W [rows, K] of W [N, K] with rows of zeros after its own; the numbers alone, without codes."""
    values, size, k = numbers_of(weight), weight.size, weight.shape[-1]

    def read(start: int, stop: int) -> Floats:
        own = values(start, min(stop, size)) if start < size else np.empty(0, np.float32)
        return np.concatenate([own, np.zeros(stop - start - own.size, np.float32)])

    nbytes = weight.nbytes * rows // weight.shape[0]
    return Weight(weight.name, (rows, k), weight.type, nbytes, lcm(weight.step, k), values=read)


def map_numbers(weight: Weight, function: Callable[[Floats], Floats]) -> Weight:
    """A function of each number, in float32."""
    values = numbers_of(weight)
    return Weight(
        weight.name, weight.shape, weight.type, weight.nbytes, weight.step,
        values=lambda start, stop: function(values(start, stop)),
    )  # fmt: skip


def add_one(weight: Weight) -> Weight:
    """The numbers plus one, in float32."""
    return map_numbers(weight, lambda numbers: numbers + np.float32(1))


def reorder_columns(weight: Weight, order: NDArray[np.intp]) -> Weight:
    """W [..., K]: column c is column order[c] of the given weight; the numbers alone, without codes."""
    k = weight.shape[-1]
    reordered = map_numbers(weight, lambda numbers: numbers.reshape(-1, k)[:, order].reshape(-1))
    return replace(reordered, step=lcm(weight.step, k))


def _derived(weights: Sequence[Weight], name: str, shape: tuple[int, ...], step: int, view: View) -> Weight:
    """The weight that a view derives from others: from their blocks if of one format, else from codes and numbers."""
    tensors = [weight.tensor for weight in weights]
    formats = {None if tensor is None else tensor.format for tensor in tensors}
    if len(formats) == 1 and (fmt := formats.pop()) is not None:
        blocks = view([_blocks(tensor) for tensor in tensors if tensor is not None], fmt.weights)

        def whole() -> Blocks:
            return blocks(0, prod(shape) // fmt.weights)[0].reshape(*shape[:-1], -1)

        tensor = Tensor(fmt, shape, whole, name, lambda start, stop: blocks(start, stop)[0])
        return replace(weight_from_tensor(tensor), step=step)
    values = _all([weight.values for weight in weights])
    codes = _all([weight.codes for weight in weights])
    numbers = None if values is None else view([_values(read) for read in values], 1)
    return replace(
        weights[0],
        name=name,
        shape=shape,
        nbytes=sum(weight.nbytes for weight in weights),
        step=step,
        tensor=None,
        native=None,
        values=None if numbers is None else lambda start, stop: numbers(start, stop)[0],
        codes=None if codes is None else _codes(codes, view),
        irregular=any(weight.irregular for weight in weights),
    )


def _all(readers: list[Any]) -> list[Any] | None:
    return None if None in readers else readers


def _blocks(tensor: Tensor) -> Read:
    return lambda start, stop: [tensor.read(start, stop)]


def _values(read: Callable[[int, int], Floats]) -> Read:
    return lambda start, stop: [read(start, stop)]


def _codes(codes: Sequence[Codes], view: View) -> Codes:
    def groups(source: Codes) -> Read:
        def read(start: int, stop: int) -> list[NDArray[Any]]:
            q, zero, scale, minimum = source.read(start * GROUP, stop * GROUP)
            arrays: list[NDArray[Any]] = [q, np.broadcast_to(zero, scale.shape), scale]
            if any_minimum:
                arrays.append(np.zeros_like(scale) if minimum is None else minimum)
            return arrays

        return read

    any_minimum = any(source.minimum for source in codes)
    read = view([groups(source) for source in codes], GROUP)
    return Codes(
        min(source.least for source in codes),
        max(source.greatest for source in codes),
        min(source.low for source in codes),
        max(source.high for source in codes),
        any_minimum,
        lambda start, stop: Groups(*read(start // GROUP, stop // GROUP)),
        gcd(*(source.group for source in codes)),
        all(source.whole_rows for source in codes),
    )
