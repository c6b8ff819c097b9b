"""vLLM and vllm-gguf-plugin as qgemm.vllm meets them: stand-ins of the modules, classes and signatures that it uses.

test_vllm.py compares their signatures with the installed packages where there are any. Methods have the parameters of
vLLM 0.24 and 0.32, without those that the plugin neither gives nor takes.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import gguf
import stand_ins
from torch_layers import torch


class BasevLLMParameter(torch.nn.Parameter):
    def __new__(cls, data: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Any, weight_loader: Any):
        self.weight_loader = weight_loader
        self.tp_rank, self.tp_size = RANKS.rank, RANKS.size

    def load_column_parallel_weight(self, loaded_weight: Any) -> None: ...
    def load_row_parallel_weight(self, loaded_weight: Any) -> None: ...
    def load_merged_column_weight(self, loaded_weight: Any, **kwargs: Any) -> None: ...
    def load_qkv_weight(self, loaded_weight: Any, **kwargs: Any) -> None: ...


RANKS = SimpleNamespace(rank=0, size=1)


class QuantizeMethodBase:
    pass


class LinearMethodBase(QuantizeMethodBase):
    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs,
    ):  # fmt: skip
        raise NotImplementedError

    def apply(self, layer, x, bias=None):
        raise NotImplementedError


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe):
        self.moe = moe

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer):
        raise NotImplementedError

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise NotImplementedError


class LinearBase(torch.nn.Module):
    """A layer whose loader is that of a column-parallel, row-parallel, merged or qkv layer, by `kind`."""

    def __init__(self, kind: str, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.kind, self.sizes = kind, sizes

    def weight_loader_v2(self, param, loaded_weight, loaded_shard_id=None):
        if self.kind == "row":
            return param.load_row_parallel_weight(loaded_weight=loaded_weight)
        if self.kind == "column":
            return param.load_column_parallel_weight(loaded_weight=loaded_weight)
        place = {"q": 0, "k": 1, "v": 2}.get(loaded_shard_id, loaded_shard_id)
        facts = {"shard_id": loaded_shard_id, "shard_size": self.sizes[place] // RANKS.size, "tp_rank": RANKS.rank}
        if self.kind == "qkv":
            return param.load_qkv_weight(loaded_weight=loaded_weight, num_heads=1, shard_offset=0, **facts)
        return param.load_merged_column_weight(loaded_weight=loaded_weight, shard_offset=0, **facts)


class ReplicatedLinear(LinearBase):
    weight_loader_v2 = property()  # it has none


class VocabParallelEmbedding(torch.nn.Module):
    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)


class RoutedExperts(torch.nn.Module):
    """Experts, with a map of their ids to those of this rank under expert parallelism."""

    def __init__(self, activation: str = "silu", expert_map: Any = None, on_input: bool = False) -> None:
        super().__init__()
        self.activation = SimpleNamespace(value=activation)
        self.apply_router_weight_on_input, self.swiglu_limit, self.expert_map = on_input, None, expert_map

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return expert_id if self.expert_map is None else int(self.expert_map[expert_id])


class GGUFConfig:
    def __init__(self, unquantized_modules=None):
        self.unquantized_modules = unquantized_modules or []
        self.packed_modules_mapping: dict[str, list[str]] = {}

    def get_quant_method(self, layer, prefix):
        raise NotImplementedError


class GGUFWeightsAdapter:
    def __init__(self, config):
        self.config = config
        self.load_spec = SimpleNamespace(
            weights_source=["a.gguf"],
            gguf_to_hf_name_map={"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight"},
        )

    def prepare_weights(self, model_config):
        return iter(model_config.weights)


class GGUFModelLoader:
    def __init__(self, load_config=None):
        self.load_config = load_config

    def _prepare_adapter(self, model_config):
        MAPS.append(gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 1))
        return GGUFWeightsAdapter(model_config.hf_config)

    def load_model(self, vllm_config, model_config, prefix=""):
        self.adapter = self._prepare_adapter(model_config)
        return vllm_config.model


MAPS: list[Any] = []
REGISTERED: dict[str, Any] = {}  # by format: the loader; "config": the quantization config


def register() -> None:
    """vllm_gguf_plugin.register: the configuration anew at each call, the loader unless it is one of its class."""
    REGISTERED["config"] = GGUFConfig
    if not issubclass(REGISTERED.get("gguf", object), GGUFModelLoader):
        REGISTERED["gguf"] = GGUFModelLoader


def register_model_loader(load_format):
    return lambda cls: REGISTERED.__setitem__(load_format, cls) or cls


def is_layer_skipped_gguf(prefix, unquantized_modules, fused_mapping={}):  # noqa: B006
    name = prefix.split(".")[-1]
    if name in fused_mapping:
        parts = [prefix.replace(name, part) for part in fused_mapping[name]]
        return all(any(part in module for module in unquantized_modules) for part in parts)
    return any(module in prefix for module in unquantized_modules)


def set_weight_attrs(weight, weight_attrs):
    for name, value in (weight_attrs or {}).items():
        setattr(weight, name, value)


CONFIG = SimpleNamespace(additional_config={})
TYPES = {"model.layers.0.self_attn.q_proj.weight": "Q4_K"}

MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
    "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: RANKS.size},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.model_executor": {},
    "vllm.model_executor.parameter": {"BasevLLMParameter": BasevLLMParameter},
    "vllm.model_executor.utils": {"set_weight_attrs": set_weight_attrs},
    "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.linear": {
        "LinearBase": LinearBase, "LinearMethodBase": LinearMethodBase, "UnquantizedLinearMethod": type("U", (), {}),
        "register_weight_loader_v2_supported_method": lambda cls: cls,
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {
        "VocabParallelEmbedding": VocabParallelEmbedding, "UnquantizedEmbeddingMethod": type("UE", (), {}),
    },
    "vllm.model_executor.layers.fused_moe": {"RoutedExperts": RoutedExperts},
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
    "vllm_gguf_plugin": {"GGUFConfig": GGUFConfig, "GGUFModelLoader": GGUFModelLoader, "register": register},
    "vllm_gguf_plugin.quantization": {},
    "vllm_gguf_plugin.quantization.utils": {"is_layer_skipped_gguf": is_layer_skipped_gguf},
    "vllm_gguf_plugin.weight_utils": {"get_gguf_weight_type_map": lambda gguf_file, gguf_to_hf_name_map: dict(TYPES)},
}  # fmt: skip


def install(monkeypatch: Any) -> None:
    """Make the stand-ins importable, and forget qgemm.vllm as it was imported over others."""
    stand_ins.install(monkeypatch, MODULES)
    for name in [name for name in sys.modules if name.split(".")[:2] == ["qgemm", "vllm"]]:
        monkeypatch.delitem(sys.modules, name)
    REGISTERED.clear()
    MAPS.clear()
    monkeypatch.setattr(GGUFConfig, "get_quant_method", GGUFConfig.get_quant_method)
    for owner, name in ((RANKS, "rank"), (RANKS, "size"), (CONFIG, "additional_config")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
