"""replace_linear: replace the Linear layers of a model by QLinear over the packed tensors of a .gguf file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from qgemm.arguments import check_activation
from qgemm.errors import ShapeError, UnsupportedError
from qgemm.files.gguf.reader import GGUFFile, open
from qgemm.files.paths import PathLike, shown_path
from qgemm.tensor import Tensor
from qgemm.views import View

from .embedding import QEmbedding
from .fusion import fuse as fuse_layers
from .hosts import adopt
from .linear import QLinear
from .storage import file_shape

Name = str | Tensor | None  # name of a tensor in the file, or a Tensor derived from it, or None to keep the layer
Names = Mapping[str, Name] | Callable[[str], Name]


class Layer(NamedTuple):
    """A replaced layer: its name in the model, its tensor's name in the file, format, shape and size."""

    name: str
    tensor: str
    format: str
    shape: tuple[int, int]
    nbytes: int


class Replaced(NamedTuple):
    """The result of `replace_linear`: the replaced layers, and the names of the layers that were kept."""

    layers: tuple[Layer, ...]
    kept: tuple[str, ...]  # plain: ok, a public name

    def __str__(self) -> str:
        formats = Counter(layer.format for layer in self.layers)
        kinds = ", ".join(f"{count} {fmt}" for fmt, count in formats.most_common())
        size = sum(layer.nbytes for layer in self.layers) / 2**20
        others = f"; kept as they are: {', '.join(self.kept)}" if self.kept else ""
        return f"{len(self.layers)} layers replaced ({kinds}; {size:.1f} MiB){others}"


class Plan(NamedTuple):
    """A layer to replace, its tensor, and the tensor of its bias, if the file has one."""

    name: str
    module: Any
    tensor: Tensor
    bias: Tensor | None


def replace_linear(
    model: torch.nn.Module,
    file: PathLike | GGUFFile | Mapping[str, Tensor],
    names: Names | None = None,
    *,
    embeddings: bool = False,
    activation: str = "a16",
    fuse: bool = True,
) -> Replaced:
    """Replace torch.nn.Linear layers of a model, in place, by QLinear over a file's tensors.

    file: a .gguf file, by its path or opened, or any mapping of names to Tensors, such as `qgemm.load` of an AWQ
    folder. Weights on the CPU stay in the mapping of the file, which may be closed; those of a model on a GPU are
    packed there.
    names: the name of a layer ("layers.0.q_proj") -> that of its tensor, or a Tensor, e.g. one with reordered rows, or
    None, which keeps the layer. A mapping keeps the layers that it lacks; a function is called for every layer. By
    default a layer gets the tensor of its own name with ".weight", and is kept if there is none.
    embeddings: replace torch.nn.Embedding as well, by QEmbedding.
    activation: "a8" applies to layers whose formats have integer codes; the others use "a16".
    fuse: layers that are called with the same x share calls (fusion.py).

    Layers of one tensor share it, as tied ones do; hooks of their forwards stay. A bias comes from the file where it
    has one beside the weight ("x.bias" for "x.weight"), else from the layer. Subclasses of Linear are kept, since their
    forwards may need dense weights.
    Everything is checked before any replacement: UnsupportedError or ShapeError names the layer and tensor that do not
    fit, NameNotFoundError a tensor that the file lacks.
    """
    if not isinstance(file, Mapping):
        with open(file) as gguf:
            return replace_linear(model, gguf, names, embeddings=embeddings, activation=activation, fuse=fuse)
    candidates = dict(_layers(model, (torch.nn.Linear, torch.nn.Embedding) if embeddings else (torch.nn.Linear,)))
    plans = list(_plans(model, candidates, file, names))
    if not candidates:
        packed = sum(isinstance(module, (QLinear, QEmbedding)) for module in model.modules())
        others = f"; {packed} of its layers are packed already" if packed else ""
        raise UnsupportedError(f"no layer was replaced: the model has no torch.nn.Linear{others}")
    if not plans:
        where = f"{shown_path(file.path)} has" if isinstance(file, GGUFFile) else "there are"
        raise UnsupportedError(
            f"no layer was replaced: {where} tensors like {_examples(file)}, "
            f"the model has layers like {_examples(candidates)}; "
            "give names=, from the name of a layer to that of its tensor"
        )
    new_layers = _new_layers(plans, activation)
    _put(model, {id(plan.module): layer for plan, layer in zip(plans, new_layers, strict=True)})
    adopt(model, activation)
    if fuse:
        fuse_layers(model)
    layers = (
        Layer(p.name, p.tensor.name, str(p.tensor.format), p.tensor.shape, p.tensor.nbytes)  # type: ignore[arg-type]
        for p in plans
    )
    replaced = {plan.name for plan in plans}
    return Replaced(tuple(layers), tuple(name for name in candidates if name not in replaced))


