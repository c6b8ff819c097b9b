"""The keys of a Hugging Face config that are read, and the type and range of the value of each.

The ranges include every published model with room to spare. Values outside would overflow float32, which the new file
stores, or the size of an array, or would be divisors of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from qgemm.errors import CheckpointError
from qgemm.files.paths import shown


class Kind(NamedTuple):
    """A kind of value: its name for messages, whether a value is one, and the table of an object's own keys."""

    name: str
    holds: Callable[[Any], bool]
    table: str = ""


def whole(least: int, greatest: int) -> Kind:
    """Whole numbers of a range."""
    return Kind(f"count from {least} to {greatest}", lambda value: type(value) is int and least <= value <= greatest)


def number(least: float, greatest: float) -> Kind:
    """Finite numbers of a range."""
    return Kind(
        f"number from {least:g} to {greatest:g}",
        lambda value: type(value) in (int, float) and isfinite(value) and least <= value <= greatest,
    )


def list_of(kind: Kind) -> Kind:
    """Lists whose elements are of a kind."""
    return Kind(f"list of {kind.name} each", lambda value: isinstance(value, list) and all(map(kind.holds, value)))


def either(first: Kind, second: Kind) -> Kind:
    """A value of one kind or the other."""
    return Kind(f"{first.name}, nor a {second.name}", lambda value: first.holds(value) or second.holds(value))


def one_or_list(kind: Kind) -> Kind:
    """A value of a kind, or a list of these."""
    return either(kind, list_of(kind)._replace(name="list of these"))


def section(table: str) -> Kind:
    """Objects whose keys are those of a table."""
    return Kind("object", lambda value: isinstance(value, dict), table)


FLAG = Kind("boolean", lambda value: isinstance(value, bool))
OBJECT = Kind(
    "object of objects", lambda value: isinstance(value, dict) and all(type(v) is dict for v in value.values())
)
TEXT = Kind("string", lambda value: isinstance(value, str))
SIZE, FFN_SIZE, COUNT = whole(1, 2**20), whole(1, 2**24), whole(1, 2**16)
OPTIONAL_COUNT = whole(0, 2**16)  # 0 stands for none
POSITIONS = whole(1, 2**32 - 1)  # the keys of a .gguf file are UINT32
TRAINED = whole(2, 2**32 - 1)  # its logarithm is a divisor
WINDOW = whole(0, 2**32 - 1)
TOKENS = one_or_list(whole(0, 2**32 - 1))
ROTARY_BASE, SHARE, FACTOR = number(1, 1e15), number(1e-6, 1), number(1e-6, 1e6)

