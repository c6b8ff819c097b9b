"""Hugging Face architectures that become .gguf models: one record each, following llama.cpp's converter."""

from __future__ import annotations

from gguf import MODEL_ARCH

from . import config_rules
from .architecture_record import (
    ATTENTION,
    BEFORE_FFN,
    BIASES,
    HEAD_NORMS,
    POST_NORMS,
    ROW_NORMS,
    Architecture,
    Shapes,
    with_biases,
)  # fmt: skip
from .encoder_architectures import ENCODERS
from .family_architectures import FAMILIES
from .fused_weights import gpt_oss_experts, joined_experts
from .gemma_architectures import GEMMAS
from .hybrid_architectures import HYBRIDS
from .hyperparameters import (
    common_keys,
    gemma2_keys,
    gemma3_keys,
    gpt_oss_keys,
    granite_keys,
    llama3_factors,
    llama_keys,
    longrope_factors,
    phi3_keys,
    phimoe_keys,
    qwen3moe_keys,
    zero_biases,
)

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
PHIMOE = Architecture(
    MODEL_ARCH.PHIMOE, phimoe_keys, {
        **with_biases({name: "E" for name in ("attn_norm.weight", "ffn_norm.weight")}), **ATTENTION,
        "attn_output.bias": "E",
    }, config_rules.PHIMOE,
    ends={"token_embd.weight": "V E", **with_biases({"output_norm.weight": "E", "output.weight": "V E"})},
    factors={"longrope": longrope_factors}, defaults={"rope_theta": 1e6}, unread=zero_biases,
)  # fmt: skip
GPT_OSS_LAYER: Shapes = {
    **ATTENTION, **BIASES, "attn_output.bias": "E", "attn_sinks.weight": "H", "post_attention_norm.weight": "E",
    "ffn_gate_inp.bias": "X", "ffn_gate_exps.bias": "X M", "ffn_up_exps.bias": "X M", "ffn_down_exps.bias": "X E",
}  # fmt: skip
QWEN2_LAYER: Shapes = {**ATTENTION, **BIASES, **BEFORE_FFN}
QWEN3_LAYER: Shapes = {**ATTENTION, **HEAD_NORMS, **BEFORE_FFN}
QWEN2 = Architecture(MODEL_ARCH.QWEN2, common_keys, QWEN2_LAYER, config_rules.QWEN2, pools=True)
QWEN2_AUDIO_DEFAULTS = {  # those of Qwen2Config, which the published text_config omits
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip

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
    "SmolVLMForConditionalGeneration": LLAMA,
    "Idefics3ForConditionalGeneration": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2AudioForConditionalGeneration": QWEN2._replace(defaults=QWEN2_AUDIO_DEFAULTS),
    "Qwen3ForCausalLM": Architecture(
        MODEL_ARCH.QWEN3, common_keys, QWEN3_LAYER, config_rules.QWEN3, defaults={"head_dim": 128}, pools=True
    ),
    "Qwen3MoeForCausalLM": Architecture(
        MODEL_ARCH.QWEN3MOE, qwen3moe_keys, QWEN3_LAYER, config_rules.QWEN3MOE, split=joined_experts
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
        MODEL_ARCH.GRANITE, granite_keys, {**ATTENTION, **BEFORE_FFN}, config_rules.LLAMA,
        rotary_pairs=True, defaults=GRANITE_DEFAULTS,
    ),
    "Olmo2ForCausalLM": Architecture(MODEL_ARCH.OLMO2, common_keys, OLMO2_LAYER, config_rules.OLMO2),
    "OlmoeForCausalLM": Architecture(
        MODEL_ARCH.OLMOE, common_keys, {**ATTENTION, **ROW_NORMS, **BEFORE_FFN}, config_rules.OLMOE,
        split=joined_experts,
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
    "PhimoeForCausalLM": PHIMOE,
    "PhiMoEForCausalLM": PHIMOE,  # in the model's own code
    "GptOssForCausalLM": Architecture(
        MODEL_ARCH.GPT_OSS, gpt_oss_keys, GPT_OSS_LAYER, config_rules.GPT_OSS, split=gpt_oss_experts,
        defaults={"rope_theta": 150000.0, "rope_scaling": GPT_OSS_ROTARY, "head_dim": 64},
        read_rotary=("truncate",),
    ),
    **FAMILIES,
    **HYBRIDS,
    **GEMMAS,
    **ENCODERS,
}  # fmt: skip
