"""Keys of a Hugging Face config that must have certain values, because a .gguf file has no key for others.

Each key of a model's config class is read by its function of hyperparameters.py, has a rule here, or has no effect on
the result. A key that the config leaves out has the default of its class, which must fit the rule as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .hyperparameters import ROTARY_SETTINGS, Config, rope_kind

FULL, WINDOW = "full_attention", "sliding_attention"

NO_EFFECT = {
    # settings of training, of speed, and of outputs other than logits
    "attention_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop", "initializer_range",
    "hidden_dropout_prob", "mlp_dropout", "initializer_cutoff_factor", "deterministic_flash_attn", "sparse_prediction",
    "sparse_pred_ignore_index", "cls_token_id", "reference_compile", "attention_probs_dropout_prob",
    "router_aux_loss_coef", "attn_pdrop", "hidden_dropout", "embedding_dropout", "classifier_dropout", "slow_but_exact",
    "input_jitter_noise", "router_jitter_noise", "reorder_and_upcast_attn", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "dropout", "qa_dropout", "seq_classif_dropout",
    *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
    "pretraining_tp", "use_cache", "output_router_logits", "output_hidden_states",
    "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type",
    # labels of other tasks, and facts about the file
    "id2label", "label2id", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "model_type",
    # layers that predict further tokens, which are left out
    "num_nextn_predict_layers", "num_mtp_layers",
    # settings of the vision part, which is left out
    "vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index",
    "audio_config", "eoa_token_index", *(f"{name}_token_id" for name in ("audio", "boa", "boi", "eoa", "eoi")),
    "audio_soft_tokens_per_image", "vision_soft_tokens_per_image", "audio_token_index", "_pad_token_id",
    *(f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end")),
    "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size", "scale_factor",
    *(f"projector_{name}" for name in ("bias", "hidden_size", "use_layernorm")), "downsample_factor",
}  # fmt: skip
READ_ELSEWHERE = {  # by the converter itself, for every architecture
    "architectures", "text_config", "vocab_size", "tie_word_embeddings",
    *(f"{name}_token_id" for name in ("bos", "eos", "pad", "eod", "sep")),
}  # fmt: skip


class Rule(NamedTuple):
    """The values of a key that llama.cpp computes with; default: the config class's, where the config lacks the key."""

    default: Any
    allows: Callable[[Any, Config], bool]
    text: str


Rules = Mapping[str, Rule]


def only(default: Any, *others: Any) -> Rule:
    """One value, or others that mean the same."""
    return Rule(default, lambda value, config: value in (default, *others), f"is not {default}")


OFF = Rule(False, lambda value, config: not value, "is not false")
NONE = Rule(None, lambda value, config: not value, "is set")
SILU = only("silu", "swish")
ALL_FULL = Rule(
    None, lambda value, config: all(kind == FULL for kind in value or ()), f"has layers without {FULL}"
)  # fmt: skip
WHOLE_HEAD = Rule(None, lambda value, config: value in (None, 1), "rotates a part of each head")


def decided_elsewhere(default: Any) -> Rule:
    """Any value, since the tensors, or other keys that have a rule, decide about the result."""
    return Rule(default, lambda value, config: True, "")


def window_of_context(default: int | None) -> Rule:
    """No sliding window, or one that no context is longer than."""
    return Rule(
        default,
        lambda value, config: not value or value >= config.need("max_position_embeddings"),
        "is a window below max_position_embeddings; a context of that many tokens (max_position_embeddings) needs none",
    )


def every(period: int) -> Rule:
    """Layer types with full attention in every layer of this period, and sliding windows in the others."""

    def allows(value: Any, config: Config) -> bool:
        return not value or all(kind == (WINDOW if (i + 1) % period else FULL) for i, kind in enumerate(value))

    return Rule(None, allows, f"differ from {FULL} in one layer of {period}")


def scale_of_head(default: int, layers: int) -> Rule:
    """The head's size, by which llama.cpp scales; in the model with this number of layers, the share of a head."""
    return Rule(
        default,
        lambda value, config: _scales_by_head(value, config, layers),
        "differs from head_dim, by which llama.cpp scales",
    )


def _scales_by_head(value: Any, config: Config, layers: int) -> bool:
    share = config.need("hidden_size") // config.need("num_attention_heads")
    fits: bool = value == (share if config.need("num_hidden_layers") == layers else config.head_dim)
    return fits


