"""The installation of the plugin: methods for vllm-gguf-plugin's configuration, and its loader with a check and kernels.

Before a model is created, the loader notes the formats of the file's tensors, so that layers can refuse a number of
ranks before anything is loaded. After loading it compiles the kernels, before vLLM captures CUDA graphs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import vllm_gguf_plugin
from gguf import GGMLQuantizationType
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm_gguf_plugin.quantization.utils import is_layer_skipped_gguf
from vllm_gguf_plugin.weight_utils import get_gguf_weight_type_map

from qgemm.arguments import Activation, check_activation
from qgemm.codec.format import Format
from qgemm.formats import GGML_TYPES
from qgemm.preparation import prepare
from qgemm.tensor import Tensor
from qgemm.torch import serving
from qgemm.torch.patching import Patched
from qgemm.version import __version__

from .methods import PackedEmbeddingMethod, PackedExpertsMethod, PackedLinearMethod

OPTION = "qgemm"  # key of vLLM's additional_config: {"activation": ...}

logger = init_logger("vllm.qgemm")
patched = Patched()
formats: dict[str, Format] = {}  # of the file that is being loaded: name of a tensor in the model -> format


def install() -> None:
    """Register vllm-gguf-plugin, then this plugin; in this order nothing that the other registers later undoes it."""
    vllm_gguf_plugin.register()
    if vllm_gguf_plugin.GGUFConfig.get_quant_method is quant_method:
        return
    register_model_loader("gguf")(PackedModelLoader)
    patched.replace(vllm_gguf_plugin.GGUFConfig, "get_quant_method", quant_method)


def activation_of(vllm_config: Any) -> Activation:
    """The kind of activations that vLLM's configuration asks for."""
    options = vllm_config.additional_config
    return check_activation(options.get(OPTION, {}).get("activation") if isinstance(options, dict) else None)


def quant_method(config: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """The method of a layer: GGUFConfig.get_quant_method of vllm-gguf-plugin."""
    if isinstance(layer, RoutedExperts):
        return PackedExpertsMethod(prefix, layer.moe_config, formats_of(prefix, ("down_proj", "w2")))
    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        return None
    table = isinstance(layer, VocabParallelEmbedding)
    name = prefix.rpartition(".")[2]
    merged = [{name: [part]} for part in config.packed_modules_mapping.get(name, ())]
    skipped = [is_layer_skipped_gguf(prefix, config.unquantized_modules, mapping) for mapping in merged or [{}]]
    if all(skipped):
        return UnquantizedEmbeddingMethod() if table else UnquantizedLinearMethod()
    if table:
        return PackedEmbeddingMethod(prefix, activation_of(get_current_vllm_config()))
    return PackedLinearMethod(prefix, activation_of(get_current_vllm_config()), any(skipped), formats_of(prefix))


def formats_of(prefix: str, projections: tuple[str, ...] = ()) -> tuple[Format, ...]:
    """The formats of a layer's tensors, as far as names of the file's tensors tell; projections: parts of the layer."""
    layer = prefix[max(0, prefix.find("layers.")) :]
    ends = tuple(f".{projection}.weight" for projection in projections) or (f"{layer}.weight",)
    return tuple({fmt for name, fmt in formats.items() if layer in name and name.endswith(ends)})


class PackedModelLoader(vllm_gguf_plugin.GGUFModelLoader):  # type: ignore[misc]
    """vllm-gguf-plugin's loader, which reads formats before the model is created and compiles kernels after loading."""

    def load_model(self, vllm_config: Any, model_config: Any, *rest: Any, **options: Any) -> torch.nn.Module:
        """The model, with its weights packed and its kernels compiled."""
        if isinstance(vllm_config.additional_config, dict):  # part of the key of vLLM's compile cache
            vllm_config.additional_config[OPTION] = {
                **vllm_config.additional_config.get(OPTION, {}), "version": __version__,
            }  # fmt: skip
        model: torch.nn.Module = super().load_model(vllm_config, model_config, *rest, **options)
        weights = list(serving.packed_weights(model))
        if weights:
            prepare_kernels(weights, vllm_config, model_config)
        return model

    def _prepare_adapter(self, model_config: Any) -> Any:
        adapter = super()._prepare_adapter(model_config)
        formats.clear()
        if get_tensor_model_parallel_world_size() > 1 and adapter.load_spec.gguf_to_hf_name_map:
            for path in adapter.load_spec.weights_source:
                types = get_gguf_weight_type_map(path, adapter.load_spec.gguf_to_hf_name_map)
                formats.update((name, GGML_TYPES[GGMLQuantizationType[kind]]) for name, kind in types.items())
        return adapter


def prepare_kernels(weights: list[Any], vllm_config: Any, model_config: Any) -> None:
    """Compile kernels for the numbers of tokens that vLLM captures, and for powers of two up to those of a prompt."""
    kind = activation_of(vllm_config)
    most = vllm_config.scheduler_config.max_num_batched_tokens
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    rows = {*captured, *(1 << bit for bit in range(most.bit_length())), most}
    dtype = str(model_config.dtype).removeprefix("torch.")
    prepared = prepare(weights, m=rows, activation=kind, dtype=dtype, progress=False)
    backend = "CPU" if isinstance(weights[0], Tensor) else "CUDA"
    counts = Counter(str(weight.format) for weight in weights)
    text = ", ".join(f"{count} of {fmt}" for fmt, count in sorted(counts.items()))
    logger.info("qgemm multiplies by packed weights (%s, %s): %s; %s", backend, kind, text, prepared)
