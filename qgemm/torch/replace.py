"""replace_linear: the Linear layers of a model become QLinear over the packed tensors of a .gguf file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from qgemm.arguments import check_activation
from qgemm.errors import UnsupportedError
from qgemm.files.gguf.reader import GGUFFile, open
from qgemm.files.paths import PathLike, shown_path
from qgemm.tensor import Tensor
from qgemm.views import View

from .embedding import QEmbedding
from .linear import QLinear
from .storage import file_shape

Name = str | Tensor | None  # of a tensor in the file; or one that the caller made of it; or the layer stays as it is
Names = Mapping[str, Name] | Callable[[str], Name]


class Layer(NamedTuple):
    """A layer that was replaced: its name in the model, the tensor's in the file, how that is packed."""

    name: str
    tensor: str
    format: str
    shape: tuple[int, int]
    nbytes: int


class Replaced(NamedTuple):
    """What `replace_linear` did: the layers that it replaced, and the names of those that stay as they are."""

    layers: tuple[Layer, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        formats = Counter(layer.format for layer in self.layers)
        kinds = ", ".join(f"{count} {fmt}" for fmt, count in formats.most_common())
        size = sum(layer.nbytes for layer in self.layers) / 2**20
        kept = f"; kept as they are: {', '.join(self.kept)}" if self.kept else ""
        return f"{len(self.layers)} layers replaced ({kinds}; {size:.1f} MiB){kept}"


class Plan(NamedTuple):
    """A layer to be replaced, its tensor, and the tensor of its bias, if the file has one."""

    name: str
    module: Any
    tensor: Tensor
    bias: Tensor | None


def replace_linear(
    model: Any,
    file: PathLike | GGUFFile | Mapping[str, Tensor],
    names: Names | None = None,
    *,
    embeddings: bool = False,
    activation: str = "a16",
) -> Replaced:
    """Replace torch.nn.Linear layers of a model, in place, by QLinear of a file's tensors -> what was replaced.

    file: a .gguf file, by its path or opened, or any mapping of names to Tensors, such as `qgemm.load` of a folder of
    AWQ. Weights on the CPU stay in the mapping of the file, which may be closed; those of a model on a GPU are packed
    there.
    names: from the name of a layer ("layers.0.q_proj") to that of its tensor, or to a Tensor, for rows that had to be
    put in another order first, or to None, which keeps the layer: a mapping, which keeps the layers that it lacks, or a
    function. By default a layer takes the tensor of its own name with ".weight", and stays if there is none.
    embeddings: replace torch.nn.Embedding as well, by QEmbedding.
    activation: "a8" is for layers whose formats have integer codes; the others of a file stay with "a16".

    Layers of one tensor share it, as tied ones do, and hooks of their forwards go on. A bias comes from the file where
    it has one beside the weight ("x.bias" for "x.weight"), else it stays the layer's. Subclasses of Linear stay, since
    their forwards may ask for dense weights.
    All is checked before anything is replaced: UnsupportedError names the layer and tensor that do not fit,
    NameNotFoundError a tensor that the file lacks.
    """
    if not isinstance(file, Mapping):
        with open(file) as opened:
            return replace_linear(model, opened, names, embeddings=embeddings, activation=activation)
    found = dict(_layers(model, (torch.nn.Linear, torch.nn.Embedding) if embeddings else (torch.nn.Linear,)))
    plans = list(_plans(model, found, file, names))
    if not plans:
        where = f"{shown_path(file.path)} has" if isinstance(file, GGUFFile) else "there are"
        raise UnsupportedError(
            f"no layer was replaced: {where} tensors like {_some(file)}, the model has layers like {_some(found)}; "
            "give names=, from the name of a layer to that of its tensor"
        )
    made = _made(plans, activation)
    _put(model, {id(plan.module): layer for plan, layer in zip(plans, made, strict=True)})
    layers = (
        Layer(p.name, p.tensor.name, str(p.tensor.format), p.tensor.shape, p.tensor.nbytes)  # type: ignore[arg-type]
        for p in plans
    )
    replaced = {plan.name for plan in plans}
    return Replaced(tuple(layers), tuple(name for name in found if name not in replaced))


def _layers(model: Any, kinds: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The layers of these very classes, by their names."""
    if type(model) in kinds:
        raise UnsupportedError(f"{model!r} is a layer itself, which only its owner can replace: QLinear.from_tensor")
    return ((name, module) for name, module in model.named_modules() if type(module) in kinds)


def _plans(model: Any, found: dict[str, Any], file: Mapping[str, Tensor], names: Names | None) -> Iterator[Plan]:
    if isinstance(names, Mapping):
        _check_names(model, found, names)
    wanted = {name: _named(name, file, names) for name in found}
    every = _layers(model, (torch.nn.Linear, torch.nn.Embedding)) if names is None else ()
    named = ((module, _named(name, file, None)) for name, module in every)
    tied = {id(module.weight): tensor for module, tensor in named if tensor is not None}
    for name, module in found.items():
        tensor = wanted[name]
        if tensor is None:
            tensor = tied.get(id(module.weight))
        if tensor is not None:
            bias = None
            if isinstance(tensor, str) and not isinstance(module, torch.nn.Embedding):
                bias = _bias(tensor, file)
            plan = Plan(name, module, file[tensor] if isinstance(tensor, str) else tensor, bias)
            _check(plan)
            yield plan


def _named(name: str, file: Mapping[str, Tensor], names: Names | None) -> Name:
    if names is None:
        return f"{name}.weight" if f"{name}.weight" in file else None
    return names.get(name) if isinstance(names, Mapping) else names(name)


def _bias(tensor: str, file: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor beside a weight that is its bias."""
    return file.get(tensor.removesuffix(".weight") + ".bias") if tensor.endswith(".weight") else None


def _check_names(model: Any, found: dict[str, Any], names: Mapping[str, Name]) -> None:
    """UnsupportedError for a name that is no layer, or one of another class."""
    modules = dict(model.named_modules())
    for name in names.keys() - found.keys():
        if name not in modules:
            raise UnsupportedError(f"names: the model has no layer {name!r}; it has layers like {_some(found)}")
        kind = type(modules[name])
        more = "give embeddings=True" if kind is torch.nn.Embedding else "its forward may ask for a dense weight"
        raise UnsupportedError(f"names: {name!r} is of class {kind.__name__}, not torch.nn.Linear; {more}")


def _check(plan: Plan) -> None:
    """UnsupportedError unless a tensor can take the place of a layer's weight."""
    name, module, tensor, bias = plan
    who = f"layer {name!r} ({tuple(module.weight.shape)}): {tensor!r}"
    if isinstance(tensor, View) and isinstance(module, torch.nn.Embedding):
        raise UnsupportedError(f"{who} is a view of packed weights, of which a table gives no rows")
    if tensor.shape != tuple(module.weight.shape):
        raise UnsupportedError(f"{who} has another shape")
    if tensor.format.levels is None:
        raise UnsupportedError(f"{who} is of a format without a decoder")
    file_shape(tensor.format, tensor.shape)
    if isinstance(module, torch.nn.Embedding):
        if module.max_norm is not None:
            raise UnsupportedError(f"{who}: a table with max_norm is changed when it is read, a packed one cannot be")
        return
    if bias is not None and module.bias is None:
        raise UnsupportedError(f"{who}: the file has {bias!r}, the layer takes no bias")
    if bias is not None and bias.shape != tuple(module.bias.shape):
        raise UnsupportedError(f"{who}: its bias is {bias!r}, the layer's has shape {tuple(module.bias.shape)}")
    if bias is None and module.bias is not None and module.bias.is_meta:
        raise UnsupportedError(f"{who}: the layer's bias is on the device meta, and the file has none for it")


def _made(plans: list[Plan], activation: str) -> list[Any]:
    """The new layers, on the devices of the old ones; those of one tensor share its bytes."""
    weights: dict[tuple[int, str], Any] = {}
    made = []
    for _, module, tensor, bias in plans:
        device = torch.device("cpu") if module.weight.is_meta else module.weight.device
        key = id(tensor), str(device)
        shared = weights.get(key)
        layer: Any
        if isinstance(module, torch.nn.Embedding):
            layer = QEmbedding._sharing(tensor, shared, module.padding_idx, module.weight.dtype)
        else:
            kind = check_activation(activation)
            kind = kind if tensor.format.integer else "a16"
            layer = QLinear._sharing(tensor, shared, _bias_of(module, bias, device), kind)
        weights[key] = layer.to(device).weight
        vars(layer).update(hooks_of(module))
        made.append(layer.train(module.training))
    return made


def hooks_of(module: Any) -> dict[str, Any]:
    """What was registered to be called with a layer's forward and backward, as torch keeps it."""
    return {name: value for name, value in vars(module).items() if "hook" in name and "state_dict" not in name}


def _bias_of(module: Any, bias: Tensor | None, device: Any) -> Any:
    """The bias of the new layer: the file's, in the old one's dtype, or the old one itself."""
    if bias is None:
        return module.bias
    values = torch.from_numpy(bias.dequantize()).to(device, module.bias.dtype)
    return torch.nn.Parameter(values, requires_grad=module.bias.requires_grad)


def _put(model: Any, made: dict[int, Any]) -> None:
    """Put new layers in the place of old ones, wherever these are named."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children gives one that is there twice once
            if id(child) in made:
                setattr(parent, name, made[id(child)])
                if isinstance(parent, torch.nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # keeps torch off its fused kernel, which asks for dense weights


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) or "none"
