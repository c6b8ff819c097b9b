"""Hyperparameters of families of models whose files have more keys than those of every decoder."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from .hyperparameters import (
    Config,
    common_keys,
    granite_keys,
    llama_keys,
    qwen3moe_keys,
    rope_kind,
    rotated_dimensions,
)


def layer_norm_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of a decoder with layer norms."""
    common_keys(config, writer, "layer_norm_eps")


def partial_rotary_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of a decoder that rotates a part of each head."""
    common_keys(config, writer)
    writer.add_rope_dimension_count(rotated_dimensions(config))


def layer_norm_rotary_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of a decoder with layer norms that rotates a part of each head."""
    layer_norm_keys(config, writer)
    writer.add_rope_dimension_count(rotated_dimensions(config))


def glm_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of glm, whose chat template writes the first token."""
    partial_rotary_keys(config, writer)
    writer.add_add_bos_token(False)


def parallel_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of a decoder whose attention and feed-forward network may read the same input."""
    layer_norm_rotary_keys(config, writer)
    writer.add_parallel_residual(config.value("use_parallel_residual") is True)


def nemotron_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of nemotron."""
    layer_norm_rotary_keys(config, writer)
    writer.add_vocab_size(config.need("vocab_size"))
    if rope_kind(config.rope) == "default":
        writer.add_rope_scaling_type(RopeScalingType.NONE)


def cohere_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of cohere, some of whose configs name the trained context besides a shorter one."""
    longest = config.integer("model_max_length") or config.need("max_position_embeddings")
    layer_norm_keys(config.replaced(max_position_embeddings=longest), writer)
    writer.add_logit_scale(config.need_number("logit_scale"))
    if rope_kind(config.rope) == "default":
        writer.add_rope_scaling_type(RopeScalingType.NONE)


def cohere2_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of cohere 2, whose layers have sliding windows and rotary embeddings but for every fourth."""
    cohere_keys(config, writer)
    writer.add_sliding_window(config.need("sliding_window"))
    writer.add_vocab_size(config.need("vocab_size"))
    writer.add_rope_dimension_count(config.head_dim)


def olmo_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of olmo, whose layer norms have no weights and a fixed epsilon."""
    common_keys(config.replaced(layer_norm_eps=1e-5), writer, "layer_norm_eps")
    if config.number("clip_qkv") is not None:
        writer.add_clamp_kqv(config.need_number("clip_qkv"))


def windows_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of a decoder, and its sliding window if it has one."""
    common_keys(config, writer)
    if config.integer("sliding_window"):
        layers = config.need("num_hidden_layers")
        writer.add_sliding_window(config.need("sliding_window"))
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(layers)])


def exaone4_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of exaone 4."""
    windows_keys(config, writer)
    writer.add_vocab_size(config.need("vocab_size"))


def qwen2moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of qwen 2 with experts, one of which every token uses."""
    qwen3moe_keys(config, writer)
    writer.add_expert_shared_feed_forward_length(config.need("shared_expert_intermediate_size"))


def routed_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of experts that a token's scores choose by groups, after layers without experts."""
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))
    writer.add_leading_dense_block_count(config.integer("first_k_dense_replace") or 0)
    writer.add_expert_shared_count(config.integer("n_shared_experts") or 0)
    writer.add_expert_weights_scale(config.need_number("routed_scaling_factor"))
    writer.add_expert_weights_norm(config.value("norm_topk_prob") is True)
    groups = config.integer("n_group") or 1
    if groups > 1:
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config.need("topk_group"))


def dots1_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of dots 1."""
    common_keys(config, writer)
    routed_keys(config, writer)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def minimax_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of minimax m2, whose layers all have experts."""
    partial_rotary_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("intermediate_size"))
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def rotated_share(config: Config) -> Mapping[str, Any]:
    """The rotated share of a head, which published configs of minimax m2 give as a number of dimensions."""
    size = config.integer("rotary_dim")
    return {"partial_rotary_factor": size / config.head_dim} if size else {}


