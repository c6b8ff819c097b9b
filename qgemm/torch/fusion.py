"""fuse: the layers of a model that are called with the same x share a call, and gated blocks become one.

    qgemm.torch.fuse(model)
    qgemm.torch.unfuse(model)

Parameters, the names in state dicts, hooks and adapters stay as they are, and each layer may be called alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from qgemm.formats import FORMATS
from qgemm.gating import Gate

from .joint import can_join, gated, is_plain
from .linear import QLinear, autocasting, cast_by_autocast
from .siblings import Siblings
from .storage import spelled
from .structure import GatedBlock, gated_block, shared_inputs

# The gates of qgemm by the classes of torch and transformers, and by torch's functions. GELU by tanh is written in four
# ways, which are one function.
GATES: dict[Any, Gate] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    torch.nn.functional.silu: "silu",
    torch.nn.functional.gelu: "gelu",
}
PLAIN = frozenset(spelled(fmt) for fmt in FORMATS.values() if fmt.plain)  # formats of numbers
GATED_ON = ("cuda",)  # devices where `qgemm.gated` saves launches; elsewhere a block keeps the bits of its layers
LIBRARIES = ("torch.", "transformers.activations")


class Fused(NamedTuple):
    """The result of `fuse`.

    groups: the names of layers that share a call, in groups. gated: the names of gated blocks that are one call.
    """

    groups: tuple[tuple[str, ...], ...]
    gated: tuple[str, ...]

    def __str__(self) -> str:
        layers = sum(map(len, self.groups))
        return f"{layers} layers share {len(self.groups)} calls; gated blocks of one call: {len(self.gated)}"


def fuse(model: torch.nn.Module) -> Fused:
    """Let packed layers of a model that are called with the same x share calls of qgemm, in place.

    Layers such as those of Q, K and V, which the source of their module's forward shows, become one call of
    `qgemm.matmul_many`, whose products share launches where x has few rows. On a GPU a block whose forward is
    down(act(gate(x)) * up(x)) becomes `qgemm.gated` and down. Where a gradient is needed, each layer computes its own
    product; so do the layers of a gated block that have hooks or adapters. Layers that are fused already stay so.
    """
    groups, blocks = [], []
    for name, parent in model.named_modules():
        for layers in _groups(parent):
            Siblings(list(layers.values()))
            groups.append(tuple(f"{name}.{layer}" if name else layer for layer in layers))
        kind: Any = type(parent)
        block = None if "forward" in vars(parent) else gated_block(kind)
        if block is not None and _function(parent, block) is not None:
            parent.forward = partial(gated_forward, parent, block)
            blocks.append(name)
    return Fused(tuple(groups), tuple(blocks))


def unfuse(model: torch.nn.Module) -> None:
    """Revert `fuse`: each layer of a model computes its own product again."""
    for module in model.modules():
        if isinstance(module, QLinear):
            module.siblings = None
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is gated_forward:
            del module.forward


def _groups(parent: torch.nn.Module) -> Iterator[dict[str, QLinear]]:
    """The layers of a module that are called with the same x, by name; they share K and activation."""
    layers = {name: child for name, child in parent._modules.items() if is_plain(child) and child.siblings is None}
    if len(layers) < 2:
        return
    for names in shared_inputs(parent):
        kinds: dict[tuple[int, str], dict[str, QLinear]] = {}
        for name in names:
            layer: Any = layers.get(name)
            if layer is not None:
                kinds.setdefault((layer.in_features, layer.activation), {})[name] = layers.pop(name)
        yield from (group for group in kinds.values() if len(group) > 1 and len({*map(id, group.values())}) > 1)


# ---------------------------------------------------------------- gated blocks


def gated_forward(owner: torch.nn.Module, block: GatedBlock, *args: Any, **named: Any) -> Any:
    """The forward of a gated block: function(x @ gate.T) * (x @ up.T) by one call of qgemm, then down."""
    x = args[0] if len(args) == 1 and not named else None
    function = _function(owner, block) if isinstance(x, torch.Tensor) and x.device.type in GATED_ON else None
    if function is not None:
        gate, up, act = (owner._modules.get(name) for name in (block.gate, block.up, block.act))
        joins = can_join(gate, x) and can_join(up, x) and not (_is_watched(gate) or _is_watched(up) or _is_watched(act))
        if joins and (torch.compiler.is_compiling() or not _has_any_global_hook()):
            cast = cast_by_autocast(x) if torch.compiler.is_compiling() or autocasting() else x
            return getattr(owner, block.down)(gated(gate, up, cast, function))
    return type(owner).forward(owner, *args, **named)


def _function(owner: torch.nn.Module, block: GatedBlock) -> Gate | None:
    """The gate of a block whose layers a call of qgemm can replace; None for others."""
    gate, up = owner._modules.get(block.gate), owner._modules.get(block.up)
    if not (is_plain(gate) and is_plain(up)) or gate is up:
        return None
    assert isinstance(gate, QLinear)
    assert isinstance(up, QLinear)
    if gate._shape != up._shape or gate.activation != up.activation or "lora" in {*gate._modules, *up._modules}:
        return None
    if gate._format in PLAIN or up._format in PLAIN:  # cuBLAS computes these, whose sums would be stored in float32
        return None
    return gate_of(getattr(owner, block.act))


def gate_of(act: Any) -> Gate | None:
    """The gate that an activation is, a module of torch's or transformers' or a function; None for others."""
    if not isinstance(act, torch.nn.Module):
        return GATES.get(act)
    kind = type(act)
    if not kind.__module__.startswith(LIBRARIES):
        return None
    if kind is torch.nn.GELU and act.approximate == "tanh":
        return "gelu_tanh"
    return GATES.get(kind.__name__)


def _is_watched(layer: Any) -> bool:
    """Whether other code sees the calls of a layer: by hooks or by a forward of the instance's own."""
    if layer is None:  # an activation that is a function
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in vars(layer)
