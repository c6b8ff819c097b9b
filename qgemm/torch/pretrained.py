"""transformers: models with packed layers are saved and loaded as those of the quantization method "qgemm".

`save_pretrained` writes a folder of safetensors, in shards or not. Per packed weight it holds bytes in the layout of a
.gguf file, and format and shape as text, as in a state dict: "x.weight", uint8 [N, bytes per row], and
"x._extra_state". config.json has quantization_config {"quant_method": "qgemm", "activation": "a16"}. Importing this
module registers the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qgemm.errors import UnsupportedError

from .empty_layers import empty_layer
from .experts import QExperts
from .fusion import fuse
from .hosts import METHOD, allow_resizing
from .model_experts import PARTS, experts_activation
from .module import STATE, PackedModule, description
from .patching import needs
from .storage import PackedParameter, Shape, element_size, format_of, parameter_class
from .views import BUFFERS

try:
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise needs("qgemm.torch.transformers", "transformers", "5.17", error) from error


class Pack(ConversionOps):
    """A step of transformers' loader: bytes of a packed weight on the host become a parameter that knows its format.

    When the loader then moves the parameter to a GPU it is packed into tiles on the way. Other weights pass unchanged.
    """

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: torch.nn.Module, **_: Any
    ) -> dict[str, Any]:
        """The tensors by name; lists of one tensor, as the first step gets them, become that tensor."""
        converted: dict[str, Any] = {}
        for name, tensors in input_dict.items():
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            target = full_layer_name if len(input_dict) == 1 else name
            layer = packed_layer(model, target)
            if layer is not None and tensor.device.type == "cpu":
                tensor = parameter_class(PackedParameter, layer._format, layer._shape)(tensor)
            converted[target] = tensor
        return converted

    @property
    def reverse_op(self) -> ConversionOps:
        """This operation: a state dict has the file's bytes already."""
        return self


def packed_layer(model: torch.nn.Module, name: str) -> PackedModule | None:
    """The packed layer whose weight has this name; None if there is none."""
    layer, _, parameter = name.rpartition(".")
    module = model.get_submodule(layer) if parameter == "weight" else None
    return module if isinstance(module, PackedModule) else None


