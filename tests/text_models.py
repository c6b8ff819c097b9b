"""Tiny language models with a tokenizer, as Hugging Face folders and as .gguf files, and a text for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tiny_llama_file
from torch_layers import torch
from torch_models import SIZES, transformers

import qgemm

TEXT = "The theory of the thing: " + " ".join(f"the {word} of {number}" for number, word in enumerate(dir(np)))


def tiny_llama(folder: Path, fmt: str = "f32") -> Path:
    """A .gguf file of the llama of the demo's tests, its matrices in a format."""
    tensors = {
        name: qgemm.quantize(values, fmt) if values.ndim > 1 and fmt != "f32" else values
        for name, values in tiny_llama_file.weights().items()
    }
    qgemm.write(folder / f"llama-{fmt}.gguf", tensors, tiny_llama_file.metadata())
    return folder / f"llama-{fmt}.gguf"


def folder_of(path: Path, folder: Path) -> Path:
    """The Hugging Face folder of a .gguf file that transformers decodes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    model.hf_quantizer = None  # it would refuse to save the decoded weights
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


def mixture(folder: Path, tokenizer: Path) -> Path:
    """A folder of a Qwen3-MoE of random weights, with the tokenizer of another folder.

    Its experts have the default size, since transformers does not read that from a .gguf file.
    """
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    sizes = {**SIZES, "vocab_size": len(tiny_llama_file.VOCABULARY), "max_position_embeddings": 512}
    config: Any = transformers.Qwen3MoeConfig(
        **sizes, head_dim=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768,
        decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3 if parameter.dim() > 1 else 1
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder
