"""The installation of the plugin: its methods take the place of those of vllm-gguf-plugin's configuration."""

from __future__ import annotations

from typing import Any

import torch
import vllm_gguf_plugin
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm_gguf_plugin.quantization.utils import is_layer_skipped_gguf

from qgemm.torch.patching import Patched
from qgemm.torch.serving import read_all_types

from .loader import PackedModelLoader, activation_of, formats_of
from .methods import PackedEmbeddingMethod, PackedExpertsMethod, PackedLinearMethod

patched = Patched()


def install() -> None:
    """Register vllm-gguf-plugin, then this plugin; in this order nothing that the other registers later undoes it."""
    vllm_gguf_plugin.register()
    if vllm_gguf_plugin.GGUFConfig.get_quant_method is quant_method:
        return
    register_model_loader("gguf")(PackedModelLoader)
    read_all_types(patched)
    patched.replace(vllm_gguf_plugin.GGUFConfig, "get_quant_method", quant_method)


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
