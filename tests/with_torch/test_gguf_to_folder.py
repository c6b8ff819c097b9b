"""The folder that a .gguf model becomes is a model of transformers with the same logits and the same tensors."""

from __future__ import annotations

import pytest
from model_configs import CONFIGS as MODEL_CONFIGS
from model_configs import EXPERTS
from torch_logits import assert_same_logits, random_model, torch, transformers

import qgemm
from qgemm.converter.folder_classes import INVERSES

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "MistralConfig": {"sliding_window": None},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 32},
    "Gemma2Config": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    "GemmaConfig": {"head_dim": 16},
    "Phi3Config": {"sliding_window": None},
    "LlamaConfig": {
        "attention_bias": True, "head_dim": 32, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Gemma3TextConfig": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
}  # fmt: skip


MIXTURES = {
    "MixtralForCausalLM": {"num_local_experts": 4}, "Qwen3MoeForCausalLM": {**EXPERTS, "norm_topk_prob": True},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
    "GraniteForCausalLM": {"attention_multiplier": 0.125, "logits_scaling": 4.0, "attention_bias": True},
    "Olmo2ForCausalLM": {}, "SeedOssForCausalLM": {"head_dim": 16},
}  # fmt: skip
VARIANTS = {
    "FalconForCausalLM": {"new_decoder_architecture": False, "multi_query": True},
    "StableLmForCausalLM": {"use_parallel_residual": True, "use_qkv_bias": False},
    "GlmForCausalLM": {"attention_bias": False}, "Glm4MoeForCausalLM": {"use_qk_norm": False, "attention_bias": False},
    "GPT2LMHeadModel": {"n_inner": 96, "tie_word_embeddings": False}, "OlmoForCausalLM": {"clip_qkv": None},
    "DeepseekV2ForCausalLM": {"q_lora_rank": 48, "num_hidden_layers": 2, "first_k_dense_replace": 1},
    "CohereForCausalLM": {"logit_scale": 0.5}, "Olmo3ForCausalLM": {"sliding_window": 8},
}  # fmt: skip
CLASSES = [inverse.name for classes in INVERSES.values() for inverse in classes]
SETTINGS = [
    *((getattr(transformers, name), {**SIZES, **values}) for name, values in CONFIGS.items()),
    *((getattr(transformers, name).config_class, {**SIZES, **values}) for name, values in MIXTURES.items()),
    *((getattr(transformers, name).config_class, values) for name, values in MODEL_CONFIGS.items() if name in CLASSES),
    *((getattr(transformers, name).config_class, {**MODEL_CONFIGS[name], **values})
      for name, values in VARIANTS.items()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_logits(kind, settings, tmp_path):
    model = random_model(kind(**settings))
    model.save_pretrained(tmp_path / "m")
    qgemm.convert(tmp_path / "m", tmp_path / "m.gguf", "f32")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f32", layout="huggingface")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(loaded.eval(), model)
