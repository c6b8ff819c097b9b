"""Tiny folders as Hugging Face has them, one for each architecture: config, safetensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from files import safetensors

V, E, F, H, G, D, X, M, LAYERS = 40, 64, 96, 4, 2, 16, 3, 32, 2
ENDS = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,), "lm_head.weight": (V, E)}
ATTENTION = {
    "self_attn.q_proj.weight": (H * D, E), "self_attn.k_proj.weight": (G * D, E),
    "self_attn.v_proj.weight": (G * D, E), "self_attn.o_proj.weight": (E, H * D),
}  # fmt: skip
BIASES = {"self_attn.q_proj.bias": (H * D,), "self_attn.k_proj.bias": (G * D,), "self_attn.v_proj.bias": (G * D,)}
HEAD_NORMS = {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
ROW_NORMS = {"self_attn.q_norm.weight": (H * D,), "self_attn.k_norm.weight": (G * D,)}
NORMS = {"input_layernorm.weight": (E,), "post_attention_layernorm.weight": (E,)}
MLP = {"mlp.gate_proj.weight": (F, E), "mlp.up_proj.weight": (F, E), "mlp.down_proj.weight": (E, F)}
EXPERTS = {"mlp.gate.weight": (X, E)} | {
    f"mlp.experts.{i}.{part}_proj.weight": (E, M) if part == "down" else (M, E)
    for i in range(X)
    for part in ("gate", "up", "down")
}
MIXTRAL = {"block_sparse_moe.gate.weight": (X, E)} | {
    f"block_sparse_moe.experts.{i}.{part}.weight": (E, F) if part == "w2" else (F, E)
    for i in range(X)
    for part in ("w1", "w2", "w3")
}
PHI3 = {
    "self_attn.qkv_proj.weight": ((H + 2 * G) * D, E), "self_attn.o_proj.weight": (E, H * D),
    "mlp.gate_up_proj.weight": (2 * F, E), "mlp.down_proj.weight": (E, F),
}  # fmt: skip
GEMMA3 = {"pre_feedforward_layernorm.weight": (E,), "post_feedforward_layernorm.weight": (E,)}
GPT_OSS = {
    "self_attn.o_proj.bias": (E,), "self_attn.sinks": (H,), "mlp.router.weight": (X, E), "mlp.router.bias": (X,),
    "mlp.experts.gate_up_proj": (X, E, 2 * F), "mlp.experts.gate_up_proj_bias": (X, 2 * F),
    "mlp.experts.down_proj": (X, F, E), "mlp.experts.down_proj_bias": (X, E),
}  # fmt: skip

CONFIG = {
    "vocab_size": V, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": H,
    "num_key_value_heads": G, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
MOE = {"num_experts": X, "num_experts_per_tok": 2, "moe_intermediate_size": M, "norm_topk_prob": True}
OSS = {"num_local_experts": X, "num_experts_per_tok": 2, "sliding_window": 128, "head_dim": D}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 24.0, "beta_slow": 1.5,
    "attention_factor": 0.75, "extrapolation_factor": 0.5,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Architecture -> what its config says besides, the tensors of a layer.
FOLDERS = {
    "LlamaForCausalLM": ({"rope_scaling": LLAMA3}, {**ATTENTION, **NORMS, **MLP}),
    "MistralForCausalLM": ({"head_dim": D}, {**ATTENTION, **NORMS, **MLP}),
    "MixtralForCausalLM": ({"num_local_experts": X, "num_experts_per_tok": 2}, {**ATTENTION, **NORMS, **MIXTRAL}),
    "Qwen2ForCausalLM": ({}, {**ATTENTION, **BIASES, **NORMS, **MLP}),
    "Qwen3ForCausalLM": ({"head_dim": D}, {**ATTENTION, **HEAD_NORMS, **NORMS, **MLP}),
    "Qwen3MoeForCausalLM": ({"head_dim": D, **MOE}, {**ATTENTION, **HEAD_NORMS, **NORMS, **EXPERTS}),
    "Gemma3ForCausalLM": (
        {"head_dim": D, "query_pre_attn_scalar": D, "sliding_window": 64, "rope_local_base_freq": 5000.0},
        {**ATTENTION, **HEAD_NORMS, **NORMS, **GEMMA3, **MLP},
    ),
    "GemmaForCausalLM": ({"head_dim": D}, {**ATTENTION, **NORMS, **MLP}),
    "Gemma2ForCausalLM": (
        {"head_dim": D, "query_pre_attn_scalar": D, "sliding_window": 64, "final_logit_softcapping": 20.0},
        {**ATTENTION, **NORMS, **GEMMA3, **MLP},
    ),
    "GraniteForCausalLM": (
        {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
        {**ATTENTION, **NORMS, **MLP},
    ),
    "Olmo2ForCausalLM": (
        {},
        {**ATTENTION, **ROW_NORMS, "post_attention_layernorm.weight": (E,), "post_feedforward_layernorm.weight": (E,),
         **MLP},
    ),
    "OlmoeForCausalLM": (
        {"num_experts": X, "num_experts_per_tok": 2, "intermediate_size": M},
        {**ATTENTION, **ROW_NORMS, **NORMS, **EXPERTS},
    ),
    "SeedOssForCausalLM": ({"head_dim": D}, {**ATTENTION, **BIASES, **NORMS, **MLP}),
    "Phi3ForCausalLM": (
        {
            "original_max_position_embeddings": 128, "sliding_window": 64,
            "rope_scaling": {"type": "longrope", "long_factor": [2.0] * (D // 2), "short_factor": [1.0] * (D // 2)},
        },
        {**PHI3, **NORMS},
    ),
    "GptOssForCausalLM": (
        {**OSS, "rope_scaling": YARN},
        {**ATTENTION, **BIASES, **NORMS, **GPT_OSS},
    ),
}  # fmt: skip


def tensors_of(architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a folder, in float16."""
    layer = FOLDERS[architecture][1]
    shapes = {**ENDS, **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}}
    if architecture.startswith("Gemma"):
        del shapes["lm_head.weight"]
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def folder(path: Path, architecture: str, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """A folder without a tokenizer; config: what its config says otherwise, None to leave it out."""
    path.mkdir(exist_ok=True)
    config_json = {"architectures": [architecture], **CONFIG, **FOLDERS[architecture][0], **config}
    (path / "config.json").write_text(
        json.dumps({key: value for key, value in config_json.items() if value is not None})
    )
    safetensors(path / "model.safetensors", tensors_of(architecture) if tensors is None else tensors)
    return path
