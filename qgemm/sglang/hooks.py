"""Hooks for SGLang's GGUF methods; HOOKS is their table, by the names of their targets in SGLang.

process_weights_after_loading   bytes of a layer -> packed weights, tiles on a GPU
apply                           one output of a merged layer; the weighted sum of experts
fused_mul_mat_gguf, fused_moe_gguf, apply_gguf_embedding
                                a packed weight in place of bytes; bytes go to SGLang's own kernels
load_model                      rows of Q and K in SGLang's order; kernels are compiled before CUDA graphs are captured
initialize_weights, get_lora_layer
                                LoRA adapters beside a .gguf file, for linear layers
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from qgemm.errors import UnsupportedError
from qgemm.formats import GGML_TYPES
from qgemm.preparation import prepare
from qgemm.torch import serving
from qgemm.torch.patching import Patched
from qgemm.torch.serving import Shard

MODULE = "sglang.srt.layers.quantization.gguf"
LOADER = "sglang.srt.model_loader.loader.GGUFModelLoader.load_model"
LORA = "sglang.srt.lora"
TYPES = ("qweight_type", "w13_qweight_type", "w2_qweight_type")  # parameters with ggml's numbers of a layer's types
FUNCTIONS = {"silu": "swiglu", "gelu": "geglu"}
TYPE_OF_EXPERTS = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up)_proj\.qweight_type$")
ROWS = range(1, 16385)  # tokens of a batch, up to the largest default of --chunked-prefill-size

logger = logging.getLogger(__name__)
patched = Patched()  # the package gguf, in every process of SGLang


# ---------------------------------------------------------------- layers


def check(layer: Any, label: str) -> None:
    """Refuse, by the layer's name, types that qgemm does not multiply, and ranks that cannot share the layer."""
    columns = getattr(layer, "input_size_per_partition", 0)  # linear layers alone have it
    for types in [getattr(layer, name) for name in TYPES if hasattr(layer, name)]:
        for number in getattr(types, "shard_weight_type", {}).values() or [types.weight_type]:
            fmt = serving.format_of(number, label)
            if columns:
                serving.check_columns(fmt, layer.input_size, layer.input_size // columns, label)
    if hasattr(layer, "w13_qweight_type") and getattr(layer, "moe_tp_size", 1) > 1:
        raise UnsupportedError(
            f"{label}: SGLang cuts bytes of experts by rows alone, so that {layer.moe_tp_size} ranks cannot share an "
            "expert; share the experts instead: --ep-size equal to --tp-size"
        )


def process_linear(method: Any, layer: Any) -> None:
    """Replace a layer's bytes, of one tensor or of several merged ones, by packed weights."""
    if hasattr(layer, "qgemm_weights"):
        return
    old, types = layer.qweight, layer.qweight_type
    places = sorted(old.shard_id, key=lambda place: serving.QKV.get(place, place))
    if places:
        tensors = [old.data_container[old.shard_id_map[place]] for place in places]
        numbers = [types.shard_weight_type.get(place, types.weight_type) for place in places]
    else:
        tensors, numbers = [old.data], [types.weight_type]
    shards = [Shard(GGML_TYPES[number], data.to(types.device)) for number, data in zip(numbers, tensors, strict=True)]
    shape = old.tensor_shape
    del tensors, layer._parameters["qweight"]
    old.data_container.clear()
    serving.hold_joined(layer, "qweight", shards)
    describe(layer, shape)


def describe(layer: Any, shape: tuple[int, ...]) -> None:
    """Give packed parameters the attributes that SGLang and the hooked functions read."""
    for weight in layer.qgemm_weights:
        parameter = getattr(layer, weight.name)
        parameter.tensor_shape, parameter.shard_id, parameter.qgemm_weight = shape, [], weight


def apply_linear(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x @ W.T + bias."""
    return serving.linear(layer, x, bias, "a16")


def process_experts(method: Any, layer: Any) -> None:
    """Replace the bytes of all experts by packed weights of gate, up and down."""
    if hasattr(layer, "qgemm_weights"):
        return
    device, shards, shapes = layer.w13_qweight_type.device, [], []
    for name, places in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        old, number = getattr(layer, f"{name}_qweight"), getattr(layer, f"{name}_qweight_type").weight_type
        experts = old.tensor_shape[0]
        for place in places:
            tensors = [old.expert_data_map.pop((expert, place)) for expert in range(experts)]
            shards.append(Shard(GGML_TYPES[number], torch.stack([tensor.to(device) for tensor in tensors])))
            shapes.append(old.tensor_shape)
        del tensors, layer._parameters[f"{name}_qweight"]
        old.data_container.clear()
    serving.hold(layer, ("w13_qweight", "w3_qweight", "w2_qweight"), shards)
    describe(layer, shapes[0])


def apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The weighted sum over each token's experts."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = method.moe_runner_config
    function = FUNCTIONS.get(config.activation)
    if function is None:
        raise UnsupportedError(f"experts with the function {config.activation!r} are not supported by qgemm")
    factors, ids, _ = dispatch_output.topk_output
    scales_x = bool(getattr(config, "apply_router_weight_on_input", False))
    y = serving.experts(layer, dispatch_output.hidden_states, ids, factors, function, scales_x)
    return StandardCombineInput(hidden_states=y)


# ---------------------------------------------------------------- functions


def mul_mat(original: Callable[..., Any], x: torch.Tensor, qweight: torch.Tensor, qweight_type: int) -> torch.Tensor:
    """y = x @ W.T of `fused_mul_mat_gguf`."""
    weight = getattr(qweight, "qgemm_weight", None)
    if weight is None:
        return original(x, qweight, qweight_type)
    return serving.products_of([qweight], [weight], x)


def rows(
    original: Callable[..., Any], x: torch.Tensor, qweight: torch.Tensor, qweight_type: int, hidden_size: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows of a table of `apply_gguf_embedding`."""
    weight = getattr(qweight, "qgemm_weight", None)
    if weight is None:
        return original(x, qweight, qweight_type, hidden_size, dtype)
    return serving.rows_of(qweight, weight, x, dtype or torch.get_default_dtype())


def load_model(original: Callable[..., Any], loader: Any, *, model_config: Any, device_config: Any) -> Any:
    """The model with packed weights, without two faults of SGLang 0.5.23.

    It leaves rows of Q and K as llama.cpp orders them, and does not divide the router's factors of Qwen3-MoE by their
    sum, which llama.cpp does.
    """
    from sglang.srt.model_loader import loader as loaders

    new_model, weights_of, config = loaders._initialize_model, loader._get_weights_iterator, model_config.hf_config
    models: list[Any] = []  # the model, when SGLang has created it

    def remembered(*arguments: Any, **options: Any) -> Any:
        models.append(new_model(*arguments, **options))
        return models[0]

    def weights(*names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return serving.in_halves(checked(models[0], weights_of(*names)), config)

    with Patched() as during_loading:
        during_loading.replace(loaders, "_initialize_model", remembered)
        during_loading.replace(loader, "_get_weights_iterator", weights)
        model = original(loader, model_config=model_config, device_config=device_config)
    if config.model_type == "qwen3_moe" and config.norm_topk_prob:
        for topk in filter(None, (getattr(module, "topk_config", None) for module in model.modules())):
            topk.renormalize = True
    prepare_model(model)
    return model


def checked(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, whose types come first; layers are checked when all types are known.

    UnsupportedError, too, where a layer's experts have gate and up of two types: SGLang remembers one for both.
    """
    types: dict[str, int] = {}
    loading = False
    for name, tensor in weights:
        match = TYPE_OF_EXPERTS.match(name)
        if match and types.setdefault(match[1], int(tensor)) != int(tensor):
            pair = " and ".join(str(GGML_TYPES.get(number, number)) for number in (types[match[1]], int(tensor)))
            raise UnsupportedError(f"{match[1]}: gate and up are of {pair}, and SGLang keeps one type for both")
        if not loading and not name.endswith("qweight_type"):
            loading = True
            for label, layer in model.named_modules():
                check(layer, label)
        yield name, tensor


def prepare_model(model: Any) -> None:
    """Compile the kernels of a loaded model, and log which formats are multiplied."""
    weights = list(serving.packed_weights(model))
    if not weights:
        return
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float16)
    prepared = prepare(weights, m=ROWS, dtype=str(dtype).removeprefix("torch."), progress=False)
    counts = Counter(str(weight.format) for weight in weights)
    text = ", ".join(f"{count} of {fmt}" for fmt, count in sorted(counts.items()))
    logger.info("qgemm multiplies by packed weights: %s; %s", text, prepared)


# ---------------------------------------------------------------- LoRA


def adapter_files(adapter: Any) -> None:
    """Let SGLang read an adapter's safetensors: it would look for the format of the model's file, and fail."""
    from sglang.srt.configs.load_config import LoadFormat

    if adapter.load_config.load_format == LoadFormat.GGUF:
        adapter.load_config = replace(adapter.load_config, load_format=LoadFormat.AUTO)


def lora_layer(original: Callable[..., Any], layer: Any, *backend: Any, **options: Any) -> Any:
    """SGLang's layer around one with packed weights; UnsupportedError for experts, tables and heads."""
    if hasattr(layer, "qgemm_weights") and not hasattr(layer, "input_size"):
        raise UnsupportedError(
            f"LoRA of {type(layer).__name__} over a .gguf file is not supported; --lora-target-modules can name "
            "linear layers, such as q_proj"
        )
    return original(layer, *backend, **options)


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{MODULE}.GGUFLinearMethod.process_weights_after_loading": ("REPLACE", process_linear),
    f"{MODULE}.GGUFLinearMethod.apply": ("REPLACE", apply_linear),
    f"{MODULE}.GGUFMoEMethod.process_weights_after_loading": ("REPLACE", process_experts),
    f"{MODULE}.GGUFMoEMethod.apply": ("REPLACE", apply_experts),
    f"{MODULE}.fused_mul_mat_gguf": ("AROUND", mul_mat),
    f"{MODULE}.apply_gguf_embedding": ("AROUND", rows),
    LOADER: ("AROUND", load_model),
    f"{LORA}.lora.LoRAAdapter.initialize_weights": ("BEFORE", adapter_files),
    f"{LORA}.lora_manager.get_lora_layer": ("AROUND", lora_layer),
}


def install() -> None:
    """Register the hooks, each once, and let the package gguf read files of all types."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    serving.read_all_types(patched)
    for target, (kind, hook) in HOOKS.items():
        if all(hook is not registered for _, registered, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType[kind])
