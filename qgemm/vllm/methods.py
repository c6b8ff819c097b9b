"""Quantization methods of vLLM: linear layers, embedding and head, experts.

A method lives through three calls: `create_weights` registers parameters that collect the file's tensors (see
parameters.py), `process_weights_after_loading` replaces them by packed weights, `apply` multiplies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.utils import set_weight_attrs

from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.torch import serving
from qgemm.torch.serving import Shard

from .parameters import Collected, CollectingParameter, load_whole, type_parameter

FUNCTIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
FUNCTIONS |= {"swigluoai": "swiglu_oai", "swigluoai_uninterleave": "swiglu_oai"}  # gate and up come as two tensors
SWIGLU_OAI = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "swiglu_beta": 1.0}  # terms of "swiglu_oai"


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Linear layers, merged or not: one output of all products.

    label: the layer's name in the model. activation: as of `qgemm.matmul`. floats: whether the file has some of the
    merged tensors as floats, which are loaded under the name `weight`. formats: those of the layer's tensors, as far as
    they are known before loading.
    """

    parameter = "qweight"  # name of the first packed weight

    def __init__(self, label: str, activation: str, floats: bool = False, formats: tuple[Format, ...] = ()) -> None:
        self.label, self.activation, self.floats, self.formats = label, activation, floats, formats

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **attributes: Any,
    ) -> None:  # fmt: skip
        """Register parameters for the file's tensors."""
        ranks = input_size // input_size_per_partition
        for fmt in self.formats:
            serving.check_columns(fmt, input_size, ranks, self.label)
        attributes.pop("weight_loader", None)
        loader = getattr(layer, "weight_loader_v2", load_whole)
        _register(layer, self.label, loader, attributes, "", self.floats)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the collected tensors by packed weights."""
        if hasattr(layer, "qgemm_weights"):
            return
        shards = layer.qweight.collected.shards()
        if not shards:
            raise UnsupportedError(f"{self.label}: the file has no tensor of this layer")
        _forget(layer, "")
        serving.hold_joined(layer, self.parameter, shards)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y = x @ W.T + bias."""
        return serving.linear(layer, x, bias, self.activation)


