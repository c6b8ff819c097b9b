"""transformers: models loaded from a .gguf file keep its packed weights.

    import qgemm.torch.transformers

    qgemm.torch.transformers.patch()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")

transformers has two loaders of GGUF. One decodes every tensor of a file (llama, qwen2, qwen3, ...), the other keeps
blocks, for kernels that exist for few devices (qwen35, lfm2). Both are steps of the quantizer that is registered as
"gguf"; `patch` registers one that replaces Linear, Embedding and the experts of Qwen-MoE and gpt-oss by QLinear,
QEmbedding and QExperts before the weights are loaded. `replace_experts` does so for the experts of a model from
elsewhere, also Mixtral. Layers that hold ggml's blocks of experts themselves (GgufExperts) are multiplied by
`mul_mat_id` instead of transformers' kernel.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Container, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.files.gguf.reader import open
from qgemm.formats import GGML_TYPES
from qgemm.preparation import prepare
from qgemm.tensor import Tensor

from .empty_layers import empty_layer, is_replaceable
from .fusion import fuse as fuse_layers
from .model_experts import PARTS, mul_mat_id, plan_experts, replace_experts
from .patching import Patched, needs
from .pretrained import Pack, PackedConfig, PackingQuantizer, packs, settle
from .storage import file_bytes
from .views import BUFFERS

try:
    import gguf
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf import utils as gguf_utils
    from transformers.integrations.gguf.reader import load_gguf_state_dict
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
except ImportError as error:
    raise needs("qgemm.torch.transformers", "transformers", "5.17", error) from error

if TYPE_CHECKING:
    from transformers.utils.quantization_config import GgufConfig

__all__ = ["PackedConfig", "Quantizer", "mul_mat_id", "patch", "replace_experts"]


def patch(fuse: bool = True) -> Patched:
    """Make `from_pretrained(..., gguf_file=...)` keep packed weights, on the CPU in the mapping of the file.

    fuse: layers of loaded models that are called with the same x share calls (fusion.py).
    The result has `undo()`, and is a context manager that calls it; loaded models stay unchanged.
    `quantization_config=GgufConfig(dequantize=True)` is left to transformers.
    """
    original = AUTO_QUANTIZER_MAPPING["gguf"]

    def quantizer(config: GgufConfig, **kwargs: Any) -> GgufHfQuantizer:
        if config.dequantize:
            return original(config, **kwargs)
        packed = Quantizer(config, **kwargs)
        packed.fuse = fuse
        return packed

    patched = Patched()
    patched.replace(AUTO_QUANTIZER_MAPPING, "gguf", quantizer)
    if hasattr(gguf_utils, "mul_mat_id"):
        patched.replace(gguf_utils, "mul_mat_id", mul_mat_id)
    return patched


class Quantizer(PackingQuantizer, GgufHfQuantizer):
    """transformers' quantizer for GGUF, with the layers of qgemm.

    supported: whether transformers' loader that keeps blocks knows the architecture; otherwise qgemm reads the file.
    packed_modules: the new layers, by the names of their weights. fuse: see `patch`.
    """

    fuse = True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Skip the search for kernels. A file without blocks is loaded as transformers does."""
        if self.supported and not self.header.has_quantized_weights:
            self.quantization_config.dequantize = True

    def update_device_map(self, device_map: Any) -> Any:
        """The requested map with the host in place of a disk: packed weights stay in the mapped file there."""
        if not isinstance(device_map, Mapping):
            return device_map
        return {name: "cpu" if str(place) == "disk" else place for name, place in device_map.items()}

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """No limit of the host's memory, since packed weights stay in the mapped file there."""
        return {**max_memory, "cpu": sys.maxsize}

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of activations, biases and norms; products accept any."""
        self.dtype = dtype or (self.header and self.header.dtype) or torch.get_default_dtype()
        return self.dtype

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> None:
        """Put layers that hold bytes into the model, which is on the device meta."""
        if self.supported:
            self.mapping = get_gguf_conversion_mapping(self.header.architecture, model.config)
            self.quantized, packable, self.input_permutations = get_gguf_plan(self.header, self.mapping)
            formats = {name: GGML_TYPES[kind] for name, kind in packable.items()}
        else:
            self.source: Any = _Source(kwargs["checkpoint_files"][0], model)
            formats = {name: tensor.format for name, tensor in self.source.matrices.items()}
        self.packed_modules = _put_layers(model, formats, self.dtype)
        if not self.supported:
            self.packed_modules |= self.source.put_experts(model, self.dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: torch.nn.Module) -> list[Any]:
        """The conversions of the file, where those of blocks run on the host and end by Pack, which makes tiles."""
        conversions = super().update_weight_conversions(weight_conversions, *model)
        for entry in conversions if self.supported else ():
            if isinstance(entry, WeightConverter) and not packs(entry):
                entry.operations.append(Pack())
                entry.force_cpu = True
        return conversions

    def get_state_dict(self, checkpoint_file: str, model: torch.nn.Module) -> dict[str, Any]:
        """The tensors to load by name: bytes of the file for packed layers, all others in the model's dtype."""
        layers = self.packed_modules
        tensors = load_gguf_state_dict(self.header) if self.supported else self.source.read(layers, self.dtype)
        formats = {name.removesuffix("weight") + "_extra_state": layers[name].get_extra_state() for name in layers}
        return {**tensors, **formats}

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        for name, layer in self.packed_modules.items():
            if name in self.input_permutations:
                order = self.input_permutations[name].to(layer.weight.device, BUFFERS["column_order"])
                layer.register_buffer("column_order", order)
        layers = [layer for layer in self.packed_modules.values() if layer.weight.is_cuda]
        tiles = [layer.packed for layer in layers]
        if tiles:
            prepare(tiles, dtype=str(self.dtype).removeprefix("torch."))
        self.source, self.packed_modules = None, {}  # the model keeps its quantizer, which must not keep these
        super()._process_model_after_weight_loading(model)
        if self.supported:
            model._weight_conversions = None  # they describe the file; a saved model has its own
        model.config.quantization_config = self.quantization_config = PackedConfig()
        settle(model)
        if self.fuse:
            fuse_layers(model)
        return model

    def is_serializable(self) -> bool:
        """True: `save_pretrained` writes a folder of packed weights."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: gradients flow to biases, norms, and adapters beside packed layers."""
        return True


