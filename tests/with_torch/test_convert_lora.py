"""Adapters that peft saves become .gguf adapters: base + adapter is the model that peft merges."""

from __future__ import annotations

import dataclasses

import pytest
from lora_folders import adapted
from numpy.testing import assert_allclose
from torch_models import transformers

import qgemm
from qgemm.converter import lora

torch = pytest.importorskip("torch", reason="torch is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed (extra peft)")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "plain": ("Llama", {"target_modules": LINEAR}),
    "rslora": ("Llama", {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {"q_proj": 3}}),
    "patterns": ("Qwen3", {"target_modules": LINEAR, "alpha_pattern": {"q_proj": 7}, "rank_pattern": {"up_proj": 2}}),
    "ends": ("Llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "gpt2": ("GPT2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_base_and_adapter_are_the_merged_model(case, tmp_path):
    family, options = CASES[case]
    torch.manual_seed(0)
    others = {} if family == "GPT2" else {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
    config = getattr(transformers, f"{family}Config")(**SIZES, **others)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "lora")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    qgemm.convert(tmp_path / "lora", tmp_path / "lora.gguf", "f32", base=tmp_path / "base")
    tensors = {}
    for name in ("base", "merged"):
        qgemm.convert(tmp_path / name, tmp_path / f"{name}.gguf", "f32")
        with qgemm.open(tmp_path / f"{name}.gguf", copy=True) as file:
            tensors[name] = {key: tensor.dequantize() for key, tensor in file.items()}
    result = adapted(tensors["base"], tmp_path / "lora.gguf")
    assert sum((result[key] != tensors["base"][key]).any() for key in result) >= 4
    for key, expected in tensors["merged"].items():
        assert_allclose(result[key], expected, rtol=1e-4, atol=1e-4, err_msg=key)


def test_every_key_of_pefts_config_has_a_rule():
    """A key of another version is refused where it has a value; the default of each key is accepted."""
    fields = {field.name: field.default for field in dataclasses.fields(peft.LoraConfig)}
    for key, default in fields.items():
        if key not in lora.WITHOUT_EFFECT:
            assert key in lora.REASONS or default in (None, False, dataclasses.MISSING), key
    assert {key for key in lora.REASONS if key not in fields} == set()
