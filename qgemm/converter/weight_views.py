"""Weights made of others without a copy: rows in another order, matrices stacked, numbers plus one."""

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

from .weight import GROUP, Codes, Groups, Weight, of_tensor

Read = Callable[[int, int], list[NDArray[Any]]]  # (start, stop) in units of some weights -> arrays [stop - start, ...]
View = Callable[[Sequence[Read], int], Read]  # of each of some weights, and the weights of a unit -> that of the whole


def in_order(weight: Weight, order: NDArray[np.intp], lot: int = 0) -> Weight:
    """W [N, K] or [N] in which row r of each lot is the given weight's row order[r] of that lot.

    lot: rows of a lot before, more than after where some are left out (default: len(order), all stay).
    """
    k = weight.shape[-1] if len(weight.shape) > 1 else 1
    lot = lot or len(order)

    def there(start: int, stop: int) -> tuple[int, int]:
        return start * lot // len(order), stop * lot // len(order)

    def view(reads: Sequence[Read], unit: int) -> Read:
        def moved(array: NDArray[Any]) -> NDArray[Any]:
            lots = array.reshape(-1, lot, k // unit, *array.shape[1:])
            return lots[:, order].reshape(-1, *array.shape[1:])

        return lambda start, stop: list(map(moved, reads[0](*there(start, stop))))

    step = lcm(weight.step, lot * k) // lot * len(order)
    *leading, n = weight.shape[:-1] if len(weight.shape) > 1 else weight.shape
    shape = (*leading, n // lot * len(order), *weight.shape[len(leading) + 1 :])
    made = _viewed([weight], weight.name, shape, step, view)
    return replace(made, nbytes=weight.nbytes * len(order) // lot)


def transposed(weight: Weight) -> Weight:
    """W [..., N, K] of W [..., K, N], whose matrices are read whole."""
    *leading, k, n = weight.shape
    values = weight.values
    assert values is not None, "integers are no matrices"

    def read(start: int, stop: int) -> Floats:
        return np.ascontiguousarray(values(start, stop).reshape(-1, k, n).swapaxes(1, 2)).reshape(-1)

    step = lcm(weight.step, k * n)
    return Weight(weight.name, (*leading, n, k), weight.type, weight.nbytes, step, values=read)


def stacked(name: str, weights: Sequence[Weight]) -> Weight:
    """Matrices [N, K], all of one shape, as W [len(weights), N, K]."""
    size = weights[0].size

    def view(reads: Sequence[Read], unit: int) -> Read:
        each = size // unit

        def joined(start: int, stop: int) -> list[NDArray[Any]]:
            numbers = range(start // each, -(-stop // each))
            found = [reads[i](max(start - i * each, 0), min(stop - i * each, each)) for i in numbers]
            return [np.concatenate(arrays) for arrays in zip(*found, strict=True)]

        return joined

    step = lcm(*(weight.step for weight in weights))
    return _viewed(weights, name, (len(weights), *weights[0].shape), step, view)


def plus_one(weight: Weight) -> Weight:
    """Each number and one more, in float32."""
    values = weight.values
    assert values is not None, "integers are no norms"
    more = lambda start, stop: values(start, stop) + np.float32(1)  # noqa: E731 a method's worth of name would hide it
    return Weight(weight.name, weight.shape, weight.type, weight.nbytes, weight.step, values=more)


def _viewed(weights: Sequence[Weight], name: str, shape: tuple[int, ...], step: int, view: View) -> Weight:
    """The weight that a view makes of others, by what all of them are: blocks of one format, codes, or numbers."""
    tensors = [weight.tensor for weight in weights]
    formats = {None if tensor is None else tensor.format for tensor in tensors}
    if len(formats) == 1 and (fmt := formats.pop()) is not None:
        blocks = view([_blocks(tensor) for tensor in tensors if tensor is not None], fmt.weights)

        def whole() -> Blocks:
            return blocks(0, prod(shape) // fmt.weights)[0].reshape(*shape[:-1], -1)

        tensor = Tensor(fmt, shape, whole, name, lambda start, stop: blocks(start, stop)[0])
        return replace(of_tensor(tensor), step=step)
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


def _all(found: list[Any]) -> list[Any] | None:
    return None if None in found else found


def _blocks(tensor: Tensor) -> Read:
    return lambda start, stop: [tensor.read(start, stop)]


def _values(read: Callable[[int, int], Floats]) -> Read:
    return lambda start, stop: [read(start, stop)]


def _codes(codes: Sequence[Codes], view: View) -> Codes:
    def groups(each: Codes) -> Read:
        def found(start: int, stop: int) -> list[NDArray[Any]]:
            q, zero, scale, minimum = each.read(start * GROUP, stop * GROUP)
            arrays: list[NDArray[Any]] = [q, np.broadcast_to(zero, scale.shape), scale]
            if any_minimum:
                arrays.append(np.zeros_like(scale) if minimum is None else minimum)
            return arrays

        return found

    any_minimum = any(each.minimum for each in codes)
    read = view([groups(each) for each in codes], GROUP)
    return Codes(
        min(each.least for each in codes),
        max(each.most for each in codes),
        min(each.low for each in codes),
        max(each.high for each in codes),
        any_minimum,
        lambda start, stop: Groups(*read(start // GROUP, stop // GROUP)),
        gcd(*(each.group for each in codes)),
        all(each.whole_rows for each in codes),
    )