# ---------------------------------------------------------------- layers


def _put_layers(model: torch.nn.Module, formats: Mapping[str, Format], dtype: torch.dtype) -> dict[str, Any]:
    """Put an empty QLinear or QEmbedding where a layer has a weight of these formats, by its name -> the layers.

    Layers of other classes keep dense weights, as do those whose weights the model reads directly (T5 reads one to
    learn a dtype), and layers tied to one of these.
    """
    modules = {f"{name}.weight": module for name, module in model.named_modules()}
    read = {name for name in modules if _is_read(model, name)}
    planned = {name: fmt for name, fmt in formats.items() if name not in read and _fits(modules.get(name), fmt, dtype)}
    for target, source in model.all_tied_weights_keys.items():
        if source in planned and target not in read and _fits(modules.get(target), planned[source], dtype):
            planned[target] = planned[source]
        else:
            planned = {name: fmt for name, fmt in planned.items() if name not in (target, source)}
    for name, fmt in planned.items():
        old = modules[name]
        modules[name] = empty_layer(old, fmt, dtype)
        modules[name].tensor_name = name
        model.set_submodule(name.removesuffix(".weight"), modules[name])
    return {name: modules[name] for name in planned}


def _is_read(model: torch.nn.Module, name: str) -> bool:
    """Whether the classes of a layer's owner access its weight: self.LAYER.weight."""
    owner, _, layer = name.removesuffix(".weight").rpartition(".")
    sources = map(_source, type(model.get_submodule(owner)).__mro__)
    return any(re.search(rf"\bself\.{layer}\.weight\b", source) for source in sources)


