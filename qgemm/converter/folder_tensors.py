"""Tensors of a .gguf model in a folder's layout: parts are joined, experts unstacked, rows and numbers restored.

The order of rows follows from the conversion itself. A probe, a matrix of the checkpoint whose only column has the
numbers of its rows, is converted, and each row of the results says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .folder_classes import Inverse
from .hf_folder import Model
from .weight import Weight, numbers_of, weight_from_numbers
from .weight_views import (
    join_rows,
    map_numbers,
    matrix_of,
    reorder_rows,
    reshaped,
    transpose_matrices,
)  # fmt: skip

STACKED = "_exps"  # in the stem of a tensor of all experts


class Part(NamedTuple):
    """A tensor of the file: the name of the folder's tensor that it becomes, or becomes a part of; stem.end; weight."""

    target: str
    stem: str
    end: str
    weight: Weight


class Restorer:
    """Makes the folder's tensors; model: converts them to the file's."""

    def __init__(self, model: Model, inverse: Inverse) -> None:
        self.model, self.inverse = model, inverse

    def weights(self, parts: Sequence[Part]) -> Iterator[Weight]:
        """The tensors of the folder that the parts of one become; several for experts."""
        part = parts[0]
        if "{}" in part.target:
            self._check_axes(part, 3)
            for expert in range(part.weight.shape[0]):
                yield matrix_of(part.weight, expert, part.target.format(expert))
            return
        yield replace(self._restored(parts), name=part.target)

    def _restored(self, parts: Sequence[Part]) -> Weight:
        target, stem, end, weight = parts[0]
        if f"{stem}.{end}" in self.inverse.one_row:
            return reshaped(weight, (1, weight.size))
        if weight.name.endswith("norm.weight"):
            plus_one = self.model.architecture.norms_plus_one
            return map_numbers(weight, lambda numbers: numbers - np.float32(1)) if plus_one else weight
        if not weight.name.startswith("blk."):
            return weight
        stacked = STACKED in stem
        vector = len(weight.shape) == 1 + stacked
        transposed = end == "weight" and stem in self.inverse.transposed
        for part in parts:
            self._check_axes(part, *((2, 3) if stacked or part.stem in self.inverse.transposed_parts else (1, 2, 3)))
        matrices = [_matrix(part, stacked, part.stem in self.inverse.transposed_parts) for part in parts]
        if len({(*matrix.shape[:-2], matrix.shape[-1]) for matrix in matrices}) > 1:
            shapes = ", ".join(str(part.weight.shape) for part in parts)
            raise self.model.refusal(weight.name, f"does not fit the other parts of {target}: {shapes}")
        rows = sum(matrix.shape[-2] for matrix in matrices)
        shape = (rows,) if vector else (1, rows) if transposed else (rows, 1)
        order = self._order(target, [part.weight.name for part in parts], (1, *shape) if stacked else shape)
        joined = join_rows(matrices) if len(matrices) > 1 else matrices[0]
        period = _period(order)
        if len(period) > 1:
            joined = reorder_rows(joined, period)
        if vector:
            return reshaped(joined, joined.shape[:-1])
        return transpose_matrices(joined) if transposed else joined

    def _check_axes(self, part: Part, *allowed: int) -> None:
        if len(part.weight.shape) not in allowed:
            rule = f"has shape {part.weight.shape}, where {' or '.join(map(str, allowed))} axes are needed"
            raise self.model.refusal(part.weight.name, rule)

    def _order(self, target: str, names: Sequence[str], shape: tuple[int, ...]) -> NDArray[np.intp]:
        """Each row of the folder's matrix, of one expert, by its number among the rows of the file's tensors.

        names: these tensors. shape: of the probe, whose rows are those of the folder's matrix.
        """
        numbers = np.arange(prod(shape), dtype=np.float32)
        converted = {
            name: self.model.filled(name, {number: part})
            for name, number, part in self.model.parts(weight_from_numbers(target, numbers.reshape(shape)))
        }
        orders = [numbers_of(part)(0, part.size) for name in names if (part := converted.get(name))]
        order = np.concatenate([numbers[:0], *orders])
        if not np.array_equal(np.sort(order), numbers):
            raise self.model.refusal(names[0], f"is no part of {target} in a {self.inverse.name}")
        return np.argsort(order)


def _matrix(part: Part, stacked: bool, transposed: bool) -> Weight:
    """A part as rows of the folder's matrix, of each expert where they are stacked."""
    weight = transpose_matrices(part.weight) if transposed else part.weight
    if len(weight.shape) == 1 + stacked:
        return reshaped(weight, (*weight.shape, 1))
    return weight if stacked else reshaped(weight, (prod(weight.shape[:-1]), weight.shape[-1]))


def _period(order: NDArray[np.intp]) -> NDArray[np.intp]:
    """The shortest order of a batch of rows that every batch has."""
    count = len(order)
    for size in (size for size in range(1, count) if count % size == 0):
        batches = order.reshape(-1, size) - np.arange(0, count, size)[:, None]
        first: NDArray[np.intp] = batches[0]
        if (batches == first).all() and first.min() >= 0 and first.max() < size:
            return first
    return order
