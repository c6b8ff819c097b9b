"""parallelize: cut the packed layers of a model over the ranks of a group, by the model's plan.

A plan maps names of layers, with * for numbers, to the kind of cut, named as in transformers:

    colwise                  by outputs; the layers that consume them are cut by inputs: rowwise
    rowwise                  by inputs; one sum over the ranks
    colwise_gather_output    by outputs, joined afterwards, such as lm_head; also colwise_rep
    rowwise_split_input      by inputs, of an x that all ranks have; also rowwise_rep
    ep_dispatch_experts      experts of a QExperts, distributed over the ranks; one sum. Also moe_tp_experts, by which
                             transformers means the inner sizes of each expert
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from math import gcd, lcm
from typing import NamedTuple, TypeVar

import torch

from qgemm.errors import UnsupportedError
from qgemm.sharding import ROWS
from qgemm.tensor import Tensor

from .experts import QExperts
from .group import Group, Ranks
from .linear import QLinear
from .parallel import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from .parallel_experts import ParallelExperts
from .replace import hooks_of
from .storage import host_tensor
from .views import check_unviewed

COLUMN, ROW = "colwise", "rowwise"
ALONE = {  # cuts without a counterpart: x and y are whole
    "colwise_gather_output": ColumnParallelLinear, "colwise_rep": ColumnParallelLinear,
    "rowwise_split_input": RowParallelLinear, "rowwise_rep": RowParallelLinear,
}  # fmt: skip
KINDS: dict[str, type[ParallelLinear]] = {COLUMN: ColumnParallelLinear, ROW: RowParallelLinear, **ALONE}
EXPERTS = "ep_dispatch_experts", "moe_tp_experts"
Layer = TypeVar("Layer", bound=torch.nn.Module)
WHOLE = (
    "replicated",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
)  # an embedding only reads the rows of its index


class Cut(NamedTuple):
    """A layer to cut: its name, the kind, whether x and y are whole, and the smallest unit of the cut."""

    name: str
    kind: type[ParallelLinear]
    whole: bool
    multiple: int | None


class Parallelized(NamedTuple):
    """The result of `parallelize`: names of the layers by kind of cut, and of those that every rank has whole."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    experts: tuple[str, ...]
    kept: tuple[str, ...]  # plain: ok, a public name
    nbytes: int
    group: Group

    def __str__(self) -> str:
        cut = f"{len(self.columns)} layers cut by outputs, {len(self.rows)} by inputs"
        cut += f", {len(self.experts)} by experts" * bool(self.experts)
        return f"{self.group!r}: {cut}; {self.nbytes / 2**20:.1f} MiB of packed weights here"


def parallelize(
    model: torch.nn.Module,
    plan: Mapping[str, str] | None = None,
    mesh: Group | Ranks | None = None,
    *,
    timeout: timedelta | None = None,
) -> Parallelized:
    """Cut the QLinear and QExperts layers of a model over the ranks, in place; every rank of the group calls it.

    model: with packed weights on the CPU, from `qgemm.torch.transformers.patch` or `replace_linear`; each rank maps the
    whole file, and reads and keeps only its share. Move it to the GPU afterwards: `model.to("cuda")`.
    plan: names of layers -> kind of cut (see above); None for the model's own plan in transformers, and all QExperts by
    expert.
    mesh: a device mesh of one axis or a process group; None for all ranks.
    timeout: of the collectives of these layers, see `Group`.

    Attention heads stay whole: there must be at least as many key heads as ranks. Other sizes are cut in multiples of
    64 and of a block. A model that cannot be cut is refused on all ranks before any change: UnsupportedError, or
    RankError with the message of the rank that failed.
    """
    group = Group.wrap(mesh, timeout)
    with group.together() as facts:
        model_plan = _plan_of(model) if plan is None else plan
        cuts = list(_cuts(model, model_plan))
        layers = {cut.name: _layer(model.get_submodule(cut.name), cut, group) for cut in cuts}
        facts.extend(f"{cut.name} {cut.kind.features} {cut.multiple} {layers[cut.name].format}" for cut in cuts)
        experts = {
            name: _experts(name, model.get_submodule(name), group) for name in _names_of_experts(model, model_plan)
        }
        facts.extend(f"{name} {[part._format for part in experts[name].parts]}" for name in experts)
    replaced: dict[str, ParallelLinear | ParallelExperts] = {**layers, **experts}
    for name, layer in replaced.items():
        model.set_submodule(name, layer)
    layer_names = (
        name for name, layer in model.named_modules() if isinstance(layer, (QLinear, QExperts, torch.nn.Linear))
    )
    return Parallelized(
        tuple(name for name, layer in layers.items() if isinstance(layer, ColumnParallelLinear)),
        tuple(name for name, layer in layers.items() if isinstance(layer, RowParallelLinear)),
        tuple(experts),
        tuple(name for name in layer_names if name not in replaced),
        sum(
            weight.nbytes for layer in replaced.values() for weight in layer.parameters() if weight.dtype == torch.uint8
        ),
        group,
    )


# ---------------------------------------------------------------- plans