def _gemma3_layers(value: Any, config: Config) -> bool:
    """Windows as `every(6)`, or none at all where the period is 1."""
    rule = ALL_FULL if config.value(*GEMMA3_PERIOD) == 1 else every(6)
    return rule.allows(value, config)


GEMMA3_PERIOD = ("sliding_window_pattern", "_sliding_window_pattern")
LLAMA: Rules = {
    "hidden_act": SILU, "attention_bias": decided_elsewhere(False), "mlp_bias": decided_elsewhere(False)
}  # fmt: skip
MISTRAL: Rules = {**LLAMA, "sliding_window": window_of_context(4096)}
MIXTRAL: Rules = {**LLAMA, "sliding_window": window_of_context(None)}
QWEN2: Rules = {
    "hidden_act": SILU, "use_sliding_window": OFF, "layer_types": ALL_FULL,
    "sliding_window": decided_elsewhere(4096),
    "max_window_layers": decided_elsewhere(28),
}  # fmt: skip
QWEN3: Rules = {**QWEN2, "attention_bias": OFF}
QWEN3MOE: Rules = {
    "hidden_act": SILU, "attention_bias": OFF, "use_sliding_window": OFF, "sliding_window": QWEN2["sliding_window"],
    "decoder_sparse_step": only(1), "mlp_only_layers": NONE, "norm_topk_prob": Rule(
        False, lambda value, config: value is True, "is not true, as llama.cpp computes"
    ),
}  # fmt: skip
GEMMA3: Rules = {
    "hidden_activation": only("gelu_pytorch_tanh"), "attention_bias": OFF, "use_bidirectional_attention": OFF,
    "query_pre_attn_scalar": scale_of_head(256, 62),
    "layer_types": Rule(None, _gemma3_layers, f"differ from {FULL} in one layer of six"),
    **dict.fromkeys(GEMMA3_PERIOD, Rule(6, lambda value, config: value in (None, 1, 6), "is not 6")),
}  # fmt: skip
GEMMA: Rules = {
    "hidden_act": only("gelu_pytorch_tanh", "gelu"),  # transformers computes tanh's form for both
    "hidden_activation": only(None, "gelu_pytorch_tanh"), "attention_bias": OFF, "use_bidirectional_attention": OFF,
}  # fmt: skip
GEMMA2: Rules = {
    "hidden_activation": only("gelu_pytorch_tanh"), "attention_bias": OFF, "use_bidirectional_attention": OFF,
    "query_pre_attn_scalar": scale_of_head(256, 46), "layer_types": every(2),
}  # fmt: skip
INTERNLM3: Rules = {"hidden_act": SILU, "qkv_bias": decided_elsewhere(False), "bias": decided_elsewhere(False)}
MINICPM: Rules = {
    "hidden_act": SILU, "attention_bias": OFF, "sparse_config": NONE, "mup_denominator": decided_elsewhere(32)
}  # fmt: skip
OLMO2: Rules = {"hidden_act": SILU, "attention_bias": OFF}
OLMOE: Rules = {**OLMO2, "clip_qkv": NONE, "norm_topk_prob": OFF}
SEED_OSS: Rules = {
    "hidden_act": SILU, "attention_bias": only(True), "attention_out_bias": OFF, "mlp_bias": OFF,
}  # fmt: skip
PHI3: Rules = {"hidden_act": SILU}
PHIMOE: Rules = {
    "hidden_act": SILU, "attention_bias": decided_elsewhere(False), "lm_head_bias": decided_elsewhere(False),
    "tie_word_embeddings": OFF, "sliding_window": window_of_context(None), "router_jitter_noise": only(0.01),
    "rope_parameters": Rule(
        None, lambda value, config: config.rope.number("short_mscale") == config.rope.number("long_mscale"),
        "has long_mscale other than short_mscale",
    ),
}  # fmt: skip
GPT_OSS: Rules = {
    "hidden_act": SILU, "attention_bias": only(True), "layer_types": every(2), "swiglu_alpha": only(1.702),
    "swiglu_limit": only(7.0),
}  # fmt: skip
ONE_GROUP = Rule(1, lambda value, config: value in (None, 1), "is not 1")
NO_BIASES: Rules = {"hidden_act": SILU, "attention_bias": OFF, "mlp_bias": OFF}
UNUSED_WINDOW: Rules = {
    "use_sliding_window": OFF, "layer_types": ALL_FULL, "sliding_window": decided_elsewhere(None)
}  # fmt: skip
GELU = only("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")  # llama.cpp computes tanh's form for all of them