def glm_lite_sizes(config: Config) -> Mapping[str, Any]:
    """The layers without experts of glm 4.7 flash, which come first; CheckpointError if others do."""
    kinds = config.value("mlp_layer_types")
    if kinds is None:
        return shared_expert(config)
    count = kinds.count("dense")
    if kinds != ["dense"] * count + ["sparse"] * (config.need("num_hidden_layers") - count):
        raise config.refusal("mlp_layer_types", kinds, "are not dense layers and then sparse ones")
    return {"first_k_dense_replace": count, **shared_expert(config)}


def glm4moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of glm 4 with experts."""
    partial_rotary_keys(config, writer)
    routed_keys(config, writer)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def ernie_moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of ernie 4.5 with experts."""
    common_keys(config, writer)
    writer.add_interleave_moe_layer_step(config.need("moe_layer_interval"))
    writer.add_leading_dense_block_count(config.integer("moe_layer_start_index") or 0)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))
    shared = config.integer("moe_num_shared_experts") or 0
    writer.add_expert_shared_count(shared)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared_size(config))


def shared_size(config: Config) -> int:
    """The feed-forward size of the shared experts, which are one network."""
    shared = config.integer("n_shared_experts", "moe_num_shared_experts") or 0
    return shared * config.need("moe_intermediate_size")


def shared_expert(config: Config) -> Mapping[str, Any]:
    """The size of the shared experts under the name that other configs give to it."""
    return {"shared_expert_intermediate_size": shared_size(config)}


def phi_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of phi 2."""
    layer_norm_rotary_keys(config, writer)
    writer.add_add_bos_token(False)


def falcon_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of falcon."""
    layer_norm_keys(config, writer)
    writer.add_tensor_data_layout("jploski")


def falcon_sizes(config: Config) -> Mapping[str, Any]:
    """The heads of keys and values, whose number an older falcon gives by its kind, and the feed-forward size."""
    heads = config.need("num_attention_heads")
    groups = config.integer("num_kv_heads") or heads
    if config.value("new_decoder_architecture") is not True and config.value("multi_query") is not False:
        groups = 1
    size = config.integer("ffn_hidden_size") or 4 * config.need("hidden_size")
    return {"num_key_value_heads": groups, "intermediate_size": size}


def four_times(config: Config) -> Mapping[str, Any]:
    """A feed-forward network of four times the hidden size, unless the config has another size."""
    size = config.integer("intermediate_size") or 4 * config.need("hidden_size")
    return {"intermediate_size": size}


def one_key_head(config: Config) -> Mapping[str, Any]:
    """The sizes of gpt-bigcode, whose query heads share one head of keys and values."""
    return {**four_times(config), "num_key_value_heads": 1}


def scaled_base(config: Config) -> Mapping[str, Any]:
    """HunYuan's dynamic scaling, which is another base of the rotary embeddings."""
    rope = config.rope
    if rope_kind(rope) != "dynamic":
        return {}
    base, dim = rope.number("rope_theta") or config.number("rope_theta") or 10000.0, config.head_dim
    alpha = rope.need_number("alpha")
    return {"rope_parameters": None, "rope_scaling": None, "rope_theta": base * alpha ** (dim / (dim - 2))}


def dense_hunyuan(config: Config) -> Mapping[str, Any]:
    """The base of HunYuan's dynamic scaling, and no experts, of which dense models name one."""
    return {**scaled_base(config), "num_experts": None}


def deepseek_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of deepseek 2 and 3: attention by latent vectors, and experts."""
    rank, rotated = config.need("kv_lora_rank"), config.need("qk_rope_head_dim")
    common_keys(config.replaced(head_dim=None, num_key_value_heads=1), writer)
    writer.add_vocab_size(config.need("vocab_size"))
    if config.integer("q_lora_rank"):
        writer.add_q_lora_rank(config.need("q_lora_rank"))
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.need("qk_nope_head_dim") + rotated)
    writer.add_value_length_mla(config.need("v_head_dim"))
    writer.add_rope_dimension_count(rotated)
    routed_keys(config, writer)
    if config.rope.number("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope.need_number("mscale_all_dim"))


def deepseek2_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of deepseek 2, whose router's scores are a softmax; its greedy choice ignores groups."""
    deepseek_keys(config.replaced(n_group=None), writer)
    writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX)