def _layers(model: torch.nn.Module, kinds: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The layers of exactly these classes, by name."""
    if type(model) in kinds:
        raise UnsupportedError(f"{model!r} is a layer itself, which only its owner can replace: QLinear.from_tensor")
    return ((name, module) for name, module in model.named_modules() if type(module) in kinds)


def _plans(
    model: torch.nn.Module, candidates: dict[str, Any], file: Mapping[str, Tensor], names: Names | None
) -> Iterator[Plan]:
    if isinstance(names, Mapping):
        _check_names(model, candidates, names)
    tensors = {name: _named(name, file, names) for name in candidates}
    layers = _layers(model, (torch.nn.Linear, torch.nn.Embedding)) if names is None else ()
    own_tensors = ((module, _named(name, file, None)) for name, module in layers)
    tied = {id(module.weight): tensor for module, tensor in own_tensors if tensor is not None}
    for name, module in candidates.items():
        tensor = tensors[name]
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
    """The tensor of the bias beside a weight."""
    return file.get(tensor.removesuffix(".weight") + ".bias") if tensor.endswith(".weight") else None


def _check_names(model: torch.nn.Module, candidates: dict[str, Any], names: Mapping[str, Name]) -> None:
    """UnsupportedError for a name that is no layer, or one of another class."""
    modules = dict(model.named_modules())
    for name in names.keys() - candidates.keys():
        if name not in modules:
            raise UnsupportedError(
                f"names: the model has no layer {name!r}; it has layers like {_examples(candidates)}"
            )
        kind = type(modules[name])
        more = "give embeddings=True" if kind is torch.nn.Embedding else "its forward may ask for a dense weight"
        raise UnsupportedError(f"names: {name!r} is of class {kind.__name__}, not torch.nn.Linear; {more}")


def _check(plan: Plan) -> None:
    """UnsupportedError or ShapeError unless a tensor can replace a layer's weight."""
    name, module, tensor, bias = plan
    label = f"layer {name!r} ({tuple(module.weight.shape)}): {tensor!r}"
    if isinstance(tensor, View) and isinstance(module, torch.nn.Embedding):
        raise UnsupportedError(f"{label} is a view of packed weights, of which a table gives no rows")
    if tensor.shape != tuple(module.weight.shape):
        raise ShapeError(f"{label} has another shape")
    if tensor.format.levels is None:
        raise UnsupportedError(f"{label} is of a format without a decoder")
    file_shape(tensor.format, tensor.shape)
    if isinstance(module, torch.nn.Embedding):
        if module.max_norm is not None:
            raise UnsupportedError(f"{label}: a table with max_norm is changed when it is read, a packed one cannot be")
        return
    if bias is not None and module.bias is None:
        raise UnsupportedError(f"{label}: the file has {bias!r}, the layer takes no bias")
    if bias is not None and bias.shape != tuple(module.bias.shape):
        raise ShapeError(f"{label}: its bias is {bias!r}, the layer's has shape {tuple(module.bias.shape)}")
    if bias is None and module.bias is not None and module.bias.is_meta:
        raise UnsupportedError(f"{label}: the layer's bias is on the device meta, and the file has none for it")


def _new_layers(plans: list[Plan], activation: str) -> list[Any]:
    """The new layers, on the devices of the old ones; layers of one tensor share its bytes."""
    weights: dict[tuple[int, str], Any] = {}
    layers = []
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
        layers.append(layer.train(module.training))
    return layers


def hooks_of(module: torch.nn.Module) -> dict[str, Any]:
    """The hooks of a layer's forward and backward, as torch stores them."""
    return {name: value for name, value in vars(module).items() if "hook" in name and "state_dict" not in name}


def _bias_of(module: torch.nn.Module, bias: Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The bias of the new layer: the file's, in the old one's dtype, or the old one itself."""
    if bias is None:
        return module.bias
    values = torch.from_numpy(bias.dequantize()).to(device, module.bias.dtype)
    return torch.nn.Parameter(values, requires_grad=module.bias.requires_grad)


def _put(model: torch.nn.Module, replacements: dict[int, Any]) -> None:
    """Replace old layers by new ones under all their names; replacements: id of the old layer -> new one."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children lists a shared layer once only
            if id(child) in replacements:
                setattr(parent, name, replacements[id(child)])
                if isinstance(parent, torch.nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # disables torch's fused kernel, which needs dense weights


def _examples(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) or "none"
