"""Keys of a Hugging Face config that must have certain values, because a .gguf file has no key for others.

Each key of a model's config class is read by its function of hyperparameters.py, has a rule here, or has no effect on
the result. A key that the config leaves out has the default of its class, which must fit the rule as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .hyperparameters import Config, rope_kind

FULL, WINDOW = "full_attention", "sliding_attention"

NO_EFFECT = {
    # settings of training, of speed, and of outputs other than logits
    "attention_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop", "initializer_range",
    "router_aux_loss_coef",
    "router_jitter_noise", "pretraining_tp", "use_cache", "output_router_logits", "output_hidden_states",
    "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type",
    # labels of other tasks, and facts about the file
    "id2label", "label2id", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "model_type",
    # settings of the vision part, which is left out
    "vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index",
}  # fmt: skip
READ_ELSEWHERE = {  # by the converter itself, for every architecture
    "architectures", "text_config", "vocab_size", "tie_word_embeddings",
    *(f"{name}_token_id" for name in ("bos", "eos", "pad")),
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
GRANITE: Rules = LLAMA
OLMO2: Rules = {"hidden_act": SILU, "attention_bias": OFF}
OLMOE: Rules = {**OLMO2, "clip_qkv": NONE, "norm_topk_prob": OFF}
SEED_OSS: Rules = {
    "hidden_act": SILU, "attention_bias": only(True), "attention_out_bias": OFF, "mlp_bias": OFF,
}  # fmt: skip
PHI3: Rules = {"hidden_act": SILU}
GPT_OSS: Rules = {
    "hidden_act": SILU, "attention_bias": only(True), "layer_types": every(2), "swiglu_alpha": only(1.702),
    "swiglu_limit": only(7.0),
}  # fmt: skip
ROTARY: Rules = {"mscale": NONE, "mscale_all_dim": NONE, "mrope_section": NONE}


def check_rules(config: Config, rules: Rules, read_rotary: tuple[str, ...]) -> None:
    """Refuse a config with a value that the new file cannot express.

    read_rotary: keys of rotary embeddings that this architecture reads, or whose difference the documents name.
    CheckpointError names the key and the value.
    """
    _check(config, rules)
    rotary = {"partial_rotary_factor": WHOLE_HEAD, "truncate": only(True), **ROTARY}
    rotary = {key: rule for key, rule in rotary.items() if key not in read_rotary}
    _check(config, {key: rule for key, rule in rotary.items() if key == "partial_rotary_factor"})
    _check(config.rope, rotary)
    windows = config.section("rope_parameters", "rope_scaling").section(WINDOW)
    if rope_kind(windows) != "default":
        raise windows.refusal("rope_type", rope_kind(windows), f"is a scaling of {WINDOW}, which llama.cpp lacks")


def _check(config: Config, rules: Rules) -> None:
    for key, rule in rules.items():
        value = config.values.get(key, rule.default)
        if not rule.allows(value, config):
            left_out = "" if key in config.values else " (the default, since the config leaves the key out)"
            raise config.refusal(key, value, f"{rule.text}{left_out}")
