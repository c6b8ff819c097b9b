"""Hyperparameters of a Hugging Face config as metadata of a .gguf file, under the gguf package's keys.

A setting that changes inference and is not supported is refused by its name, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose, log, pi, sqrt
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

OLD_KINDS = {"su": "longrope", "mrope": "default"}  # Qwen 2 VL's kind has sections, which are a key of their own
ROTARY_SETTINGS = ("rope_parameters", "rope_scaling")  # the objects that transformers 5 and 4 write
WITH_FACTORS = ("llama3", "longrope", "proportional")  # kinds of rotary scaling that add tensors


@dataclass(frozen=True)
class Config:
    """An object of a config file, whose values were checked by `check_config`; `where` names it in errors."""

    where: str
    values: Mapping[str, Any]

    def value(self, *names: str) -> Any:
        """The first value that is not null among these keys, None if there is none."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str) -> int | None:
        """A count, None where absent."""
        count: int | None = self.value(*names)
        return count

    def need(self, *names: str) -> int:
        """A positive count that must be present."""
        count = self.integer(*names)
        if not count:
            raise self.refusal(names[0], count, "is needed")
        return count

    def one_for_layers(self, name: str) -> int | None:
        """A count that may be listed by layer; CheckpointError if the layers differ."""
        value = self.value(name)
        counts = value if isinstance(value, list) else [value]
        if len(set(counts)) != 1:
            raise self.refusal(name, value, "differs by layer")
        count: int | None = counts[0]
        return count

    def number(self, *names: str) -> float | None:
        """A finite number, None where absent."""
        value = self.value(*names)
        return None if value is None else float(value)

    def need_number(self, name: str) -> float:
        """A finite number that must be present."""
        value = self.number(name)
        if value is None:
            raise self.refusal(name, value, "is needed")
        return value

    def section(self, *names: str) -> Config:
        """An object within this one, empty where absent."""
        name = next((name for name in names if self.values.get(name)), names[0])
        return Config(f"{self.where}: {name}", self.values.get(name) or {})

    def replaced(self, **values: Any) -> Config:
        """This config with other values, None for absent ones."""
        return Config(self.where, {**self.values, **values})

    def refusal(self, name: str, value: Any, rule: str) -> CheckpointError:
        """The error for a value."""
        return CheckpointError(f"{self.where}: {name}: {shown(str(value))} {rule}")

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.integer("head_dim") or self.need("hidden_size") // self.need("num_attention_heads")

    @property
    def rope(self) -> Config:
        """The rotary embedding's settings; those of layers with full attention where layers differ."""
        rope = self.section(*ROTARY_SETTINGS)
        return rope.section("full_attention") if "full_attention" in rope.values else rope

    @property
    def rope_of_windows(self) -> float | None:
        """The rotary base of layers with a sliding window, None where it is the same."""
        rope = self.section(*ROTARY_SETTINGS).section("sliding_attention")
        return rope.number("rope_theta") or self.number("rope_local_base_freq")


def check_heads(config: Config) -> None:
    """Refuse heads of sizes and numbers at which llama.cpp aborts.

    Heads of queries share those of keys and values evenly, and a rotated head has an even size.
    """
    heads = config.integer("num_attention_heads")
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        groups = config.integer(key)
        if heads and groups and heads % groups:
            raise config.refusal(key, groups, f"does not divide num_attention_heads, {heads}")
    size = config.integer("qk_rope_head_dim") or config.head_dim
    if size % 2 and (config.rope.values or config.number("rope_theta") is not None):
        raise config.refusal("head_dim", size, "is odd, and rotary embeddings rotate pairs")


