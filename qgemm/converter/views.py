"""Weights made of others without a copy: rows in another order, matrices stacked, numbers plus one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.codec.packing import Floats
from qgemm.tensor import Tensor

from .weight import GROUP, Codes, Groups, Weight, of_tensor

Read = Callable[[int, int], list[NDArray[Any]]]  # (start, stop) in units of some weights -> arrays [stop - start, ...]
View = Callable[[Sequence[Read], int], Read]  # of each of some weights, and the weights of a unit -> that of the whole


def in_order(weight: Weight, order: NDArray[np.intp]) -> Weight:
    """W [N, K] or [N] in which row r of each lot of len(order) rows is the given weight's row order[r] of that lot."""
    k = weight.shape[-1] if len(weight.shape) > 1 else 1

    def view(reads: Sequence[Read], unit: int) -> Read:
        def moved(array: NDArray[Any]) -> NDArray[Any]:
            lots = array.reshape(-1, len(order), k // unit, *array.shape[1:])
            return lots[:, order].reshape(array.shape)

        return lambda start, stop: list(map(moved, reads[0](start, stop)))

    return _viewed([weight], weight.name, weight.shape, lcm(weight.step, len(order) * k), view)


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
    )