def _rotates_all_but_fourth(value: Any, config: Config) -> bool:
    return not value or list(value) == [int((i + 1) % 4 != 0) for i in range(len(value))]


def _window_by_size(value: Any, config: Config) -> bool:
    """llama.cpp has the windows of exaone 4 in the model with 64 layers, and in no other."""
    return value != 0 and (value is not None) == (config.need("num_hidden_layers") == 64)


def _mscale_is(mscale: float | None, config: Config) -> bool:
    """Beside mscale_all_dim, llama.cpp computes with one mscale."""
    return not config.rope.number("mscale_all_dim") or config.rope.number("mscale") == mscale


def _one_base(value: Any, config: Config) -> bool:
    windows = config.rope_of_windows
    return windows is None or windows == (config.rope.number("rope_theta") or config.number("rope_theta"))


def same_as(key: str, default: int | None) -> Rule:
    """The value of another key."""
    return Rule(default, lambda value, config: value in (None, config.value(key)), f"is not {key}")


def _whole_queries(value: Any, config: Config) -> bool:
    """Whether queries without a latent vector belong to one of the models that llama.cpp knows to have none."""
    layers = config.need("num_hidden_layers")
    return bool(value) or layers in (26, 27) or (layers == 48 and config.integer("vocab_size") == 128256)


QWEN2MOE: Rules = {
    **{key: rule for key, rule in QWEN3MOE.items() if key not in ("attention_bias", "norm_topk_prob")},
    "norm_topk_prob": OFF, "qkv_bias": only(True), "sliding_window": decided_elsewhere(4096), "layer_types": ALL_FULL,
    "max_window_layers": decided_elsewhere(28),
}  # fmt: skip
ARCEE: Rules = {**NO_BIASES, "hidden_act": only("relu2")}
SMOLLM3: Rules = {
    **NO_BIASES, **UNUSED_WINDOW,
    "no_rope_layers": Rule(None, _rotates_all_but_fourth, "differs from no rotation in every fourth layer"),
    "no_rope_layer_interval": Rule(4, lambda value, config: bool(config.value("no_rope_layers")) or value == 4,
                                   "is not 4"),
}  # fmt: skip
OLMO: Rules = OLMO2
OLMO3: Rules = {
    **OLMO2, "layer_types": every(4),
    "rope_parameters": Rule(None, _one_base, "has a base of its own for sliding windows"),
}  # fmt: skip
COHERE: Rules = {
    "hidden_act": SILU, "attention_bias": OFF, "use_qk_norm": OFF, "tie_word_embeddings": only(True),
}  # fmt: skip
COHERE2: Rules = {
    "hidden_act": SILU, "attention_bias": OFF, "layer_types": every(4), "tie_word_embeddings": only(True),
}  # fmt: skip
GLM: Rules = {"hidden_act": SILU, "attention_bias": decided_elsewhere(True)}
STARCODER2: Rules = {
    "hidden_act": GELU._replace(default="gelu_pytorch_tanh"), "use_bias": only(True),
    "sliding_window": window_of_context(None),
}  # fmt: skip
NEMOTRON: Rules = {**LLAMA, "hidden_act": only("relu2")}
STABLELM: Rules = {"hidden_act": SILU, "use_qkv_bias": decided_elsewhere(False), "qk_layernorm": OFF}
EXAONE4: Rules = {
    "hidden_act": SILU,
    "sliding_window": Rule(4096, _window_by_size, "is not as llama.cpp computes: windows in the model of 64 layers"),
    "layer_types": Rule(
        None, lambda value, config: (every(4) if config.value("sliding_window") else ALL_FULL).allows(value, config),
        f"differ from {FULL} in one layer of four, or in all without a window",
    ),
    "sliding_window_pattern": Rule(
        4, lambda value, config: not config.value("sliding_window") or value in (4, "LLLG"), "is not 4"
    ),
}  # fmt: skip
HUNYUAN: Rules = {"hidden_act": SILU, "attention_bias": OFF}
ERNIE: Rules = {"hidden_act": SILU, "use_bias": OFF}
ERNIE_MOE: Rules = {
    **ERNIE, "moe_norm_min": only(1e-12), "moe_layer_interval": only(1),
    "moe_layer_end_index": Rule(
        -1, lambda value, config: value in (None, -1) or value >= config.need("num_hidden_layers") - 1,
        "leaves the last layers without experts",
    ),
}  # fmt: skip
DOTS1: Rules = {
    **HUNYUAN, "n_group": ONE_GROUP, "topk_group": ONE_GROUP, "layer_types": ALL_FULL,
    "num_key_value_heads": same_as("num_attention_heads", 32),
    "sliding_window": decided_elsewhere(4096), "max_window_layers": decided_elsewhere(62),
}  # fmt: skip
GLM4MOE: Rules = {
    "hidden_act": SILU, "attention_bias": decided_elsewhere(False), "use_qk_norm": decided_elsewhere(False),
    "n_group": ONE_GROUP, "topk_group": ONE_GROUP,
}  # fmt: skip
DEEPSEEK: Rules = {
    "q_lora_rank": Rule(1536, _whole_queries, "is null in a model of other layers than 26 and 27"),
    "rope_parameters": Rule(
        None, lambda value, config: _mscale_is(config.rope.number("mscale_all_dim"), config),
        "has mscale other than mscale_all_dim",
    ),
    **NO_BIASES, "head_dim": decided_elsewhere(None), "qk_head_dim": decided_elsewhere(192),
}  # fmt: skip