TABLES: Mapping[str, Mapping[str, Kind]] = {
    "model": {
        "architectures": list_of(TEXT),
        "text_config": section("model"),
        "hidden_size": SIZE,
        "intermediate_size": one_or_list(FFN_SIZE),
        **dict.fromkeys(("altup_num_inputs", "altup_active_idx", "laurel_rank"), OPTIONAL_COUNT),
        "moe_intermediate_size": one_or_list(whole(0, 2**24)),
        "num_hidden_layers": COUNT,
        "num_attention_heads": COUNT,
        "num_key_value_heads": OPTIONAL_COUNT,
        "head_dim": OPTIONAL_COUNT,
        "vocab_size": whole(1, 2**28),
        "max_position_embeddings": POSITIONS,
        "original_max_position_embeddings": TRAINED,
        "num_local_experts": OPTIONAL_COUNT,
        "num_experts": one_or_list(OPTIONAL_COUNT),
        "num_experts_per_tok": OPTIONAL_COUNT,
        "experts_per_token": OPTIONAL_COUNT,
        **dict.fromkeys(("n_embd", "n_embed", "dim"), SIZE),
        **dict.fromkeys(("n_layer", "n_layers", "n_head", "n_heads", "num_kv_heads", "n_head_kv"), COUNT),
        **dict.fromkeys(("n_positions", "seq_length", "model_max_length", "max_trained_positions"), POSITIONS),
        **dict.fromkeys(("n_inner", "shared_expert_intermediate_size"), whole(0, 2**24)),
        **dict.fromkeys(("ffn_hidden_size", "hidden_dim"), whole(1, 2**24)),
        "shared_intermediate_size": whole(0, 2**24),
        **dict.fromkeys(
            ("n_routed_experts", "n_shared_experts", "moe_num_experts", "moe_num_shared_experts"), OPTIONAL_COUNT
        ),
        **dict.fromkeys(
            ("moe_k", "n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), OPTIONAL_COUNT
        ),
        **dict.fromkeys(("global_head_dim", "hidden_size_per_layer_input"), whole(0, 2**20)),
        **dict.fromkeys(("num_global_key_value_heads", "num_kv_shared_layers", "top_k_experts"), OPTIONAL_COUNT),
        **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), FLAG),
        "per_layer_config": OBJECT,
        "intermediate_size_mlp": FFN_SIZE,
        "interleave_moe_layer_step": COUNT,
        **dict.fromkeys(("moe_topk", "num_shared_expert"), one_or_list(OPTIONAL_COUNT)),
        **dict.fromkeys(("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads"), COUNT),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), SIZE),
        **dict.fromkeys(("full_attention_interval", "num_dense_layers", "conv_L_cache"), OPTIONAL_COUNT),
        **dict.fromkeys(("block_ff_dim", "block_multiple_of"), FFN_SIZE),
        "block_ffn_dim_multiplier": FACTOR,
        **dict.fromkeys(("block_auto_adjust_ff_dim", "tie_embedding"), FLAG),
        "layer_types": list_of(TEXT),
        "mlp_layer_types": list_of(TEXT),
        "rotary_dim": SIZE,
        "vision_config": section("vision"),
        **dict.fromkeys(("moe_layer_interval", "moe_top_k"), COUNT),
        "moe_every_n_layers": whole(-1, 2**16),  # 0 and -1: no layer has experts
        **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), OPTIONAL_COUNT),
        **dict.fromkeys(
            ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), whole(1, 2**20)
        ),
        **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), number(0, 1)),
        **dict.fromkeys(("logit_scale", "routed_scaling_factor", "clip_qkv"), FACTOR),
        **dict.fromkeys(("rotary_pct", "rope_pct"), SHARE),
        "rotary_emb_base": ROTARY_BASE,
        **dict.fromkeys(("use_parallel_residual", "new_decoder_architecture", "multi_query", "norm_topk_prob"), FLAG),
        "sliding_window": WINDOW,
        "sliding_window_pattern": either(WINDOW, TEXT),  # "LLLG": three layers with a window, one without
        "no_rope_layers": list_of(whole(0, 1)),
        "full_attn_idxs": list_of(whole(0, 2**16)),
        "moe_layers": list_of(whole(0, 2**16)),
        "moe_layer_end_index": whole(-1, 2**16),
        **{f"{name}_token_id": TOKENS for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
        "rms_norm_eps": number(0, 1),
        "attn_logit_softcapping": FACTOR,
        "final_logit_softcapping": FACTOR,
        **{f"{name}_multiplier": FACTOR for name in ("attention", "embedding", "residual")},
        "logits_scaling": FACTOR,
        "scale_emb": FACTOR,
        "scale_depth": FACTOR,
        "dim_model_base": SIZE,
        "type_vocab_size": COUNT,
        "global_attn_every_n_layers": COUNT,
        "local_attention": SIZE,
        "tie_word_embeddings": FLAG,
        "rope_theta": ROTARY_BASE,
        "rope_local_base_freq": ROTARY_BASE,
        "partial_rotary_factor": SHARE,
        "rope_parameters": section("rotary"),
        "rope_scaling": section("rotary"),
        "mm_tokens_per_image": whole(1, 2**20),
        "spatial_merge_size": OPTIONAL_COUNT,
    },
    "vision": {"deepstack_visual_indexes": list_of(OPTIONAL_COUNT)},
    "encoder": {  # vision_config of a model that becomes a projector
        **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads"), COUNT),
        **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "head_dim", "window_size", "image_size"), SIZE),
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), SIZE),
        "intermediate_size": FFN_SIZE,
        **dict.fromkeys(
            ("in_channels", "in_chans", "num_channels", "temporal_patch_size", "spatial_merge_size"), COUNT
        ),
        "patch_size": whole(1, 2**12),
        "mlp_ratio": number(1e-3, 64),
        **dict.fromkeys(("layer_norm_eps", "norm_eps"), number(0, 1)),
        **dict.fromkeys(("hidden_act", "model_type"), TEXT),
        "num_position_embeddings": whole(1, 2**24),
        **dict.fromkeys(("deepstack_visual_indexes", "fullatt_block_indexes"), list_of(OPTIONAL_COUNT)),
        "pixel_shuffle_ratio": SHARE,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": section("rotary"),
    },
    "images": {  # preprocessor_config.json
        **dict.fromkeys(("image_mean", "image_std"), list_of(number(-1e6, 1e6))),
        "image_seq_length": whole(1, 2**20),
        "rescale_factor": number(0, 1e6),
        **dict.fromkeys(("do_normalize", "do_rescale"), FLAG),
    },
    "rotary": {
        "full_attention": section("rotary"),
        "sliding_attention": section("rotary"),
        "rope_type": TEXT,
        "type": TEXT,
        "rope_theta": ROTARY_BASE,
        "partial_rotary_factor": SHARE,
        "original_max_position_embeddings": TRAINED,
        "factor": FACTOR,
        "alpha": FACTOR,
        "llama_4_scaling_beta": number(0, 1e6),
        "mrope_section": list_of(OPTIONAL_COUNT),
        "mscale": number(0, 1e6),
        "mscale_all_dim": number(0, 1e6),
        "extrapolation_factor": number(0, 1e6),
        "attention_factor": FACTOR,
        "beta_fast": FACTOR,
        "beta_slow": FACTOR,
        "low_freq_factor": FACTOR,
        "high_freq_factor": FACTOR,
        "long_factor": list_of(FACTOR),
        "short_factor": list_of(FACTOR),
        **dict.fromkeys(("long_mscale", "short_mscale"), FACTOR),
    },
}


def check_config(where: str, values: Mapping[str, Any], table: str = "model") -> None:
    """Refuse a config with a value outside its key's range, whether or not the architecture reads the key.

    null stands for an absent key. CheckpointError names the sections, the key, the value and the range.
    """
    for key, kind in TABLES[table].items():
        value = values.get(key)
        if value is None:
            continue
        if not kind.holds(value):
            raise CheckpointError(f"{where}: {key}: {shown(str(value))} is no {kind.name}")
        if kind.table:
            check_config(f"{where}: {key}", value, kind.table)
