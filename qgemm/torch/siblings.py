"""Siblings: QLinear layers that a model calls with the same x, such as those of Q, K and V, share a call.

The first layer that is called with an x computes the products of all. The others return theirs when they are called
with the same tensor, so that hooks, adapters beside a layer and its own LoRA see x and y as always. Groups are
predicted (structure.py), never assumed: a layer that is called with another x computes its own product, and leaves the
group when that happens again.

x counts as the same if it is the same object and was not written to in between. Inference tensors and tensors of a
traced graph have no count of writes: a model that writes into an input between two layers that read it could not be
trained, because autograd needs x for the gradient of each weight.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .joint import can_join, many
from .linear import QLinear, autocasting, cast_by_autocast

MAX_MISSES = 2  # rounds in succession, after which layers that were not called with the same x leave a group


class Round:
    """The products of one x that wait for their layers.

    ys: by the index of the layer, y and the layer's `_state` when it was computed. members: the indices of the layers
    whose products the round computed.
    """

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.ys: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        self.members: Sequence[int] = ()
        self.misses = 0


class ThreadRound(threading.local):
    """The round of each thread."""

    def __init__(self) -> None:
        self.round = Round()


class Siblings:
    """Layers of one K and activation, each of which has this object as its `siblings`.

    groups: indices of the layers that are computed together, a partition of all.
    """

    def __init__(self, layers: Sequence[QLinear]) -> None:
        self.layers = tuple(layers)
        self.groups: tuple[tuple[int, ...], ...] = (tuple(range(len(layers))),)
        self._start()
        for layer in layers:
            layer.siblings = self

    def _start(self) -> None:
        self._eager, self._traced = ThreadRound(), Round()

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "groups": self.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def product(self, layer: QLinear, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's product with x, from this round or from a new one; None if the layer computes it alone."""
        index = next((i for i, other in enumerate(self.layers) if other is layer), None)
        if index is None:  # a copy of a layer that torch.nn.DataParallel made
            return None
        compiling = torch.compiler.is_compiling()
        current = self._traced if compiling else self._eager.round
        if current.x is not None:
            if current.x is x and index in current.ys and current.ys[index][1] == _state(layer, x, compiling):
                y, _ = current.ys.pop(index)
                if not current.ys:
                    current.x, current.misses = None, 0
                return y
            if current.x is x and index not in current.members:
                return None
        indices = self._joined(index, x)
        if current.x is not None and len(indices) > 1:
            self._end(current)
            indices = self._joined(index, x)
        if len(indices) < 2:
            return None
        cast = cast_by_autocast(x) if compiling or autocasting() else x
        ys = many([self.layers[i] for i in indices], cast)
        waiting = {i: (y, _state(self.layers[i], x, compiling)) for i, y in zip(indices, ys, strict=True)}
        y, _ = waiting.pop(index)
        current.x, current.ys, current.members = x, waiting, indices
        return y

    def _joined(self, index: int, x: torch.Tensor) -> list[int]:
        """The layers whose products are computed with that of one of them."""
        group = next(group for group in self.groups if index in group)
        if len(group) == 1 or not can_join(self.layers[index], x):
            return []
        return [i for i in group if can_join(self.layers[i], x)]

    def _end(self, current: Round) -> None:
        """End a round of which some products were not fetched; the second time their layers leave the group."""
        missing = set(current.ys)
        current.x, current.ys = None, {}
        current.misses += 1
        if current.misses >= MAX_MISSES:
            current.misses = 0
            parts = (part for group in self.groups for part in _split(group, missing))
            self.groups = tuple(parts)


def _state(layer: QLinear, x: torch.Tensor, compiling: bool) -> tuple[Any, ...]:
    """All that a layer's product depends on: writes into x, weight and bias, and whether gradients are recorded."""
    if compiling:
        return ()
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    return torch.is_grad_enabled(), _writes(x), _writes(weight), None if bias is None else _writes(bias)


def _writes(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor, and torch's count of writes."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _split(group: tuple[int, ...], missing: set[int]) -> tuple[tuple[int, ...], ...]:
    """A group without the missing layers, and these; the group itself if all or none are missing."""
    parts = tuple(i for i in group if i not in missing), tuple(i for i in group if i in missing)
    return tuple(part for part in parts if part)
