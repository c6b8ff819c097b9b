"""Records of architectures whose layers differ: linear attention or short convolutions in most, attention in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter
from numpy.typing import NDArray

from . import config_rules
from .architecture_record import (
    ATTENTION,
    BEFORE_FFN,
    EXPERTS,
    HEAD_NORMS,
    OPTIONAL,
    SHARED_EXPERT,
    Architecture,
    Shapes,
)  # fmt: skip
from .family_keys import rope_sections
from .fused_weights import Refusal, joined_experts, renamed_to
from .hyperparameters import Config, common_keys, qwen3moe_keys, rotated_dimensions
from .weight import Weight
from .weight_views import map_numbers, reorder_columns, reorder_rows, reshaped

LINEAR, CONVOLUTION = "linear_attention", "conv"

GATED_ATTENTION: Shapes = {**ATTENTION, **HEAD_NORMS, "attn_q.weight": "2HD E"}
LINEAR_ATTENTION: Shapes = {
    "attn_qkv.weight": "LQKV E", "attn_gate.weight": "LV E", "ssm_conv1d.weight": "LQKV LC", "ssm_dt.bias": "LH",
    "ssm_a": "LH", "ssm_norm.weight": "LD", "ssm_out.weight": "E LV",
}  # fmt: skip
SHORT_CONVOLUTION: Shapes = {
    "shortconv.conv.weight": "E C", "shortconv.in_proj.weight": "3E E", "shortconv.out_proj.weight": "E E"
}  # fmt: skip
AFTER_ATTENTION: Shapes = {"attn_norm.weight": "E", "post_attention_norm.weight": "E"}
SHARED: Shapes = {**EXPERTS, **SHARED_EXPERT, "ffn_gate_inp_shexp.weight": "E"}


def kinds(config: Config) -> list[str]:
    """The kind of each layer; every fourth has attention where the config does not list them."""
    period = config.integer("full_attention_interval") or 4
    layers = range(config.need("num_hidden_layers"))
    return config.value("layer_types") or [LINEAR if (i + 1) % period else config_rules.FULL for i in layers]


def kind_of(config: Config, layer: int) -> str:
    """The kind of a layer, "" beyond those that the config lists."""
    listed = kinds(config)
    return listed[layer] if layer < len(listed) else ""


def check_kinds(config: Config, other: str) -> None:
    """Refuse layers that are not some of a kind and some with attention: llama.cpp aborts without either."""
    if {*kinds(config)} != {other, config_rules.FULL}:
        raise config.refusal("layer_types", kinds(config), f"are not both {other} and {config_rules.FULL}")


def linear_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of linear attention, and of the heads that are rotated in part."""
    check_kinds(config, LINEAR)
    key, value = config.need("linear_num_key_heads"), config.need("linear_num_value_heads")
    writer.add_ssm_conv_kernel(config.need("linear_conv_kernel_dim"))
    writer.add_ssm_state_size(config.need("linear_key_head_dim"))
    writer.add_ssm_group_count(key)
    writer.add_ssm_time_step_rank(value)
    writer.add_ssm_inner_size(config.need("linear_value_head_dim") * value)
    writer.add_full_attention_interval(kinds(config).index(config_rules.FULL) + 1)
    writer.add_rope_dimension_count(rotated_dimensions(config))


def qwen3next_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of qwen 3 next."""
    qwen3moe_keys(config, writer)
    writer.add_expert_shared_feed_forward_length(config.need("shared_expert_intermediate_size"))
    linear_keys(config, writer)


def qwen35_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of qwen 3.5."""
    common_keys(config, writer)
    linear_keys(config, writer)
    rope_sections(config, writer)


def qwen35moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of qwen 3.5 with experts."""
    qwen3next_keys(config.replaced(intermediate_size=config.need("moe_intermediate_size")), writer)
    rope_sections(config, writer)


def convolution_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of lfm 2; layers with a convolution have no heads of keys and values."""
    check_kinds(config, CONVOLUTION)
    groups = config.need("num_key_value_heads")
    counts = [groups if kind == config_rules.FULL else 0 for kind in config.value("layer_types") or []]
    common_keys(config.replaced(num_key_value_heads=counts), writer)
    writer.add_vocab_size(config.need("vocab_size"))
    writer.add_shortconv_l_cache(config.need("conv_L_cache"))