def deepseek3_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of deepseek 3, whose router's scores are sigmoids."""
    deepseek_keys(config, writer)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def granite_moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of granite with experts, one of which every token may use."""
    granite_keys(config, writer)
    if config.integer("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.need("shared_expert_intermediate_size"))


def rope_sections(config: Config, writer: GGUFWriter) -> None:
    """Write the sections of rotary dimensions in time, height and width; text has the same position in all."""
    sections = config.rope.value("mrope_section") or config.value("mrope_section")
    if sum(sections) > config.head_dim:  # llama.cpp aborts
        raise config.refusal("mrope_section", sections, f"has more dimensions than a head, {config.head_dim}")
    writer.add_rope_dimension_sections([*sections, 0][:4])


def qwen_vl_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of the text part of qwen 2 and 2.5 vl."""
    common_keys(config, writer)
    rope_sections(config, writer)


def qwen3vl_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of the text part of qwen 3 vl, whose first layers also read features of an image."""
    common_keys(config, writer)
    rope_sections(config, writer)
    features = config.section("vision_config").value("deepstack_visual_indexes") or []
    writer.add_num_deepstack_layers(len(features))


def qwen3vlmoe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of the text part of qwen 3 vl with experts."""
    qwen3vl_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))


def ministral_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of mistral 3 and ministral 3, the second of which scales queries by their positions."""
    llama_keys(config, writer)
    if config.rope.number("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(config.rope.need_number("mscale_all_dim"))
    if config.rope.number("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(config.rope.need_number("llama_4_scaling_beta"))


def hunyuan_moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of hunyuan with experts."""
    common_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size", "intermediate_size"))
    writer.add_expert_shared_feed_forward_length(config.need("shared_expert_intermediate_size"))
    writer.add_expert_shared_count(config.integer("num_shared_expert") or 1)


def hunyuan_sizes(config: Config) -> Mapping[str, Any]:
    """HunYuan's sizes, each of which may be listed by layer, and the base of its dynamic scaling."""
    shared = config.one_for_layers("num_shared_expert") or 1
    return {
        **scaled_base(config), "num_experts": config.one_for_layers("num_experts"),
        "num_experts_per_tok": config.one_for_layers("moe_topk"), "num_shared_expert": shared,
        "shared_expert_intermediate_size": shared * config.need("intermediate_size"),
    }  # fmt: skip


def minicpm_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of minicpm, whose three factors depend on its sizes."""
    common_keys(config, writer)
    writer.add_embedding_scale(config.need_number("scale_emb"))
    writer.add_residual_scale(config.need_number("scale_depth") / sqrt(config.need("num_hidden_layers")))
    writer.add_logit_scale(config.need("hidden_size") / config.need("dim_model_base"))


def without_dynamic_scaling(config: Config) -> Mapping[str, Any]:
    """No rotary scaling instead of a dynamic one, which has no effect up to max_position_embeddings."""
    dynamic = rope_kind(config.rope) == "dynamic"
    base = config.rope.number("rope_theta") or config.number("rope_theta")
    return {"rope_scaling": None, "rope_parameters": None, "rope_theta": base} if dynamic else {}


def llama4_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of llama 4, some of whose layers have experts."""
    llama_keys(config, writer)
    writer.add_interleave_moe_layer_step(config.need("interleave_moe_layer_step"))
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))


def llama4_sizes(config: Config) -> Mapping[str, Any]:
    """The sizes of llama 4, whose intermediate_size is that of experts."""
    experts = config.need("intermediate_size")
    return {
        "moe_intermediate_size": experts, "shared_expert_intermediate_size": experts,
        "intermediate_size": config.need("intermediate_size_mlp"),
    }  # fmt: skip