def _plan_of(model: torch.nn.Module) -> dict[str, str]:
    """The plan of a transformers model: that of its class, and that in the config of the model within.

    Its QExperts are cut by expert; that plan names the weights that they replace, or nothing.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_model_prefix"):
            inner = getattr(module.config, "base_model_tp_plan", None) if module.base_model is module else None
            for part in (inner, module._tp_plan):
                plan.update({_wild(f"{name}.{key}" if name else key): kind for key, kind in (part or {}).items()})
    if not plan:
        raise UnsupportedError(f"{type(model).__name__} has no plan of its own; give plan=, from names to how to cut")
    experts = (name for name, module in model.named_modules() if isinstance(module, QExperts))
    return {**plan, **{_wild(name): EXPERTS[0] for name in experts}}


def _wild(name: str) -> str:
    """A name with * for the numbers between dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _cuts(model: torch.nn.Module, plan: Mapping[str, str]) -> Iterator[Cut]:
    """The layers that a plan cuts. Those of one owner belong together: outputs of some are inputs of the others."""
    owners: dict[str, dict[str, str]] = {}
    matched = set()
    for name, module in model.named_modules():
        kind = plan.get(_wild(name), plan.get(name))
        matched |= {_wild(name), name}
        if kind is None or kind in WHOLE or kind in EXPERTS:
            continue
        if kind not in KINDS or not isinstance(module, (QLinear, torch.nn.Linear)):
            raise UnsupportedError(
                f"{name!r} ({type(module).__name__}) cannot be cut {kind!r}; known: {', '.join((*KINDS, *EXPERTS))}"
            )
        owners.setdefault(name.rpartition(".")[0], {})[name] = kind
    missing = [key for key in plan if key not in matched and plan[key] in KINDS]
    if missing and not owners:
        raise UnsupportedError(f"the model has no layer {missing[0]!r} of the plan, and none of its others")
    for owner, names in owners.items():
        alone = {name: kind for name, kind in names.items() if kind in ALONE}
        for name, kind in alone.items():
            if isinstance(model.get_submodule(name), QLinear):  # a dense layer stays whole
                yield Cut(name, ALONE[kind], True, None)
        paired = {name: kind for name, kind in names.items() if kind not in ALONE}
        packed = [name for name in paired if isinstance(model.get_submodule(name), QLinear)]
        if packed:
            yield from _paired(model, owner, paired)


def _names_of_experts(model: torch.nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """The expert layers that a plan cuts; dense ones stay whole."""
    for name, module in model.named_modules():
        if plan.get(_wild(name), plan.get(name)) in EXPERTS and isinstance(module, QExperts):
            yield name


def _paired(model: torch.nn.Module, owner: str, names: Mapping[str, str]) -> Iterator[Cut]:
    """Cut layers of one owner in equal units: heads, or multiples of 64 and of the blocks."""
    layers = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, QLinear):
            raise UnsupportedError(
                f"{name!r} is dense, and those beside it are packed: they are cut alike or not at all"
            )
    sizes = {name: _size(layers[name], kind) for name, kind in names.items()}
    rows = [layers[name] for name, kind in names.items() if kind == ROW]
    if not rows or len(rows) == len(names):
        raise UnsupportedError(f"{owner!r}: of {', '.join(names)} some are cut {COLUMN} and some {ROW}, or none")
    head = getattr(model.get_submodule(owner), "head_dim", None)
    pieces = min(sizes.values()) // head if head else None
    block = lcm(*(layer.format.weights for layer in rows))
    if any(size % pieces for size in sizes.values()) if pieces else len(set(sizes.values())) > 1:
        raise UnsupportedError(f"{owner!r}: layers of sizes {sizes} are not cut alike")
    for name, kind in names.items():
        if not pieces:
            yield Cut(name, KINDS[kind], False, lcm(ROWS, block))
            continue
        inner = max(sizes[other] for other in names if names[other] == ROW) // pieces
        heads_per_unit = block // gcd(block, inner)  # key heads per unit, so that its query heads are whole blocks
        yield Cut(name, KINDS[kind], False, heads_per_unit * sizes[name] // pieces)


def _size(layer: QLinear, kind: str) -> int:
    """The layer's size along the cut axis."""
    return int(layer.out_features if kind == COLUMN else layer.in_features)


# ---------------------------------------------------------------- layers


def _layer(old: QLinear, cut: Cut, group: Group) -> ParallelLinear:
    """This rank's share of a layer, with the hooks of the whole one."""
    label = f"layer {cut.name!r}"
    if isinstance(old, ParallelLinear):
        raise UnsupportedError(f"{label} is cut already")
    check_unviewed(old, label)
    if "lora" in old._modules:
        raise UnsupportedError(f"{label} has LoRA, which is not cut; add none before")
    if cut.kind is RowParallelLinear and old._forward_pre_hooks:
        raise UnsupportedError(f"{label} has a hook on its input, which a rank has a part of")
    if old.weight.device.type != "cpu":
        raise UnsupportedError(f"{label} is on {old.weight.device}: weights are cut on the CPU, then moved")
    tensor: Tensor = host_tensor(old.weight, old._format, old._shape, old.tensor_name)
    layer: ParallelLinear = cut.kind._cut(tensor, old.bias, old.activation, group, cut.multiple, cut.whole)
    return _in_place_of(old, layer)


def _experts(name: str, old: QExperts, group: Group) -> ParallelExperts:
    """This rank's experts of a layer, with the hooks of the whole one."""
    label = f"layer {name!r}"
    if isinstance(old, ParallelExperts):
        raise UnsupportedError(f"{label} is cut already")
    if any(part.weight.device.type != "cpu" for part in old.parts):
        raise UnsupportedError(f"{label} is on {old.gate.weight.device}: weights are cut on the CPU, then moved")
    tensors = [host_tensor(part.weight, part._format, part._shape, part.tensor_name) for part in old.parts]
    layer = ParallelExperts._cut(tensors, [part.bias for part in old.parts], old.activation, group)
    return _in_place_of(old, layer)


def _in_place_of(old: torch.nn.Module, layer: Layer) -> Layer:
    """A new layer with the hooks and the training mode of the old one."""
    layer.__dict__.update(hooks_of(old))
    layer.train(old.training)
    return layer