class PackedEmbeddingMethod(PackedLinearMethod):
    """The table of token embeddings, which may be the head too, and a head of its own."""

    parameter = "weight"  # the name that vLLM's LoRA layer for tables reads

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **attributes: Any,
    ) -> None:  # fmt: skip
        """Register parameters for the file's table."""
        self.dtype, (self.rows,) = params_dtype, output_partition_sizes
        attributes.pop("weight_loader", None)
        _register(layer, self.label, partial(self._load, layer), attributes, "", False)

    def _load(self, layer: Any, param: CollectingParameter, loaded_weight: torch.Tensor) -> None:
        """Keep this rank's rows of a table, and rows of zeros up to vLLM's padded number."""
        start, stop = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        rows = loaded_weight[start:stop]
        padding = rows.new_zeros((self.rows - len(rows), rows.shape[1]))
        param.store(torch.cat([rows, padding]) if len(padding) else rows)

    def embedding(self, layer: Any, index: torch.Tensor) -> torch.Tensor:
        """Rows of the table."""
        return serving.embedding(layer, index, self.dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """The head of a model whose head is its table."""
        return embed_tokens


class PackedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts, whose gate, up and down each have a format of their own; ranks cut each expert, or share the experts."""

    def __init__(self, label: str, moe: Any, formats: tuple[Format, ...] = ()) -> None:
        super().__init__(moe)
        self.label, self.formats = label, formats

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **attributes: Any,
    ) -> None:  # fmt: skip
        """Register parameters for the file's tensors; refuse layers that differ from `qgemm.moe`."""
        self.function = _function(self.label, layer)
        parallel = self.moe.moe_parallel_config
        unsupported = {
            "biases": self.moe.has_bias, "LoRA": self.moe.is_lora_enabled,
            "all-to-all back ends": parallel.use_all2all_kernels,
        }  # fmt: skip
        for name in [name for name, present in unsupported.items() if present]:
            raise UnsupportedError(f"{self.label}: {name} of experts are not supported; without them, or QGEMM_VLLM=0")
        ranks = parallel.tp_size
        for fmt in self.formats:
            serving.check_columns(fmt, intermediate_size_per_partition * ranks, ranks, self.label)
        self.experts = num_experts
        attributes.pop("weight_loader", None)
        for name in ("w13", "w2"):
            _register(layer, self.label, partial(self._load, layer), attributes, f"{name}_", floats=True)

    def _load(
        self, layer: Any, param: CollectingParameter, loaded_weight: torch.Tensor, weight_name: str, shard_id: str,
        expert_id: int, return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """Keep this rank's share of gate (w1), down (w2) or up (w3) of an expert, or of all [E, N, bytes per row]."""
        tensors = loaded_weight if loaded_weight.dim() == 3 else loaded_weight[None]
        first = 0 if loaded_weight.dim() == 3 else expert_id
        local = [layer._map_global_expert_id_to_local_expert_id(first + number) for number in range(len(tensors))]
        parallel, collected = self.moe.moe_parallel_config, param.collected
        fmt = collected.format(shard_id, loaded_weight)
        for expert, tensor in zip(local, tensors, strict=True):
            if expert < 0:  # on another rank
                continue
            if shard_id == "w2":
                label = f"{self.label} down"
                part = serving.cut_columns(Shard(fmt, tensor), parallel.tp_rank, parallel.tp_size, label).data
            else:
                rows = tensor.shape[0] // parallel.tp_size
                part = tensor.narrow(0, rows * parallel.tp_rank, rows)
            if shard_id not in collected.data:
                shape = (self.experts, *part.shape)
                collected.data[shard_id] = torch.zeros(shape, dtype=part.dtype, device=param.device)
            collected.data[shard_id][expert] = part.to(param.device)
        success = any(expert >= 0 for expert in local)
        return success if return_success else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the collected tensors by packed weights of gate, up and down."""
        if hasattr(layer, "qgemm_weights"):
            return
        gate_up, down = layer.w13_qweight.collected, layer.w2_qweight.collected
        parts = [(gate_up, "w1"), (gate_up, "w3"), (down, "w2")]
        if any(shard not in collected.data for collected, shard in parts):
            raise UnsupportedError(f"{self.label}: the file lacks gate, up or down of the experts")
        shards = []
        for collected, shard in parts:
            data = collected.data.pop(shard)
            shards.append(Shard(collected.format(shard, data), data))
        del data
        for prefix in ("w13_", "w2_"):
            _forget(layer, prefix)
        serving.hold(layer, ("w1_qweight", "w3_qweight", "w2_qweight"), shards)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels are not used."""

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        shared_experts: Any = None, shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The weighted sum over each token's experts; vLLM's runner adds the shared experts itself."""
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]  # ids on this rank, or -1
        return serving.experts(
            layer, x, topk_ids, topk_weights, self.function, scales_x=layer.apply_router_weight_on_input
        )


def _register(
    layer: Any, label: str, loader: Any, attributes: dict[str, Any], prefix: str, floats: bool
) -> None:  # fmt: skip
    """Register the parameters that collect tensors: their bytes, their types, and floats under their own name."""
    collected = Collected(label)
    for name in (f"{prefix}qweight", f"{prefix}weight")[: 1 + floats]:
        parameter = CollectingParameter(collected, loader, torch.empty(0, dtype=torch.uint8))
        set_weight_attrs(parameter, attributes)
        layer.register_parameter(name, parameter)
    layer.register_parameter(f"{prefix}qweight_type", type_parameter(collected, bool(prefix)))


def _forget(layer: Any, prefix: str) -> None:
    """Remove the parameters of `_register`."""
    for name in ("qweight", "weight", "qweight_type"):
        layer._parameters.pop(prefix + name, None)


def _function(label: str, layer: RoutedExperts) -> str:
    """The function between the products of a layer of experts; UnsupportedError names one that qgemm does not have."""
    name = str(layer.activation.value)
    function = FUNCTIONS.get(name)
    terms = {term: getattr(layer, term, None) for term in SWIGLU_OAI}
    expected = SWIGLU_OAI if function == "swiglu_oai" else {}
    if function is None or any(value not in (None, 0, expected.get(term)) for term, value in terms.items()):
        raise UnsupportedError(
            f"{label}: experts with the function {name!r} and {terms} are not supported; qgemm has "
            f"{', '.join(map(repr, FUNCTIONS))}, without a limit except that of swigluoai"
        )
    return function
