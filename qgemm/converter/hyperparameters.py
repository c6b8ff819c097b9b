"""Hyperparameters of a Hugging Face config as metadata of a .gguf file, under the gguf package's keys.

What a model's inference depends on and is not known here is refused by its name, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log, pi, sqrt
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown

MOST = (1 << 32) - 1  # of an integer: keys are UINT32


@dataclass(frozen=True)
class Config:
    """An object of a config file; `where` is what errors call it. Its values are checked when they are asked for."""

    where: str
    values: Mapping[str, Any]

    def given(self, *names: str) -> Any:
        """The value under the first of some names that has one, None if none has."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str) -> int | None:
        """A count, None where there is none."""
        found = self.given(*names)
        if found is not None and (type(found) is not int or not 0 <= found <= MOST):
            raise self.refusal(names[0], found, "is no count")
        return found

    def need(self, *names: str) -> int:
        """A count that must be there and be more than 0."""
        found = self.integer(*names)
        if not found:
            raise self.refusal(names[0], found, "is needed")
        return found

    def number(self, *names: str) -> float | None:
        """A finite number, None where there is none."""
        found = self.given(*names)
        if found is None:
            return None
        if type(found) not in (int, float) or not isfinite(found):
            raise self.refusal(names[0], found, "is no number")
        return float(found)

    def numbers(self, name: str) -> Floats:
        """A list of finite numbers as float32, [n]."""
        found = self.values.get(name)
        if not isinstance(found, Sequence) or not all(type(each) in (int, float) for each in found):
            raise self.refusal(name, found, "is no list of numbers")
        array = np.array(found, np.float32)
        if array.ndim != 1 or not np.isfinite(array).all():
            raise self.refusal(name, found, "is no list of finite numbers")
        return array

    def section(self, *names: str) -> Config:
        """An object in this one, empty where there is none."""
        found = self.given(*names)
        if found is not None and not isinstance(found, dict):
            raise self.refusal(names[0], found, "is no object")
        return Config(f"{self.where}: {names[0]}", found or {})

    def refusal(self, name: str, value: Any, rule: str) -> CheckpointError:
        """The error for a value."""
        return CheckpointError(f"{self.where}: {name}: {shown(str(value))} {rule}")

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.integer("head_dim") or self.need("hidden_size") // self.need("num_attention_heads")

    @property
    def rope(self) -> Config:
        """What is said of rotary embeddings, of layers that see everything where layers differ."""
        rope = self.section("rope_parameters", "rope_scaling")
        return rope.section("full_attention") if "full_attention" in rope.values else rope

    @property
    def rope_of_windows(self) -> float | None:
        """The base of rotary embeddings in layers with a sliding window, where it is another one."""
        rope = self.section("rope_parameters", "rope_scaling").section("sliding_attention")
        return rope.number("rope_theta") or self.number("rope_local_base_freq")


