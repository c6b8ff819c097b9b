"""Tiny models with random weights for tools/engine_tests.py, and the greedy tokens that engines must give for them.

The expected tokens come from transformers in float32, on the weights of the .gguf file, decoded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

PROMPT, TOKENS = [5, 6, 7, 8, 9], 12
# Heads of 128: SGLang 0.5.23 assumes that number for a .gguf file of Qwen3.
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 128, "vocab_size": 320, "eos_token_id": None,
        "bos_token_id": None}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
SHARED = {"shared_expert_intermediate_size": 512, "norm_topk_prob": False}
MIX = {"attn_v": "q6_k", "ffn_down": "q5_k", "ffn_up": "iq4_xs", "attn_k": "q8_0", "token_embd": "q6_k"}
FLAT = {"attn_v": "q8_0", "ffn_down": "q5_1", "token_embd": "q8_0", "attn_output": "q5_0"}
# Model -> GGUF's architecture, class of the config, sizes, default format, formats of other tensors.
MODELS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, str]]] = {
    "llama": ("llama", "LlamaConfig", SIZES, "q4_k", MIX),
    "qwen3": ("qwen3", "Qwen3Config", SIZES, "q4_0", FLAT),
    "halves": ("qwen3", "Qwen3Config", SIZES, "q4_k", {"attn_v": "f16", "ffn_up": "f16"}),
    # Types that the package gguf, which reads the file for engines, lacks.
    "newer": ("llama", "LlamaConfig", SIZES, "q4_k", {"attn_v": "q2_0", "ffn_up": "stq1_0"}),
    "tied": ("qwen3", "Qwen3Config", SIZES | {"tie_word_embeddings": True}, "q4_0", FLAT),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", SIZES | MOE, "q4_k",
                 {"ffn_down_exps": "q6_k", "ffn_up_exps": "iq3_s", "attn_v": "q6_k"}),
    "qwen3moe-equal": ("qwen3moe", "Qwen3MoeConfig", SIZES | MOE, "q4_k", {"ffn_down_exps": "q6_k", "attn_v": "q6_k"}),
    "qwen2moe": ("qwen2moe", "Qwen2MoeConfig", SIZES | MOE | SHARED, "q4_k",
                 {"ffn_down_exps": "q6_k", "attn_v": "q6_k"}),
    "gemma3": ("gemma3", "Gemma3TextConfig", SIZES | {"query_pre_attn_scalar": 128, "sliding_window": 8}, "q4_0", FLAT),
    "gpt2": ("gpt2", "GPT2Config", GPT2, "q5_0", {"ffn_down": "q8_0"}),
}  # fmt: skip


def make(model: str, folder: Path) -> None:
    """Write a model with random weights as folder/hf and folder/model.gguf, an adapter, and the expected tokens."""
    import torch
    import transformers

    import qgemm

    arch, kind, sizes, default, formats = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            else:
                parameter *= 0.1 if arch == "gemma3" and "embed" in name else 3  # Gemma scales its table by 22
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference.save_pretrained(folder / "hf")
    qgemm.convert(folder / "hf", folder / "model.gguf", default, tensor_types=formats, pure=True, force=True)
    decode(reference, arch, folder / "model.gguf")
    expected = {"plain": greedy(reference)}
    if arch in ("llama", "qwen3"):
        adapter(reference, folder / "lora")
        expected["lora"] = greedy(reference)
    (folder / "expected.json").write_text(json.dumps(expected))


def decode(model: Any, arch: str, path: Path) -> None:
    """Give a model of transformers the decoded weights of a .gguf file."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    import qgemm

    (number,) = (key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    with qgemm.open(path) as file, torch.no_grad():

        def decoded(name: str) -> Any:
            return torch.from_numpy(file[name].dequantize().copy())

        for name, parameter in model.named_parameters():
            base, _, kind = name.rpartition(".")
            if name.endswith("experts.gate_up_proj"):
                block = f"blk.{name.split('.')[2]}"
                value = torch.cat([decoded(f"{block}.ffn_{part}_exps.weight") for part in ("gate", "up")], 1)
            elif name.endswith("experts.down_proj"):
                value = decoded(f"blk.{name.split('.')[2]}.ffn_down_exps.weight")
            else:
                value = decoded(f"{names.get_name(base)}.{kind}")
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp interleaves halves of a head
                heads = value.reshape(-1, model.config.head_dim // 2, 2, value.shape[-1])
                value = heads.transpose(1, 2).reshape(value.shape)
            if arch == "gemma3" and "norm" in name:
                value -= 1
            if arch == "gpt2" and ".c_" in name and value.dim() == 2:  # Conv1D holds the transposed matrix
                value = value.T
            parameter.copy_(value.reshape(parameter.shape))


def adapter(model: Any, folder: Path) -> None:
    """Write a LoRA adapter as peft does, and add it to the model's weights."""
    import torch
    from safetensors.torch import save_file

    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    rank, alpha, tensors = 8, 16, {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            n, k = module.weight.shape
            a, b = torch.randn(rank, k) / k**0.5, torch.randn(n, rank) / n**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            with torch.no_grad():
                module.weight += alpha / rank * b @ a
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def greedy(model: Any) -> list[int]:
    """The most probable continuation of the prompt."""
    import torch

    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(PROMPT) :].tolist()