DEEPSEEK2: Rules = {
    **DEEPSEEK, "topk_method": only("greedy"), "n_group": decided_elsewhere(None),
    "topk_group": decided_elsewhere(None), "head_dim": same_as("qk_rope_head_dim", None),
    "num_key_value_heads": same_as("num_attention_heads", None),
}  # fmt: skip
DEEPSEEK3: Rules = {
    **DEEPSEEK, "rope_interleave": only(True), "n_group": decided_elsewhere(8), "head_dim": Rule(
        64, lambda value, config: value in (64, config.value("qk_rope_head_dim")), "is not qk_rope_head_dim"
    ),
    "topk_group": Rule(4, lambda value, config: value != 0, "leaves no group of experts"),
    "num_key_value_heads": same_as("num_attention_heads", 128),
}  # fmt: skip
PHI: Rules = {"hidden_act": GELU, "qk_layernorm": OFF}
GPTNEOX: Rules = {
    "hidden_act": GELU._replace(default="gelu"), "attention_bias": only(True), "is_decoder": decided_elsewhere(False),
}  # fmt: skip
GPT2: Rules = {
    "activation_function": GELU, "scale_attn_weights": only(True), "scale_attn_by_inverse_layer_idx": OFF,
    "add_cross_attention": OFF,
}  # fmt: skip
GPTBIGCODE: Rules = {
    "activation_function": GELU._replace(default="gelu_pytorch_tanh"), "scale_attn_weights": only(True),
    "multi_query": only(True), "add_cross_attention": OFF,
}  # fmt: skip
FALCON: Rules = {
    "activation": GELU._replace(default="gelu"), "alibi": OFF, "bias": OFF,
    "new_decoder_architecture": decided_elsewhere(False), "multi_query": decided_elsewhere(True),
    "parallel_attn": only(True),
    "num_ln_in_parallel_attn": Rule(
        None, lambda value, config: value is None or value == (2 if config.value("new_decoder_architecture") else 1),
        "is not the number of norms of its kind",
    ),
}  # fmt: skip
BLOOM: Rules = {"apply_residual_connection_post_layernorm": OFF}
GRANITE_MOE: Rules = {"hidden_act": SILU, "attention_bias": decided_elsewhere(False)}


def _linear_but_full(value: Any, config: Config) -> bool:
    """Whether full attention recurs with one period, which the file stores."""
    period = value.index(FULL) + 1 if value and FULL in value else 0
    return not value or all(kind == ("linear_attention" if (i + 1) % period else FULL) for i, kind in enumerate(value))


