"""SGLang's GGUF methods as qgemm.sglang meets them: stand-ins with its loaders' results and its registry of hooks.

test_sglang.py compares their signatures with the installed package if there is one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import stand_ins
from torch_layers import torch


class HookType(Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


class HookRegistry:
    _hooks: ClassVar[dict[str, list[Any]]] = defaultdict(list)

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target].append((hook_type, hook, source))


class LoadFormat(Enum):
    AUTO, GGUF = "auto", "gguf"


class LoRAAdapter:
    def initialize_weights(self): ...


def get_lora_layer(layer, lora_backend, *, experts_shared_outer_loras=False, max_lora_rank=None):
    return "SGLang's own"


class StandardCombineInput:
    def __init__(self, hidden_states):
        self.hidden_states = hidden_states


class GGUFLinearMethod:
    def process_weights_after_loading(self, layer): ...
    def apply(self, layer, x, bias=None): ...


class GGUFMoEMethod:
    moe_runner_config: Any = None

    def process_weights_after_loading(self, layer): ...
    def apply(self, layer, dispatch_output): ...


def fused_mul_mat_gguf(x, qweight, qweight_type):
    return "SGLang's own"


def apply_gguf_embedding(x, qweight, qweight_type, hidden_size, dtype=None):
    return "SGLang's own"


def _initialize_model(model_config, load_config, quant_config=None):
    return torch.nn.Module()


class GGUFModelLoader:
    tensors: Any = ()  # names and tensors of the file
    routers: Any = ()  # TopKConfig of each layer of experts

    def _get_weights_iterator(self, model_name_or_path, gguf_to_hf_name_map):
        yield from self.tensors

    def load_model(self, *, model_config, device_config):
        model = sys.modules["sglang.srt.model_loader.loader"]._initialize_model(model_config, None)
        model.loaded = dict(self._get_weights_iterator("model.gguf", {}))
        for number, config in enumerate(self.routers):
            model.add_module(f"topk{number}", torch.nn.Module())
            getattr(model, f"topk{number}").topk_config = config
        return model


MODULES: dict[str, dict[str, Any]] = {
    "sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.layers": {}, "sglang.srt.layers.moe": {}, "sglang.srt.layers.quantization": {},
    "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": StandardCombineInput},
    "sglang.srt.layers.quantization.gguf": {
        "GGUFLinearMethod": GGUFLinearMethod, "GGUFMoEMethod": GGUFMoEMethod,
        "fused_mul_mat_gguf": fused_mul_mat_gguf, "apply_gguf_embedding": apply_gguf_embedding,
    },
    "sglang.srt.configs": {}, "sglang.srt.configs.load_config": {"LoadFormat": LoadFormat},
    "sglang.srt.lora": {}, "sglang.srt.lora.lora": {"LoRAAdapter": LoRAAdapter},
    "sglang.srt.lora.lora_manager": {"get_lora_layer": get_lora_layer},
    "sglang.srt.model_loader": {},
    "sglang.srt.model_loader.loader": {"GGUFModelLoader": GGUFModelLoader, "_initialize_model": _initialize_model},
}  # fmt: skip


def install(monkeypatch: Any) -> None:
    """Make the stand-ins importable."""
    stand_ins.install(monkeypatch, MODULES)
    HookRegistry._hooks.clear()


def parameter(data: Any, **facts: Any) -> Any:
    """A parameter with SGLang's attributes."""
    weight = torch.nn.Parameter(data, requires_grad=False)
    vars(weight).update(facts)
    return weight


def linear(tensors: dict[Any, Any], numbers: dict[Any, int], input_size: int, columns: int) -> torch.nn.Module:
    """A layer as SGLang's loaders leave it: its own bytes, or those of merged tensors by their place, in any order."""
    layer = torch.nn.Module()
    layer.input_size, layer.input_size_per_partition = input_size, columns
    places = [place for place in tensors if place is not None]
    kinds = {place: numbers[place] for place in places}
    layer.qweight = parameter(
        torch.empty(0, dtype=torch.uint8) if places else tensors[None], shard_id=places,
        tensor_shape=(sum(len(data) for data in tensors.values()), columns),
        data_container=[tensors[place] for place in places],
        shard_id_map={place: number for number, place in enumerate(places)},
    )  # fmt: skip
    layer.qweight_type = parameter(
        torch.zeros(1, dtype=torch.uint8), weight_type=numbers.get(None, 0), shard_weight_type=kinds
    )
    return layer


def experts(tensors: dict[str, Any], numbers: dict[str, int], ranks: int = 1) -> torch.nn.Module:
    """Experts as SGLang's loaders leave them: bytes [E, N, bytes per row] of w1, w2 and w3, each expert apart."""
    layer = torch.nn.Module()
    layer.moe_tp_size = ranks
    for name, places in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        count = len(tensors[places[0]])
        data = {(expert, place): tensors[place][expert] for expert in range(count) for place in places}
        facts = {"tensor_shape": (count, 0, 0), "expert_data_map": data, "data_container": list(data.values())}
        setattr(layer, f"{name}_qweight", parameter(torch.empty(0, dtype=torch.uint8), **facts))
        kind = parameter(torch.zeros(1, dtype=torch.uint8), weight_type=numbers[places[0]])
        setattr(layer, f"{name}_qweight_type", kind)
    return layer


def dispatched(x: Any, factors: Any, ids: Any) -> Any:
    """SGLang's StandardDispatchOutput, as far as it is read."""
    return SimpleNamespace(hidden_states=x, topk_output=(factors, ids, None))
