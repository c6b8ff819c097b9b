"""Small models of transformers with random weights, and .gguf files of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch_layers import torch

import qgemm

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: a test asks no server
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra transformers)")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which transformers loads no .gguf file")
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: E402

import qgemm.torch.transformers as adapter  # noqa: E402

VOCABULARY, LAYERS = 96, 2
INDEX = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, Any] = {  # GGUF's architecture -> config class and sizes
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"head_dim": 64}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 256, "sliding_window": 8}),
}
MIX = {"token_embd": "q8_0", "attn_v": "q6_k", "ffn_down": "q6_k", "^output": "q6_k"}  # like q4_k_m's


def random_model(kind: str, tied: bool = False) -> Any:
    """A causal language model with random weights; biases and norms as well."""
    name, more = KINDS[kind]
    config = getattr(transformers, name)(**SIZES, **more, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
            else:
                parameter *= 3
    return model


def name_map(kind: str) -> Any:
    """From a model's names of layers to those of GGUF."""
    (arch,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    return get_tensor_name_map(arch, LAYERS)


def write_gguf(path: Path, model: Any, default: str = "q4_k", **formats: str) -> None:
    """A model as a .gguf file, by way of its Hugging Face folder; formats: of tensors in whose name a word is."""
    folder = path.parent / "folder"
    model.save_pretrained(folder)
    qgemm.convert(folder, path, default, tensor_types=formats, pure=True, force=True)


def load(path: Path, patched: bool = True, **options: Any) -> Any:
    """A model from a file, by the adapter or by transformers alone."""
    with adapter.patch() if patched else nullcontext():
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def logits(model: Any) -> Any:
    """The logits of a model for INDEX."""
    with torch.no_grad():
        return model(INDEX).logits.double()