def lfm2moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of lfm 2 with experts."""
    convolution_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))
    writer.add_leading_dense_block_count(config.integer("num_dense_layers") or 0)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def convolutions(config: Config) -> Mapping[str, Any]:
    """The kinds of layers of lfm 2, of which old configs list those with attention."""
    attention, layers = config.value("full_attn_idxs"), range(config.need("num_hidden_layers"))
    if config.value("layer_types") is not None or attention is None:
        return {}
    return {"layer_types": [config_rules.FULL if layer in attention else CONVOLUTION for layer in layers]}


def adjusted_size(config: Config) -> Mapping[str, Any]:
    """The feed-forward size of lfm 2: two thirds, times a factor, as a multiple; and the kinds of layers."""
    size = config.integer("block_ff_dim") or config.need("intermediate_size")
    if config.value("block_auto_adjust_ff_dim") is not False:
        size = int((config.number("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        multiple = config.integer("block_multiple_of") or 256
        size = multiple * -(-size // multiple)
    return {"intermediate_size": size, **convolutions(config)}


def linear_attention(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """The logarithm of A as A, and Qwen 3 Next's fused projection split into queries, keys, values, and gates."""
    if weight.name.endswith(".A_log"):
        return [map_numbers(weight, lambda numbers: -np.exp(numbers))]
    stem, fused, _ = weight.name.partition("in_proj_qkvz.weight")
    if not fused:
        return joined_experts(weight, config, refusal)
    groups, size = config.need("linear_num_key_heads"), config.need("linear_key_head_dim")
    values = config.need("linear_num_value_heads") * config.need("linear_value_head_dim")
    rows = weight.shape[0]
    if rows != 2 * groups * size + 2 * values or values % groups:
        raise refusal(weight.name, f"has {rows} rows, not {groups} groups of queries, keys, values and gates")
    order = np.arange(rows).reshape(groups, -1)
    ends = np.cumsum([size, size, values // groups])
    query, key, value, gate = (part.ravel() for part in np.split(order, ends, axis=1))
    return [
        renamed_to(reorder_rows(weight, np.concatenate([query, key, value]), rows), f"{stem}in_proj_qkv.weight"),
        renamed_to(reorder_rows(weight, gate, rows), f"{stem}in_proj_z.weight"),
    ]


def interleaved_values(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Qwen 3.5's heads of values, grouped by heads of keys, in an order that repeats the heads of keys."""
    [weight, *rest] = linear_attention(weight, config, refusal)
    name = weight.name
    if rest or ".linear_attn." not in name:
        return [weight, *rest]
    groups, heads = config.need("linear_num_key_heads"), config.need("linear_num_value_heads")
    size, keys = config.need("linear_value_head_dim"), 2 * groups * config.need("linear_key_head_dim")
    last = name.removesuffix(".weight").rpartition(".")[2]
    first = {"in_proj_qkv": keys, "conv1d": keys}.get(last, 0)
    if heads == groups or last == "norm":
        return [weight]
    width = 1 if last in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else size
    length = weight.shape[-1 if last == "out_proj" else 0]
    if length != first + heads * width or heads % groups:
        raise refusal(name, f"has {length} rows or columns, not {heads} heads of {width} after {first}")
    values: NDArray[np.intp] = np.arange(heads * width).reshape(groups, heads // groups, width)
    order = np.concatenate([np.arange(first), first + values.swapaxes(0, 1).ravel()])
    if last == "out_proj":
        return [reorder_columns(weight, order)]
    flat = reshaped(weight, (length, weight.size // length)) if last == "conv1d" else weight
    return [reorder_rows(flat, order)]


def _next(config: Config, layer: int) -> Shapes:
    linear = {**LINEAR_ATTENTION, "ssm_ba.weight": "2LH E"}
    return linear if kind_of(config, layer) == LINEAR else GATED_ATTENTION


def _qwen35(config: Config, layer: int) -> Shapes:
    linear = {**LINEAR_ATTENTION, "ssm_beta.weight": "LH E", "ssm_alpha.weight": "LH E"}
    return linear if kind_of(config, layer) == LINEAR else GATED_ATTENTION


def _lfm2(config: Config, layer: int) -> Shapes:
    if kind_of(config, layer) == CONVOLUTION:
        return SHORT_CONVOLUTION
    return {**ATTENTION, **HEAD_NORMS}


PARTIAL = ("partial_rotary_factor", "mrope_section")
QWEN3_NEXT = Architecture(
    MODEL_ARCH.QWEN3NEXT, qwen3next_keys, AFTER_ATTENTION, config_rules.QWEN3_NEXT, norms_plus_one=True,
    split=linear_attention, experts=SHARED, by_layer=_next, read_rotary=PARTIAL,
    defaults={"partial_rotary_factor": 0.25},
)  # fmt: skip
QWEN35 = QWEN3_NEXT._replace(
    kind=MODEL_ARCH.QWEN35, keys=qwen35_keys, rules=config_rules.LINEAR, split=interleaved_values, by_layer=_qwen35,
    defaults={"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
)  # fmt: skip
QWEN35_MOE = QWEN35._replace(
    kind=MODEL_ARCH.QWEN35MOE, keys=qwen35moe_keys,
    derived=lambda config: {"intermediate_size": config.need("moe_intermediate_size")},
)  # fmt: skip
LFM2 = Architecture(
    MODEL_ARCH.LFM2, convolution_keys, {"attn_norm.weight": "E", **BEFORE_FFN}, config_rules.LFM2,
    ends={"token_embd.weight": "V E", "token_embd_norm.weight": "E"}, by_layer=_lfm2, optional=OPTIONAL,
    aliases={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}, derived=adjusted_size,
    defaults={"rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
)  # fmt: skip

HYBRIDS = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN35_MOE,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2VlForConditionalGeneration": LFM2,
    "Lfm2MoeForCausalLM": LFM2._replace(
        kind=MODEL_ARCH.LFM2MOE, keys=lfm2moe_keys, rules=config_rules.LFM2_MOE, derived=convolutions,
        defaults={**LFM2.defaults, "num_dense_layers": 2},
        experts={**EXPERTS, "exp_probs_b.bias": "X"},
    ),
}  # fmt: skip
