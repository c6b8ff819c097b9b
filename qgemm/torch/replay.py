"""A call of a layer on the CPU like its latest one: one check of all that it depends on, then the plan's call of C.

The guards of torch.compile compare x, ids and the biases, and with them the modes that torch keeps for a thread:
gradients, autocast, tracing, transforms of torch.func and modes that dispatch to Python. So a call under another mode,
or on another kind of tensor, takes the way of the layer's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.autograd import forward_ad

from qgemm.cpu import experts
from qgemm.cpu.fast_path import replay
from qgemm.cpu.plan import Plan, address_of
from qgemm.tensor import Tensor

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
GUARDS: Any = getattr(_guards, "TensorGuards", ())  # () is no class of anything

PARTS = ("gate", "up", "down")  # the layers of a QExperts

# Called with the layer, whose module imports this, and with its arguments.
Replay = Callable[..., torch.Tensor | None]


def replay_of(layer: Any, x: torch.Tensor, packed: object) -> Replay | None:
    """The call that a layer just made on x, for later ones; None where there is no plan of it, as on a GPU.

    The layer has no LoRA, view or siblings. The Replay gives None where a call is another one. It keeps no weight
    alive, and trusts the plan while the weight is the same tensor over the same memory, whose bytes C reads anew.
    """
    weight: Any = layer._parameters["weight"]
    bias, activation = layer._parameters["bias"], layer.activation
    if type(packed) is not Tensor or address_of(packed.blocks) != weight.data_ptr():
        return None
    output = _output_of(replay(packed, x, activation, bias, x.dtype))
    if output is None:
        return None
    weight_of, address, has_bias = ref(weight), weight.data_ptr(), bias is not None

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        parameters = layer._parameters
        weight: Any = parameters["weight"]
        if (
            weight is None or weight.data_ptr() != address or weight is not weight_of()
            or layer._buffers or layer._modules or layer.siblings is not None or layer.activation is not activation
            or forward_ad._current_level >= 0
        ):  # fmt: skip
            return None
        bias = parameters["bias"]
        if bias is None:
            return None if has_bias else output(x)
        return output(x, bias) if has_bias else None

    return call


def replay_of_experts(
    layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tensors: Sequence[object]
) -> Replay | None:
    """The call that a QExperts just made on these, for later ones, as `replay_of`. tensors: of gate, up and down."""
    parts, activation = layer.parts, layer.activation
    held: list[Any] = [part._parameters["weight"] for part in parts]
    biases = [part._parameters["bias"] for part in parts]
    packed = [w for w in tensors if type(w) is Tensor]
    if len(packed) < len(parts) or any(address_of(w.blocks) != h.data_ptr() for w, h in zip(packed, held, strict=True)):
        return None
    gate, up, down = packed
    output = _output_of(experts.replay(x, (gate, up), down, ids, weights, activation, biases, x.dtype))
    if output is None:
        return None
    facts = [(name, ref(weight), weight.data_ptr()) for name, weight in zip(PARTS, held, strict=True)]
    has_bias = [bias is not None for bias in biases]

    def call(layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        modules, terms = layer._modules, [ids, weights]
        for (name, weight_of, address), is_biased in zip(facts, has_bias, strict=True):
            parameters = modules[name]._parameters
            weight, bias = parameters["weight"], parameters["bias"]
            if weight is None or weight.data_ptr() != address or weight is not weight_of():
                return None
            if (bias is not None) is not is_biased:
                return None
            if bias is not None:
                terms.append(bias)
        if layer.activation is not activation or forward_ad._current_level >= 0:
            return None
        return output(x, *terms)

    return call


def _output_of(plan: Plan | None) -> Callable[..., Any] | None:
    """The call of C by a plan, where the guards of torch.compile tell whether arrays are like those of the plan."""
    return plan.one_output() if plan is not None and isinstance(getattr(plan.like, "__self__", None), GUARDS) else None
