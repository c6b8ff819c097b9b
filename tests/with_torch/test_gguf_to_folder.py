"""The folder that a .gguf model becomes is a model of transformers with the same logits and the same tensors."""

from __future__ import annotations

import pytest
from torch_logits import assert_same_logits, random_model, torch, transformers

import qgemm

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


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, tmp_path):
    settings = {**SIZES, **CONFIGS[name]}
    model = random_model(getattr(transformers, name)(**settings))
    model.save_pretrained(tmp_path / "m")
    qgemm.convert(tmp_path / "m", tmp_path / "m.gguf", "f32")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "back", "f32", layout="huggingface")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(loaded.eval(), model)
