"""A call of a QLinear on the CPU like its latest one: one check of all that it depends on, then the plan's call of C.

The guards of torch.compile compare x and the bias, and with them the modes that torch keeps for a thread: gradients,
autocast, tracing, transforms of torch.func and modes that dispatch to Python. So a call under another mode, or on
another kind of tensor, takes the way of `QLinear.forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd import forward_ad

from qgemm.cpu.fast_path import replay
from qgemm.cpu.plan import address_of
from qgemm.tensor import Tensor

if TYPE_CHECKING:
    from .linear import QLinear

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
GUARDS: Any = getattr(_guards, "TensorGuards", ())  # () is no class of anything

Replay = Callable[["QLinear", torch.Tensor], torch.Tensor | None]


def replay_of(layer: QLinear, x: torch.Tensor, packed: object) -> Replay | None:
    """The call that a layer just made on x, for later ones; None where there is no plan of it, as on a GPU.

    The layer has no LoRA, view or siblings. The Replay gives None where a call is another one. It keeps no weight
    alive, and trusts the plan while the weight is the same tensor over the same memory, whose bytes C reads anew.
    """
    weight: Any = layer._parameters["weight"]
    bias, activation = layer._parameters["bias"], layer.activation
    if type(packed) is not Tensor or address_of(packed.blocks) != weight.data_ptr():
        return None
    plan = replay(packed, x, activation, bias, x.dtype)
    if plan is None or not isinstance(getattr(plan.like, "__self__", None), GUARDS):
        return None
    output = plan.one_output()
    if output is None:
        return None
    weight_of, address, has_bias = ref(weight), weight.data_ptr(), bias is not None

    def call(layer: QLinear, x: torch.Tensor) -> torch.Tensor | None:
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
