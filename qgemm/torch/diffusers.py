"""diffusers: models loaded from a .gguf file multiply by its packed weights.

    import qgemm.torch.diffusers

    qgemm.torch.diffusers.patch()
    config = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    model = FluxTransformer2DModel.from_single_file("model.gguf", quantization_config=config)

diffusers keeps the blocks of a file in its GGUFLinear, and decodes a whole weight at every call. `patch` replaces each
by a QLinear once a model is loaded. The replacement still is a GGUFLinear with a GGUFParameter, for code that checks
these classes: LoRA through peft, which adds its product to that of the layer; `model.dequantize()`.

`save_pretrained` writes packed weights to safetensors, and their formats to config.json. `from_pretrained` reads them
by the quantization method "qgemm", which this module adds to diffusers' table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from gguf import GGMLQuantizationType

from qgemm.errors import UnsupportedError
from qgemm.formats import GGML_TYPES

from .fusion import fuse as fuse_layers
from .hosts import METHOD
from .linear import QLinear
from .module import STATE
from .patching import Patched, needs
from .storage import (
    PackedParameter,
    class_named,
    file_bytes,
    file_shape,
    format_of,
    host_tensor,
    packed_of,
    parameter_class,
)

try:
    from diffusers.configuration_utils import FrozenDict
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    from diffusers.quantizers.base import DiffusersQuantizer
    from diffusers.quantizers.gguf import utils
    from diffusers.quantizers.gguf.gguf_quantizer import GGUFQuantizer
    from diffusers.quantizers.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise needs("qgemm.torch.diffusers", "diffusers", "0.38", error) from error


def patch(fuse: bool = True) -> Patched:
    """Make models that diffusers loads from a .gguf file multiply by packed weights, on the CPU and on a GPU.

    fuse: layers of loaded models that are called with the same x share calls (fusion.py).
    The result has `undo()`, and is a context manager that calls it; loaded models keep their layers.
    """
    original = GGUFQuantizer._process_model_after_weight_loading

    def loaded(self: Any, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = original(self, model, **kwargs)
        _replace(model)
        self.__class__ = PackedGGUFQuantizer
        return _settle(model, fuse)

    patched = Patched()
    patched.replace(GGUFQuantizer, "_process_model_after_weight_loading", loaded)
    return patched


def _replace(model: torch.nn.Module) -> None:
    """Replace each GGUFLinear of a model; UnsupportedError for a type without a decoder."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is utils.GGUFLinear and isinstance(child.weight, utils.GGUFParameter):
                setattr(parent, name, PackedLinear.from_gguf_linear(child))


def _settle(model: Any, fuse: bool = True) -> Any:
    """Finish a loaded model: it can be cast, fused and saved."""
    if fuse:
        fuse_layers(model)
    model.is_quantized = False  # diffusers refuses casts of quantized models, packed layers accept them
    layers = model.named_modules()
    formats = {name: layer._format for name, layer in layers if isinstance(layer, PackedLinear)}
    model.register_to_config(quantization_config=PackedConfig(formats))
    for parent in model.modules():
        for method in (fuse_projections, fuse_lora):
            if hasattr(type(parent), method.__name__):
                setattr(parent, method.__name__, partial(method, parent))
    return model


FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}  # diffusers' names of fused layers, and of the layers whose outputs each joins


def fuse_projections(attention: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """The method of this name of diffusers' attention, for packed projections: each fused layer is a JoinedLinear.

    diffusers concatenates dense weights. It is called with empty dense layers in place of the packed ones, and the
    layers that it adds are then replaced.
    """
    parts = {part for fused in FUSED.values() for part in fused}
    layers: dict[str, Any] = {name: child for name, child in attention.named_children() if name in parts}
    if all(type(layer) is torch.nn.Linear for layer in layers.values()):  # after `model.dequantize()`
        type(attention).fuse_projections(attention, *args, **kwargs)
        return
    for name, layer in layers.items():
        empty = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        setattr(attention, name, empty)
    try:
        type(attention).fuse_projections(attention, *args, **kwargs)
    finally:
        for name, layer in layers.items():
            setattr(attention, name, layer)
    for name in FUSED.keys() & attention._modules.keys():
        setattr(attention, name, JoinedLinear(layers[part] for part in FUSED[name]))


class JoinedLinear(torch.nn.Module):
    """The outputs of several Linear layers of one x, concatenated; it holds no weights of its own."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., the sum of the layers' N]."""
        return torch.cat([layer(x) for layer in self.layers], -1)


def fuse_lora(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """The method of this name of diffusers' models: adapters are fused into dense weights, and beside packed ones."""
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), PackedLinear) and hasattr(module, "merged_adapters"):
            module.merge, module.unmerge = partial(_merge, module), partial(_unmerge, module)
    type(model).fuse_lora(model, *args, **kwargs)


