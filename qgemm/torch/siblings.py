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
from weakref import ref

import torch

from qgemm import ops as products

from .gradients import is_grad_enabled, transformed
from .joint import can_join, many
from .linear import QLinear, autocasting, cast_by_autocast
from .ops import is_compiling, tracing
from .storage import packed_of

MAX_MISSES = 2  # rounds in succession, after which layers that were not called with the same x leave a group


class Round:
    """The products of one x that wait for their layers.

    state: `_state` of x when they were computed. ys: by the index of the layer, y and the layer's `_weight_state`.
    members: the indices of the layers whose products the round computed. joined: those layers, for later rounds.
    """

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.state: tuple[Any, ...] = ()
        self.ys: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        self.members: Sequence[int] = ()
        self.misses = 0
        self.joined: Joined | None = None


class Joined:
    """Layers without biases that shared a call without gradients, so that a later call need not ask can_join of each.

    Its references to weights are weak, so that the memory of a weight that is moved or replaced is freed.
    """

    def __init__(self, group: tuple[int, ...], layers: Sequence[QLinear], x: torch.Tensor) -> None:
        self.group, self.device = group, x.device
        self.activation: Any = layers[0].activation
        self.parts: list[tuple[QLinear, type, Any]] = [(layer, type(layer), ref(layer.weight)) for layer in layers]

    def weights(self, group: tuple[int, ...], x: torch.Tensor) -> list[Any] | None:
        """The packed weights; None if a layer, x or torch's modes changed so that can_join must be asked."""
        device = self.device
        if (
            group != self.group or type(x) is not torch.Tensor or x.device != device or autocasting() or tracing()
            or (is_grad_enabled() and x.requires_grad) or transformed()
        ):  # fmt: skip
            return None
        packed = []
        for layer, kind, weight_of in self.parts:
            own = layer.__dict__
            parameters = own["_parameters"]
            weight: Any = parameters["weight"]
            if (
                weight is None or weight is not weight_of() or weight.device != device or type(layer) is not kind
                or parameters["bias"] is not None or own["activation"] != self.activation
                or own["_buffers"] or own["_forward_pre_hooks"] or "forward" in own
            ):  # fmt: skip
                return None
            packed.append(packed_of(weight, own["_format"], own["_shape"], own["tensor_name"]))
        return packed


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
        layers = self.layers
        if layer not in layers:  # a copy of a layer that torch.nn.DataParallel made
            return None
        index = layers.index(layer)
        compiling = is_compiling()
        current = self._traced if compiling else self._eager.round
        if current.x is not None:
            if current.x is x and index in current.ys:
                y, written = current.ys[index]
                if compiling or (written == _weight_state(layer) and current.state == _state(x)):
                    del current.ys[index]
                    if not current.ys:
                        current.x, current.misses = None, 0
                    return y
            if current.x is x and index not in current.members:
                return None
        joined = None if compiling or current.x is not None else current.joined
        weights = None if joined is None else joined.weights(self._group(index), x)
        indices: Sequence[int]
        if joined is not None and weights is not None:
            indices, ys = joined.group, products.matmul_many(x, weights, joined.activation, dtype=x.dtype)
        else:
            indices = self._joined(index, x)
            if current.x is not None and len(indices) > 1:
                self._end(current)
                indices = self._joined(index, x)
            if len(indices) < 2:
                return None
            together = [layers[i] for i in indices]
            ys = many(together, cast_by_autocast(x) if compiling or autocasting() else x)
            if not compiling and all(other._parameters["bias"] is None for other in together):
                current.joined = Joined(tuple(indices), together, x)
        current.ys = waiting = {}
        for i, y in zip(indices, ys, strict=True):
            waiting[i] = y, () if compiling else _weight_state(layers[i])
        current.x, current.members, current.state = x, indices, () if compiling else _state(x)
        return waiting.pop(index)[0]

    def _group(self, index: int) -> tuple[int, ...]:
        """The layers that are computed together with one of them."""
        return next(group for group in self.groups if index in group)

    def _joined(self, index: int, x: torch.Tensor) -> list[int]:
        """The layers whose products are computed with that of one of them."""
        group = self._group(index)
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


def _state(x: torch.Tensor) -> tuple[Any, ...]:
    """The inputs of a product besides the layer: writes into x, and whether gradients are recorded."""
    return is_grad_enabled(), *_writes(x)


def _weight_state(layer: QLinear) -> tuple[Any, ...]:
    """The layer's part: writes into weight and bias."""
    parameters = layer._parameters
    bias = parameters["bias"]
    return _writes(parameters["weight"]) if bias is None else (*_writes(parameters["weight"]), *_writes(bias))


def _writes(tensor: Any) -> tuple[int, int]:
    """The address of a tensor, and torch's count of writes, which inference tensors lack."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:
        return tensor.data_ptr(), 0


def _split(group: tuple[int, ...], missing: set[int]) -> tuple[tuple[int, ...], ...]:
    """A group without the missing layers, and these; the group itself if all or none are missing."""
    parts = tuple(i for i in group if i not in missing), tuple(i for i in group if i in missing)
    return tuple(part for part in parts if part)