def common_keys(config: Config, writer: GGUFWriter, norm: str = "rms_norm_eps") -> None:
    """Write the keys of every decoder: sizes, heads, norms, rotary embeddings, experts.

    norm: the key of the norms' epsilon, rms_norm_eps or layer_norm_eps.
    """
    heads = config.need("num_attention_heads")
    writer.add_block_count(config.need("num_hidden_layers"))
    writer.add_context_length(config.need("max_position_embeddings"))
    writer.add_embedding_length(config.need("hidden_size"))
    writer.add_feed_forward_length(config.need("intermediate_size"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.integer("num_key_value_heads") or heads)
    add_epsilon = writer.add_layer_norm_rms_eps if norm == "rms_norm_eps" else writer.add_layer_norm_eps
    add_epsilon(config.need_number(norm))
    if config.integer("head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    experts = config.integer("num_local_experts", "num_experts")
    if experts:
        used = config.need("num_experts_per_tok", "experts_per_token")
        if used > experts:
            raise config.refusal("num_experts_per_tok", used, f"is more than the {experts} experts")
        writer.add_expert_count(experts)
        writer.add_expert_used_count(used)
    rope_keys(config, writer)


def rope_keys(config: Config, writer: GGUFWriter) -> None:
    """Write base and scaling of rotary embeddings."""
    rope = config.rope
    base = rope.number("rope_theta") or config.number("rope_theta")
    if base is not None:
        writer.add_rope_freq_base(base)
    if config.rope_of_windows is not None:
        writer.add_rope_freq_base_swa(config.rope_of_windows)
    kind = rope_kind(rope)
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.need_number("factor"))
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.need_number("factor"))
        writer.add_rope_scaling_orig_ctx_len(rope.need("original_max_position_embeddings"))
        for name, add in (
            ("extrapolation_factor", writer.add_rope_scaling_yarn_ext_factor),
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            value = rope.number(name)
            if value is not None:
                add(value)
        factor, usual = rope.number("attention_factor"), usual_attention_factor(rope)
        if factor is not None and not isclose(factor, usual, rel_tol=1e-6):
            writer.add_rope_scaling_attn_factors(factor / usual)  # llama.cpp replaces yarn_attn_factor by the usual one
    elif kind != "default" and kind not in WITH_FACTORS:
        raise rope.refusal("rope_type", kind, "is a scaling of rotary embeddings that is not known")


def rope_kind(rope: Config) -> str:
    """The kind of rotary scaling: "default", "linear", "yarn", "llama3", "longrope" or another word."""
    kind = str(rope.value("rope_type", "type") or "default").lower()
    return OLD_KINDS.get(kind, kind)


def usual_attention_factor(rope: Config) -> float:
    """The factor of rotated queries and keys that yarn has unless the config gives another."""
    stretch = 0.1 * log(max(rope.need_number("factor"), 1.0))
    first, second = rope.number("mscale"), rope.number("mscale_all_dim")
    return (1 + first * stretch) / (1 + second * stretch) if first and second else 1 + stretch


def llama3_factors(config: Config) -> dict[str, Floats]:
    """The tensor of llama 3's divisors of rotary frequencies, [head_dim / 2], by its name.

    Wavelengths beyond the original training context are stretched by `factor`, short ones stay, and those between, if
    the two limits differ, are interpolated.
    """
    rope, dim = config.rope, config.head_dim
    base = rope.number("rope_theta") or config.number("rope_theta") or 10000.0
    factor, low, high = (rope.need_number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.integer("original_max_position_embeddings") or 8192
    wavelengths = 2 * pi * base ** (np.arange(0, dim, 2) / dim)
    if high < low:
        raise rope.refusal("high_freq_factor", high, f"is below the low_freq_factor, {low}")
    turns = trained / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low  # equal in Llama 4
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return {"rope_freqs.weight": factors.astype(np.float32)}


def longrope_factors(config: Config) -> dict[str, Floats]:
    """The factors of short and of long contexts, [rotated dimensions / 2] each, by tensor name."""
    rope, count = config.rope, _rotated_dimensions(config) // 2
    factors: dict[str, Floats] = {}
    for key in ("long_factor", "short_factor"):
        numbers = rope.value(key) or []
        if len(numbers) != count:
            raise rope.refusal(key, numbers, f"has {len(numbers)} numbers, {count} are needed")
        factors[f"rope_factors_{key.removesuffix('_factor')}.weight"] = np.array(numbers, np.float32)
    return factors


def rotated_dimensions(config: Config) -> int:
    """The dimensions of a head that are rotated."""
    share = config.rope.number("partial_rotary_factor") or config.number("partial_rotary_factor") or 1.0
    return int(share * config.head_dim)


def _rotated_dimensions(config: Config) -> int:
    """The dimensions of a head of phi3 that are rotated."""
    share = config.number("partial_rotary_factor") or config.rope.number("partial_rotary_factor") or 1.0
    return int(share * config.need("hidden_size")) // config.need("num_attention_heads")


PHI3_TRAINED = 4096  # original_max_position_embeddings of a Phi3Config that leaves it out


def phi3_keys(config: Config, writer: GGUFWriter, attention_factor: str = "attention_factor") -> None:
    """Write the keys of phi 3, whose long context has factors of its own.

    attention_factor: the rotary setting that replaces the usual factor of rotated queries and keys.
    """
    context, rope = config.need("max_position_embeddings"), config.rope
    trained = config.integer("original_max_position_embeddings") or rope.integer("original_max_position_embeddings")
    if rope_kind(rope) == "longrope":
        trained = trained or PHI3_TRAINED
    common_keys(config, writer)
    writer.add_rope_dimension_count(_rotated_dimensions(config))
    writer.add_rope_scaling_orig_ctx_len(trained or context)
    writer.add_sliding_window(config.integer("sliding_window") or 0)  # llama.cpp recognizes phi 4 by the 0
    if rope_kind(rope) == "longrope":
        scale = rope.number("factor") or context / (trained or context)
        factor = sqrt(1 + log(scale) / log(trained or context)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(rope.number(attention_factor) or factor)


def phimoe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of phi moe."""
    phi3_keys(config, writer, "short_mscale")


def zero_biases(config: Config, sizes: Mapping[str, int]) -> Mapping[str, Floats]:
    """The biases that llama.cpp adds in every phi moe, for a checkpoint without them."""
    layers = range(config.need("num_hidden_layers"))
    shapes = {"output.bias": "V", **{f"blk.{layer}.attn_output.bias": "E" for layer in layers}}
    return {name: np.zeros(sizes[letter], np.float32) for name, letter in shapes.items()}


def llama_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of llama, mistral and mixtral."""
    common_keys(config, writer)
    writer.add_vocab_size(config.need("vocab_size"))
    writer.add_rope_dimension_count(config.head_dim)


def gemma3_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of gemma 3, most of whose layers have a sliding window."""
    common_keys(config, writer)
    if config.value("attn_logit_softcapping") is not None:
        raise config.refusal("attn_logit_softcapping", config.value("attn_logit_softcapping"), "is not known")
    cap = config.number("final_logit_softcapping")
    if cap is not None:
        writer.add_final_logit_softcapping(cap)
    if config.integer("sliding_window_pattern") != 1:
        writer.add_sliding_window(config.need("sliding_window"))


def qwen3moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of qwen 3 with experts."""
    common_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))


def gpt_oss_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of gpt-oss."""
    common_keys(config, writer)
    writer.add_sliding_window(config.need("sliding_window"))
    writer.add_expert_feed_forward_length(config.need("intermediate_size"))


def gemma2_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of gemma 2, half of whose layers have a sliding window."""
    common_keys(config, writer)
    writer.add_attn_logit_softcapping(config.need_number("attn_logit_softcapping"))
    writer.add_final_logit_softcapping(config.need_number("final_logit_softcapping"))
    writer.add_sliding_window(config.need("sliding_window"))


def granite_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of granite: those of llama, and four factors."""
    llama_keys(config, writer)
    writer.add_attention_scale(config.need_number("attention_multiplier"))
    writer.add_embedding_scale(config.need_number("embedding_multiplier"))
    writer.add_residual_scale(config.need_number("residual_multiplier"))
    writer.add_logit_scale(config.need_number("logits_scaling"))
