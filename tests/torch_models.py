"""Small models of transformers with random weights, and the .gguf files that llama.cpp's converter would make."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_layers import torch

import qgemm

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: a test asks no server
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra transformers)")
pytest.importorskip("accelerate", reason="accelerate is not installed, without which transformers loads no .gguf file")
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: E402

VOCABULARY, LAYERS = 96, 2
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, Any] = {  # of GGUF
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "sliding_window": 8}),
}
MIX = {"token_embd": "q8_0", "attn_v": "q6_k", "ffn_down": "q6_k", "output": "q6_k"}  # like q4_k_m's


def mixed(name: str) -> str:
    """The format of a matrix in a file of several."""
    return MIX.get(name.removesuffix(".weight").rpartition(".")[2], "q4_k")


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


def write_gguf(path: Path, kind: str, model: Any, formats: Callable[[str], str]) -> None:
    """A model as a .gguf file: names and metadata of llama.cpp, matrices in the formats of their names there."""
    config = model.config
    names, tensors = name_map(kind), {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, leaf = key.rpartition(".")
        name, array = f"{names.get_name(layer)}.{leaf}", value.float().numpy()
        if kind == "llama" and layer.endswith(("q_proj", "k_proj")):
            array = paired(
                array, config.num_attention_heads if layer.endswith("q_proj") else config.num_key_value_heads
            )
        if kind == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        tensors[name] = qgemm.quantize(array, formats(name)) if array.ndim == 2 else array
    qgemm.write(path, tensors, metadata(kind, config))


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K as llama.cpp rotates them: the two of a rotation side by side, not half a head apart."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def metadata(kind: str, config: Any) -> dict[str, Any]:
    """What a .gguf file says of a model."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    sizes: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        "vocab_size": config.vocab_size,
    }
    if kind == "gemma3":
        sizes |= {"attention.key_length": config.head_dim, "attention.sliding_window": config.sliding_window}
    named = {f"{kind}.{key}": value for key, value in sizes.items()}
    return {"general.architecture": kind, "general.name": "tiny", **named}