@cache
def _source(kind: type) -> str:
    """The source text of a class; none if it is unavailable or a class of no model, whose long modules take time."""
    library, _, rest = kind.__module__.partition(".")
    if library == "torch" or (library == "transformers" and not rest.startswith("models.")):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _fits(module: torch.nn.Module | None, fmt: Format, dtype: torch.dtype) -> bool:
    """Whether a layer can hold these bytes: blocks, or numbers smaller than the model's dtype."""
    narrow = not fmt.plain or fmt.block_bytes < dtype.itemsize
    return is_replaceable(module) and narrow and fmt.levels is not None


# ---------------------------------------------------------------- files of architectures whose tensors are all decoded


class _Source:
    """A file of an architecture whose tensors transformers decodes, under the names of a model.

    matrices: the matrices whose rows at most need another order (Q and K of llama), in the model's order.
    """

    def __init__(self, path: str, model: torch.nn.Module) -> None:
        self.file = open(path)
        config = load_gguf_checkpoint(path)["config"]
        self.processor = TENSOR_PROCESSORS.get(self.file.metadata["general.architecture"], TensorProcessor)(config)
        with Patched() as patched:  # one name map, where transformers makes one for each module
            patched.replace(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
            self.names = get_gguf_hf_weights_map(model, self.processor)
        self.matrices: dict[str, Tensor] = {}
        for name in self.file.keys() & self.names.keys():
            tensor = self.file[name]
            rows = _rows(self.processor, name, tensor.shape[0]) if tensor.ndim == 2 else None
            if rows is not None:
                ordered = tensor if (np.diff(rows) == 1).all() else tensor[rows]
                self.matrices[self.names[name]] = ordered.in_device_form()

    def put_experts(self, model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        """Put empty QExperts where the file has blocks of a layer's experts -> the packed weights, by name."""
        parts: dict[str, Any] = {}
        for name, tensors in list(plan_experts(model, self.file)):
            layer = tensors.empty(dtype)
            model.set_submodule(name, layer)
            for part, weight, bias in zip(PARTS, tensors.weights, tensors.biases, strict=True):
                target = f"{name}.{part}"
                self.names[weight.name], self.matrices[f"{target}.weight"] = f"{target}.weight", weight.in_device_form()
                parts[f"{target}.weight"] = getattr(layer, part)
                if bias is not None:
                    self.names[bias.name] = f"{target}.bias"
        return parts

    def read(self, packed: Container[str], dtype: torch.dtype) -> dict[str, Any]:
        """torch tensors by the model's names: bytes for packed weights, all others decoded, in `dtype`."""
        tensors: dict[str, Any] = {}
        for name, tensor in self.file.items():
            target = self.names.get(name)
            if target in packed:
                tensors[target] = file_bytes(self.matrices[target])
                continue
            processed = self.processor.process(
                tensor.dequantize(), name, tensor_key_mapping=self.names, parsed_parameters={"tensors": tensors}
            )
            if processed.name in self.names:
                tensors[self.names[processed.name]] = torch.from_numpy(np.ascontiguousarray(processed.weights)).to(
                    dtype
                )
        self.file.close()
        return {name: tensor if name in packed else tensor.to(dtype) for name, tensor in tensors.items()}


def _rows(processor: TensorProcessor, name: str, n: int) -> NDArray[np.int64] | None:
    """The rows of a matrix [n, K] of the file in the model's order; None if the model changes the matrix otherwise.

    The processor is given a matrix of two columns whose numbers show where each of them moves.
    """
    probe = np.arange(2 * n).reshape(n, 2)
    try:
        processed = processor.process(probe.copy(), name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    except (ValueError, KeyError):  # it needs the right K, or other tensors
        return None
    rows: NDArray[np.int64] = np.asarray(processed.weights).reshape(-1)[::2] // 2
    complete = processed.name == name and np.array_equal(np.sort(rows), probe[:, 0] // 2)
    return rows if complete and np.array_equal(processed.weights, probe[rows]) else None