def _merge(adapted: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    """peft's `merge` of a layer over a packed one, which holds the adapters itself from then on (`add_lora`)."""
    for name in adapter_names or adapted.active_adapters:
        if name not in adapted.lora_A or name in adapted.merged_adapters:
            continue
        A, B = adapted.lora_A[name], adapted.lora_B[name]
        if name in getattr(adapted, "lora_variant", ()) or B.bias is not None:
            raise UnsupportedError(f"adapter {name!r} changes the weight or the bias, {adapted.base_layer!r} cannot")
        adapted.base_layer.add_lora(A.weight, B.weight, adapted.scaling[name], name)
        adapted.merged_adapters.append(name)


def _unmerge(adapted: Any) -> None:
    """The inverse of `_merge`."""
    while adapted.merged_adapters:
        adapted.base_layer.remove_lora(adapted.merged_adapters.pop())


class PackedLinear(QLinear, utils.GGUFLinear):
    """A QLinear that passes as a GGUFLinear."""

    compute_dtype: Any
    source_cls: Any

    @classmethod
    def from_gguf_linear(cls, layer: utils.GGUFLinear) -> PackedLinear:
        """Another layer over the memory of this one."""
        fmt = GGML_TYPES[layer.weight.quant_type]
        if fmt.levels is None:
            raise UnsupportedError(f"{layer!r} is packed as {fmt}, which has no decoder")
        weight = _parameter(layer.weight.as_tensor(), fmt.name, tuple(layer.weight.quant_shape))
        new = cls._sharing(weight.packed(), weight, layer.bias, "a16")
        new.compute_dtype, new.source_cls = layer.compute_dtype, layer.source_cls
        return new.train(layer.training)  # type: ignore[no-any-return]

    @classmethod
    def empty(cls, old: torch.nn.Linear, spelling: str) -> PackedLinear:
        """The layer on the device meta that replaces a dense one."""
        new, fmt, shape = cls.__new__(cls), format_of(spelling), (old.out_features, old.in_features)
        torch.nn.Module.__init__(new)
        new._describe(fmt, shape)
        new.weight = _parameter(torch.empty(file_shape(fmt, shape), dtype=torch.uint8, device="meta"), spelling, shape)
        new.tensor_name, new.compute_dtype, new.source_cls = "", old.weight.dtype, type(old)
        new._complete(old.bias, "a16")
        return new

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; a weight that another function made, as `load_state_dict` does, gets the class."""
        if name == "weight" and param is not None and not isinstance(param, GGUFParameter):
            param = _parameter(param.data, self._format, self._shape)
        super().register_parameter(name, param)


# ---------------------------------------------------------------- saved and loaded


class Method(str, Enum):
    """diffusers' type of names of quantization methods."""

    QGEMM = METHOD


class PackedConfig(QuantizationConfigMixin):
    """quantization_config of a saved model. formats: of the packed weights, by the names of their layers."""

    def __init__(self, formats: Mapping[str, str] | None = None, **_: Any) -> None:
        self.quant_method, self.formats = Method.QGEMM, dict(formats or {})

    def to_diff_dict(self) -> dict[str, Any]:
        """`to_dict`, for the repr."""
        return self.to_dict()  # type: ignore[no-any-return]


class Packed(DiffusersQuantizer):
    """The part of a quantizer that describes loaded models with packed layers."""

    is_serializable = is_trainable = is_compileable = True

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors to save: formats are in the config."""
        return {name: value for name, value in state_dict.items() if not name.endswith(STATE)}, {}

    def _dequantize(self, model: Any) -> Any:
        model._internal_dict = FrozenDict({k: v for k, v in model.config.items() if k != "quantization_config"})
        return utils._dequantize_gguf_and_restore_linear(model, [])


class PackedGGUFQuantizer(Packed, GGUFQuantizer):
    """The quantizer of a model that was loaded from a .gguf file."""


class PackedQuantizer(Packed):
    """Loads a folder of packed weights."""

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        """Put empty packed layers into the model, which is on the device meta."""
        for name, spelling in self.quantization_config.formats.items():
            model.set_submodule(name, PackedLinear.empty(model.get_submodule(name), spelling))

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **_: Any) -> torch.nn.Module:
        return _settle(model)

    def update_missing_keys(self, model: torch.nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Names that a folder lacks by mistake."""
        return [name for name in missing_keys if not name.endswith(STATE)]


AUTO_QUANTIZER_MAPPING[METHOD], AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = PackedQuantizer, PackedConfig


# ---------------------------------------------------------------- the layer and its parameter


class GGUFParameter(PackedParameter, utils.GGUFParameter):
    """Bytes of a weight, as in the file or as GPU tiles, in diffusers' class.

    Operations of torch return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def quant_type(self) -> GGMLQuantizationType:
        """ggml's type of the bytes."""
        return GGMLQuantizationType[format_of(self.spelling).name.upper()]

    @property
    def quant_shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.packed_shape

    def packed(self) -> Any:
        """The Tensor or DeviceTensor over them."""
        return packed_of(self, self.spelling, self.packed_shape)

    def as_tensor(self) -> torch.Tensor:
        """The bytes in the file's layout [N, bytes per row], a plain tensor on their device, for diffusers' decoder."""
        if self.dim() > 1:
            return super().as_tensor()
        return file_bytes(host_tensor(self, self.spelling, self.packed_shape)).to(self.device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A copy on another device, with the same type and shape."""
        moved = super().to(*args, **kwargs)
        return moved if moved is self else type(self)(moved)


def __getattr__(name: str) -> type[Any]:
    return class_named(GGUFParameter, name)


def _parameter(data: torch.Tensor, spelling: str, shape: tuple[int, ...]) -> GGUFParameter:
    parameter: GGUFParameter = parameter_class(GGUFParameter, spelling, shape)(data)
    return parameter
