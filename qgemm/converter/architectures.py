"""Hugging Face architectures that become .gguf models: one record each, following llama.cpp's converter.

Shapes are written in letters: V vocabulary, E hidden size, F feed-forward size, H query heads, G key-value heads,
D head size, X experts, M feed-forward size of an expert. Every tensor listed must exist and have its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError

from . import config_rules
from .config_rules import Rules
from .hyperparameters import (
    Config,
    common_keys,
    gemma2_keys,
    gemma3_keys,
    gpt_oss_keys,
    granite_keys,
    llama3_factors,
    llama_keys,
    longrope_factors,
    phi3_keys,
    qwen3moe_keys,
)
from .weight import Weight, numbers_of, weight_from_numbers
from .weight_views import reorder_rows, transpose_matrices

Refusal = Callable[[str, str], CheckpointError]  # (tensor name, rule) -> the error
Shapes = Mapping[str, str]  # name in a .gguf file -> shape in letters; names of layers omit "blk.N."

ENDS: Shapes = {"token_embd.weight": "V E", "output_norm.weight": "E"}
ATTENTION: Shapes = {
    "attn_norm.weight": "E", "attn_q.weight": "HD E", "attn_k.weight": "GD E", "attn_v.weight": "GD E",
    "attn_output.weight": "E HD",
}  # fmt: skip
DENSE: Shapes = {"ffn_gate.weight": "F E", "ffn_up.weight": "F E", "ffn_down.weight": "E F"}
EXPERTS: Shapes = {
    "ffn_gate_inp.weight": "X E", "ffn_gate_exps.weight": "X M E", "ffn_up_exps.weight": "X M E",
    "ffn_down_exps.weight": "X E M",
}  # fmt: skip
BEFORE_FFN: Shapes = {"ffn_norm.weight": "E"}
HEAD_NORMS: Shapes = {"attn_q_norm.weight": "D", "attn_k_norm.weight": "D"}
BIASES: Shapes = {"attn_q.bias": "HD", "attn_k.bias": "GD", "attn_v.bias": "GD"}


class Architecture(NamedTuple):
    """How a family of models becomes a .gguf model.

    kind: the gguf package's architecture. keys: writes the hyperparameters. rules: values that other keys must have.
    layer: the tensors of every layer; those of its feed-forward network are added unless listed.
    rotary_pairs: whether rows of queries and keys move into llama.cpp's rotary order.
    norms_plus_one: whether the checkpoint stores norms minus one. defaults: values for keys that configs omit.
    factors: kind of rotary scaling -> the tensors that it adds.
    read_rotary: keys of rotary embeddings that only some architectures read.
    space: whether text gets a leading space before tokenization, None if the tokenizer decides.
    split: splits a fused tensor of the checkpoint into llama.cpp's tensors, under Hugging Face's names; tensors that do
    not fit are refused.
    """

    kind: MODEL_ARCH
    keys: Callable[[Config, GGUFWriter], None]
    layer: Shapes
    rules: Rules
    rotary_pairs: bool = False
    norms_plus_one: bool = False
    defaults: Mapping[str, Any] = {}
    factors: Mapping[str, Callable[[Config], dict[str, Floats]]] = {}
    split: Callable[[Weight, Refusal], list[Weight]] = lambda weight, refusal: [weight]
    space: bool | None = None
    read_rotary: tuple[str, ...] = ()

    def shapes(self, experts: bool) -> Shapes:
        """The tensors of a layer with or without experts."""
        if "ffn_up.weight" in self.layer:
            return self.layer
        return {**self.layer, **(EXPERTS if experts else DENSE)}


def _qwen_experts(weight: Weight, refusal: Refusal) -> list[Weight]:
    """Split gate and up projections of all experts, [X, 2 M, E] with gates first; down projections are [X, E, M]."""
    stem = weight.name.removesuffix(".weight")
    if stem.endswith("experts.down_proj"):
        return [renamed_to(weight, f"{stem}.weight")]
    if not stem.endswith("experts.gate_up_proj"):
        return [weight]
    _check_axes(weight, 3, refusal)
    rows, stem = _even(weight, weight.shape[1], refusal), stem.removesuffix("gate_up_proj")
    return [
        renamed_to(reorder_rows(weight, np.arange(start, start + rows // 2), rows), f"{stem}{part}_proj.weight")
        for part, start in (("gate", 0), ("up", rows // 2))
    ]


def _gpt_oss(weight: Weight, refusal: Refusal) -> list[Weight]:
    """Split gate and up projections whose rows alternate, [X, 2 M, E]; all but MXFP4 are stored transposed."""
    name = weight.name
    if name.endswith(".sinks"):
        return [renamed_to(weight, f"{name}.weight")]
    if name.endswith("experts.down_proj_bias"):
        return [renamed_to(weight, name.replace("_bias", ".bias"))]
    if name.endswith("experts.gate_up_proj_bias"):
        _check_axes(weight, 2, refusal)
        columns, stem = _even(weight, weight.shape[1], refusal), name.removesuffix("gate_up_proj_bias")
        both = numbers_of(weight)(0, weight.size).reshape(-1, columns)
        return [weight_from_numbers(f"{stem}{part}_proj.bias", both[:, i::2]) for i, part in enumerate(("gate", "up"))]
    if not name.endswith(("experts.down_proj", "experts.gate_up_proj")):
        return [weight]
    _check_axes(weight, 3, refusal)
    matrix = weight if weight.quantized else transpose_matrices(weight)
    if name.endswith("down_proj"):
        return [renamed_to(matrix, f"{name}.weight")]
    stem = name.removesuffix("gate_up_proj")
    _even(weight, matrix.shape[1], refusal)
    return [
        renamed_to(reorder_rows(matrix, np.array([i]), 2), f"{stem}{part}_proj.weight")
        for i, part in enumerate(("gate", "up"))
    ]


def renamed_to(weight: Weight, name: str) -> Weight:
    """The weight under another name."""
    return replace(weight, name=name)


def _check_axes(weight: Weight, axes: int, refusal: Refusal) -> None:
    if len(weight.shape) != axes:
        raise refusal(weight.name, f"has shape {weight.shape}, where {axes} axes are needed")


def _even(weight: Weight, rows: int, refusal: Refusal) -> int:
    if rows % 2:
        raise refusal(weight.name, f"{rows} rows are no gates and as many ups")
    return rows


LLAMA = Architecture(
    MODEL_ARCH.LLAMA, llama_keys, {**ATTENTION, **BEFORE_FFN}, config_rules.LLAMA,
    rotary_pairs=True, factors={"llama3": llama3_factors},
)  # fmt: skip

GEMMA3_LAYER: Shapes = {
    **ATTENTION, **HEAD_NORMS, **BEFORE_FFN, "post_attention_norm.weight": "E", "post_ffw_norm.weight": "E",
}  # fmt: skip
GEMMA3_DEFAULTS = {
    "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = Architecture(
    MODEL_ARCH.GEMMA3, gemma3_keys, GEMMA3_LAYER, config_rules.GEMMA3,
    norms_plus_one=True, defaults=GEMMA3_DEFAULTS, space=False,
)  # fmt: skip
PHI3_LAYER: Shapes = {
    "attn_norm.weight": "E", "attn_qkv.weight": "QKV E", "attn_output.weight": "E HD", "ffn_norm.weight": "E",
    "ffn_up.weight": "2F E", "ffn_down.weight": "E F",
}  # fmt: skip
GPT_OSS_LAYER: Shapes = {
    **ATTENTION, **BIASES, "attn_output.bias": "E", "attn_sinks.weight": "H", "post_attention_norm.weight": "E",
    "ffn_gate_inp.bias": "X", "ffn_gate_exps.bias": "X M", "ffn_up_exps.bias": "X M", "ffn_down_exps.bias": "X E",
}  # fmt: skip
QWEN2_LAYER: Shapes = {**ATTENTION, **BIASES, **BEFORE_FFN}
QWEN3_LAYER: Shapes = {**ATTENTION, **HEAD_NORMS, **BEFORE_FFN}

POST_NORMS: Shapes = {"post_attention_norm.weight": "E", "post_ffw_norm.weight": "E"}
ROW_NORMS: Shapes = {"attn_q_norm.weight": "HD", "attn_k_norm.weight": "GD"}
OLMO2_LAYER: Shapes = {
    **{name: shape for name, shape in ATTENTION.items() if name != "attn_norm.weight"}, **ROW_NORMS, **POST_NORMS,
}  # fmt: skip
GEMMA2_DEFAULTS = {
    "head_dim": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_DEFAULTS = {
    "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0
}  # fmt: skip
GPT_OSS_ROTARY = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                  "original_max_position_embeddings": 4096, "truncate": False}  # fmt: skip

ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA._replace(rules=config_rules.MISTRAL),
    "MixtralForCausalLM": LLAMA._replace(rules=config_rules.MIXTRAL, defaults={"rope_theta": 1e6}),
    "Qwen2ForCausalLM": Architecture(MODEL_ARCH.QWEN2, common_keys, QWEN2_LAYER, config_rules.QWEN2),
    "Qwen3ForCausalLM": Architecture(
        MODEL_ARCH.QWEN3, common_keys, QWEN3_LAYER, config_rules.QWEN3, defaults={"head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Architecture(
        MODEL_ARCH.QWEN3MOE, qwen3moe_keys, QWEN3_LAYER, config_rules.QWEN3MOE, split=_qwen_experts
    ),
    "GemmaForCausalLM": Architecture(
        MODEL_ARCH.GEMMA, common_keys, {**ATTENTION, **BEFORE_FFN}, config_rules.GEMMA,
        norms_plus_one=True, defaults={"head_dim": 256, "tie_word_embeddings": True}, space=False,
    ),
    "Gemma2ForCausalLM": Architecture(
        MODEL_ARCH.GEMMA2, gemma2_keys, {**ATTENTION, **BEFORE_FFN, **POST_NORMS}, config_rules.GEMMA2,
        norms_plus_one=True, defaults=GEMMA2_DEFAULTS, space=False,
    ),
    "GraniteForCausalLM": Architecture(
        MODEL_ARCH.GRANITE, granite_keys, {**ATTENTION, **BEFORE_FFN}, config_rules.GRANITE,
        rotary_pairs=True, defaults=GRANITE_DEFAULTS,
    ),
    "Olmo2ForCausalLM": Architecture(MODEL_ARCH.OLMO2, common_keys, OLMO2_LAYER, config_rules.OLMO2),
    "OlmoeForCausalLM": Architecture(
        MODEL_ARCH.OLMOE, common_keys, {**ATTENTION, **ROW_NORMS, **BEFORE_FFN}, config_rules.OLMOE,
        split=_qwen_experts,
    ),
    "SeedOssForCausalLM": Architecture(
        MODEL_ARCH.SEED_OSS, common_keys, {**ATTENTION, **BIASES, "post_attention_norm.weight": "E"},
        config_rules.SEED_OSS, defaults={"head_dim": 128},
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": Architecture(
        MODEL_ARCH.PHI3, phi3_keys, PHI3_LAYER, config_rules.PHI3,
        factors={"longrope": longrope_factors}, read_rotary=("partial_rotary_factor",),
    ),
    "GptOssForCausalLM": Architecture(
        MODEL_ARCH.GPT_OSS, gpt_oss_keys, GPT_OSS_LAYER, config_rules.GPT_OSS, split=_gpt_oss,
        defaults={"rope_theta": 150000.0, "rope_scaling": GPT_OSS_ROTARY, "head_dim": 64},
        read_rotary=("truncate",),
    ),
}  # fmt: skip


def letters(config: Config, tokens: int) -> dict[str, int]:
    """The value of each letter of a shape."""
    heads, dim = config.need("num_attention_heads"), config.head_dim
    groups = config.integer("num_key_value_heads") or heads
    ffn = config.need("intermediate_size")
    return {
        "V": tokens, "E": config.need("hidden_size"), "F": ffn, "2F": 2 * ffn, "H": heads, "D": dim, "HD": heads * dim,
        "GD": groups * dim, "QKV": (heads + 2 * groups) * dim,
        "X": config.integer("num_local_experts", "num_experts") or 0,
        "M": config.integer("moe_intermediate_size") or ffn,
    }  # fmt: skip