class PackingQuantizer(HfQuantizer):
    """The part of a quantizer by which packed weights reach a GPU as tiles, one weight at a time."""

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **_: Any) -> bool:
        """Whether a weight is packed: tiles have another shape than the file's bytes."""
        return packed_layer(model, param_name) is not None

    def param_element_size(self, model: torch.nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Bytes on a GPU for each of `param`: transformers allocates all of them first, in one piece."""
        layer = packed_layer(model, param_name)
        return float(param.element_size()) if layer is None else element_size(layer.format, layer._shape)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: torch.nn.Module) -> list[Any]:
        """Conversions of weights, the last of which keeps packed ones on the host until they become tiles.

        model: the model, which older releases of transformers do not pass.
        """
        conversions = super().update_weight_conversions(weight_conversions, *model)
        return [*conversions, WeightConverter([r"(\.weight)$"], [r"\1"], [Pack()], force_cpu=True)]

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **_: Any) -> torch.nn.Module:
        model._weight_conversions = [
            entry for entry in model._weight_conversions or () if not packs(entry)
        ]  # a saved model needs none
        return model


def packs(conversion: Any) -> bool:
    """Whether a conversion ends by `Pack`."""
    return any(isinstance(operation, Pack) for operation in getattr(conversion, "operations", ()))


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """quantization_config of a model with packed layers. activation: of layers whose format has integer codes."""

    def __init__(self, activation: str = "a16", **_: Any) -> None:
        self.quant_method, self.activation = METHOD, activation


@register_quantizer(METHOD)
class PackedQuantizer(PackingQuantizer):
    """Loads a folder of packed weights into packed layers."""

    quantization_config: PackedConfig
    dtype: torch.dtype

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of activations, biases and norms; products accept any."""
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        return self.dtype

    def _process_model_before_weight_loading(
        self, model: torch.nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        """Put empty packed layers into the model, which is on the device meta."""
        if not self.pre_quantized:
            raise UnsupportedError(
                "a folder of dense weights becomes one of packed weights by `qgemm convert FOLDER MODEL.gguf`, which "
                "from_pretrained(..., gguf_file=) reads; quantization_config of qgemm is that of a saved model"
            )
        weights = _by_layer(model, saved_weights(checkpoint_files or ()))
        put_layers(model, weights, self.dtype, self.quantization_config.activation)

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        super()._process_model_after_weight_loading(model, **kwargs)
        settle(model)
        fuse(model)
        return model

    def is_serializable(self) -> bool:
        """True: a loaded model can be saved again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: gradients flow to biases, norms, and adapters beside packed layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True


def settle(model: Any) -> None:
    """Finish a loaded model: it can be cast and resized."""
    model.is_quantized = False  # transformers refuses half() of quantized models, packed layers accept it
    allow_resizing(model)


# ---------------------------------------------------------------- the folder's weights


class SavedWeight(NamedTuple):
    """A packed weight in a folder: its layer's name, format, shape, and the shapes of other tensors of the layer."""

    name: str
    format: str
    shape: Shape
    others: Mapping[str, Shape]


def saved_weights(paths: Sequence[str]) -> Iterator[SavedWeight]:
    """The packed weights of .safetensors files, which hold one model together."""
    states: dict[str, torch.Tensor] = {}
    shapes: dict[str, Shape] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
            states |= {name: file.get_tensor(name) for name in names if name.endswith(STATE)}
    for name, state in states.items():
        layer = name.removesuffix(STATE)
        others = {other: shapes[f"{layer}.{other}"] for other in (*BUFFERS, "bias") if f"{layer}.{other}" in shapes}
        yield SavedWeight(layer, *description(state), others)


def _by_layer(model: Any, weights: Iterable[SavedWeight]) -> dict[str, SavedWeight]:
    """Weights by the model's names of their layers, which differ from those of a folder where transformers renames."""
    renamings = [entry for entry in get_model_conversion_mapping(model) or () if isinstance(entry, WeightRenaming)]
    names = {f"{name}.weight": True for name, _ in model.named_modules()}
    renamed = {
        rename_source_key(f"{weight.name}.weight", renamings, [], model.base_model_prefix, names)[0]: weight
        for weight in weights
    }
    for name, source in model.all_tied_weights_keys.items():  # the folder of a base model lacks its head
        if source in renamed:
            renamed.setdefault(name, renamed[source])
    return {name.removesuffix(".weight"): weight for name, weight in renamed.items()}


def put_layers(model: Any, weights: Mapping[str, SavedWeight], dtype: torch.dtype, activation: str) -> None:
    """Replace the layers of a model by empty packed ones for saved weights, by the layers' names."""
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        owner = name.rpartition(".")[0]
        if len(weight.shape) == 3:
            if name == f"{owner}.{PARTS[0]}":
                parts = [weights[f"{owner}.{part}"] for part in PARTS]
                model.set_submodule(owner, _empty_experts(modules[owner], parts, dtype))
        elif name in modules:
            layer = empty_layer(modules[name], format_of(weight.format), dtype, activation)
            layer.tensor_name = f"{name}.weight"
            for other in BUFFERS.keys() & weight.others.keys():
                layer.register_buffer(other, torch.empty(weight.others[other], dtype=BUFFERS[other], device="meta"))
                model._keep_in_fp32_modules_strict.add(f"{name}.{other}")
            model.set_submodule(name, layer)


def _empty_experts(old: torch.nn.Module, parts: Sequence[SavedWeight], dtype: torch.dtype) -> QExperts:
    """The empty layer of experts that replaces one of the model's."""
    activation = experts_activation(old)
    if not activation:
        raise UnsupportedError(f"the folder has packed experts {parts[0].name!r}, the model has {type(old).__name__}")
    e, f, k = parts[0].shape
    formats = [format_of(part.format) for part in parts]
    return QExperts(e, k, f, formats, activation, "bias" in parts[0].others, "meta", dtype)