def common_keys(config: Config, writer: GGUFWriter) -> None:
    """The keys of every decoder: sizes, heads, norms, rotary embeddings, experts."""
    heads = config.need("num_attention_heads")
    writer.add_block_count(config.need("num_hidden_layers"))
    writer.add_context_length(config.need("max_position_embeddings"))
    writer.add_embedding_length(config.need("hidden_size"))
    writer.add_feed_forward_length(config.need("intermediate_size"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.integer("num_key_value_heads") or heads)
    epsilon = config.number("rms_norm_eps")
    if epsilon is None:
        raise config.refusal("rms_norm_eps", epsilon, "is needed")
    writer.add_layer_norm_rms_eps(epsilon)
    if config.integer("head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    experts = config.integer("num_local_experts", "num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.need("num_experts_per_tok", "experts_per_token"))
    rope_keys(config, writer)


def rope_keys(config: Config, writer: GGUFWriter) -> None:
    """Base and scaling of rotary embeddings."""
    rope = config.rope
    base = rope.number("rope_theta") or config.number("rope_theta")
    if base is not None:
        writer.add_rope_freq_base(base)
    if config.rope_of_windows is not None:
        writer.add_rope_freq_base_swa(config.rope_of_windows)
    kind = rope_kind(rope)
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(_needed(rope, "factor"))
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(_needed(rope, "factor"))
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
    elif kind not in ("default", "llama3", "longrope"):
        raise rope.refusal("rope_type", kind, "is a scaling of rotary embeddings that is not known")


def rope_kind(rope: Config) -> str:
    """How rotary embeddings are scaled: "default", "linear", "yarn", "llama3", "longrope" or another word."""
    found = str(rope.given("rope_type", "type") or "default").lower()
    return "longrope" if found == "su" else found


def llama3_factors(config: Config) -> dict[str, Floats]:
    """By its name, what divides the frequencies of a llama 3's rotary embedding, [head_dim / 2].

    Wavelengths beyond the context that the model was first trained with are stretched by `factor`, short ones stay,
    and those between are interpolated.
    """
    rope, dim = config.rope, config.head_dim
    base = rope.number("rope_theta") or config.number("rope_theta") or 10000.0
    factor, low, high = (_needed(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.integer("original_max_position_embeddings") or 8192
    wavelengths = 2 * pi * base ** (np.arange(0, dim, 2) / dim)
    with np.errstate(all="ignore"):  # what is not finite is refused below
        smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
        found: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    if not np.isfinite(found).all():
        raise rope.refusal("factor", factor, "gives no finite factors")
    return {"rope_freqs.weight": found.astype(np.float32)}


def longrope_factors(config: Config) -> dict[str, Floats]:
    """By name, the factors of short and of long contexts, [rotated numbers of a head / 2] each."""
    return {f"rope_factors_{which}.weight": config.rope.numbers(f"{which}_factor") for which in ("long", "short")}


def phi3_keys(config: Config, writer: GGUFWriter) -> None:
    """Those of phi3, whose long context has factors of its own."""
    context, rope = config.need("max_position_embeddings"), config.rope
    trained = config.integer("original_max_position_embeddings") or rope.integer("original_max_position_embeddings")
    part = config.number("partial_rotary_factor") or rope.number("partial_rotary_factor") or 1.0
    heads = config.need("num_attention_heads")
    common_keys(config, writer)
    writer.add_rope_dimension_count(int(part * config.need("hidden_size")) // heads)
    writer.add_rope_scaling_orig_ctx_len(trained or context)
    writer.add_sliding_window(config.integer("sliding_window") or 0)  # llama.cpp tells phi 4 from phi 3 by the 0
    if rope_kind(rope) == "longrope":
        scale = context / (trained or context)
        writer.add_rope_scaling_attn_factors(sqrt(1 + log(scale) / log(trained or context)) if scale > 1 else 1.0)


def llama_keys(config: Config, writer: GGUFWriter) -> None:
    """Those of llama, mistral and mixtral."""
    common_keys(config, writer)
    writer.add_vocab_size(config.need("vocab_size"))
    writer.add_rope_dimension_count(config.head_dim)


def gemma3_keys(config: Config, writer: GGUFWriter) -> None:
    """Those of gemma 3, most of whose layers see a window."""
    common_keys(config, writer)
    if config.given("attn_logit_softcapping") is not None:
        raise config.refusal("attn_logit_softcapping", config.given("attn_logit_softcapping"), "is not known")
    cap = config.number("final_logit_softcapping")
    if cap is not None:
        writer.add_final_logit_softcapping(cap)
    if config.integer("sliding_window_pattern") != 1:
        writer.add_sliding_window(config.need("sliding_window"))


def qwen3moe_keys(config: Config, writer: GGUFWriter) -> None:
    """Those of a qwen 3 with experts."""
    common_keys(config, writer)
    writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))


def gpt_oss_keys(config: Config, writer: GGUFWriter) -> None:
    """Those of gpt-oss."""
    common_keys(config, writer)
    writer.add_sliding_window(config.need("sliding_window"))
    writer.add_expert_feed_forward_length(config.need("intermediate_size"))


def _needed(config: Config, name: str) -> float:
    found = config.number(name)
    if found is None:
        raise config.refusal(name, found, "is needed")
    return found