LINEAR: Rules = {
    "hidden_act": SILU, "attention_bias": OFF,
    "layer_types": Rule(None, lambda value, config: not value or (FULL in value and _linear_but_full(value, config)),
                        f"are not linear_attention with {FULL} at one period"),
    "linear_value_head_dim": Rule(
        128, lambda value, config: value == config.value("linear_key_head_dim"), "differs from linear_key_head_dim"
    ),
}  # fmt: skip
QWEN3_NEXT: Rules = {
    **LINEAR, "decoder_sparse_step": only(1), "mlp_only_layers": NONE, "norm_topk_prob": only(True),
}  # fmt: skip
LFM2: Rules = {"conv_bias": OFF, "layer_types": decided_elsewhere(None), "full_attn_idxs": decided_elsewhere(None)}
LFM2_MOE: Rules = {
    "conv_bias": OFF, "layer_types": decided_elsewhere(None), "use_expert_bias": only(True),
    "norm_topk_prob": only(True), "routed_scaling_factor": only(1.0),
}  # fmt: skip
APERTUS: Rules = {"hidden_act": only("xielu"), "attention_bias": OFF}
QWEN_VL: Rules = {**QWEN2, "max_window_layers": decided_elsewhere(80)}
QWEN3_VL: Rules = {"hidden_act": SILU, "attention_bias": OFF}
QWEN3_VL_MOE: Rules = {
    **QWEN3_VL, "decoder_sparse_step": only(1), "mlp_only_layers": NONE, "sliding_window": NONE,
}  # fmt: skip
MINISTRAL3: Rules = {
    "hidden_act": SILU, "sliding_window": window_of_context(None),
    "rope_parameters": Rule(None, lambda value, config: _mscale_is(1, config), "has mscale other than 1"),
}  # fmt: skip
MISTRAL3: Rules = {"hidden_act": SILU, "sliding_window": window_of_context(4096)}


def _chunks(value: Any, config: Config) -> bool:
    return not value or all(kind == ("chunked_attention" if (i + 1) % 4 else FULL) for i, kind in enumerate(value))


def _every_step(value: Any, config: Config) -> bool:
    step = config.integer("interleave_moe_layer_step") or 1
    return value is None or list(value) == list(range(step - 1, config.need("num_hidden_layers"), step))


LLAMA4: Rules = {
    "hidden_act": SILU, "attention_bias": OFF, "attention_chunk_size": only(8192), "floor_scale": only(8192),
    "attn_scale": only(0.1), "attn_temperature_tuning": only(True, 4),
    "use_qk_norm": Rule(True, lambda value, config: bool(value) == (config.value("num_local_experts") != 128),
                        "is not as llama.cpp computes: true but with 128 experts"),
    "layer_types": Rule(None, _chunks, "differ from chunked_attention with full attention in every fourth layer"),
    "no_rope_layers": SMOLLM3["no_rope_layers"], "no_rope_layer_interval": SMOLLM3["no_rope_layer_interval"],
    "moe_layers": Rule(None, _every_step, "are not those of interleave_moe_layer_step"),
}  # fmt: skip
ROTARY: Rules = {
    "mscale": Rule(  # transformers computes with both or with none
        None, lambda value, rope: not (value and rope.value("mscale_all_dim")), "is set, and so is mscale_all_dim"
    ),
    "mrope_section": NONE,
}  # fmt: skip


def check_rules(config: Config, rules: Rules, read_rotary: tuple[str, ...]) -> None:
    """Refuse a config with a value that the new file cannot express.

    read_rotary: keys of rotary embeddings that this architecture reads, or whose difference the documents name.
    CheckpointError names the key and the value.
    """
    check_values(config, rules)
    first, second = (config.values.get(key) for key in ROTARY_SETTINGS)
    if first and second and first != second:
        raise config.refusal(
            "rope_scaling", second, "is set, and transformers then ignores rope_parameters, which differ"
        )
    rotary = {"partial_rotary_factor": WHOLE_HEAD, "truncate": only(True), **ROTARY}
    rotary = {key: rule for key, rule in rotary.items() if key not in read_rotary}
    check_values(config, {key: rule for key, rule in rotary.items() if key == "partial_rotary_factor"})
    check_values(config.rope, rotary)
    windows = config.section(*ROTARY_SETTINGS).section(WINDOW)
    if rope_kind(windows) != "default":
        raise windows.refusal("rope_type", rope_kind(windows), f"is a scaling of {WINDOW}, which llama.cpp lacks")


def check_values(config: Config, rules: Rules) -> None:
    """Refuse a config with a value that a rule does not allow."""
    for key, rule in rules.items():
        value = config.values.get(key, rule.default)
        if not rule.allows(value, config):
            left_out = "" if key in config.values else " (the default, since the config leaves the key out)"
            raise config.refusal(key, value, f"{rule.text}{left_out}")
