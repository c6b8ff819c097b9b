"""Folders of LoRA adapters as peft saves them, and the sum of a base model and a .gguf adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from files import safetensors

import qgemm

RANK, ALPHA = 4, 8
Tensors = dict[str, np.ndarray]
PREFIX = "base_model.model."


def matrices(modules: Mapping[str, tuple[int, int]], rank: int = RANK, dtype: type = np.float32) -> Tensors:
    """A [r, K] and B [N, r] of whole numbers for modules with W [N, K]."""
    rng = np.random.default_rng(1)
    tensors = {}
    for module, (n, k) in modules.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = rng.integers(-4, 5, (rank, k)).astype(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = rng.integers(-4, 5, (n, rank)).astype(dtype)
    return tensors


def adapter(path: Path, tensors: Tensors, base: Path | None = None, **config: object) -> Path:
    """The folder of an adapter; config: what its config says otherwise."""
    path.mkdir(exist_ok=True)
    values = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": str(base), "bias": "none",
        "modules_to_save": None, "use_dora": False, **config,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(values))
    safetensors(path / "adapter_model.safetensors", tensors)
    return path


def adapted(base: Mapping[str, np.ndarray], path: Path) -> Tensors:
    """The tensors of a .gguf file with those of a .gguf adapter added as llama.cpp adds them."""
    tensors = dict(base)
    with qgemm.open(path, copy=True) as file:
        alpha = file.metadata["adapter.lora.alpha"]
        for name in (name.removesuffix(".lora_a") for name in file if name.endswith(".lora_a")):
            a, b = (file[f"{name}.lora_{part}"].dequantize().astype(np.float64) for part in "ab")
            product = a @ b.swapaxes(-1, -2) if name == "token_embd.weight" else b @ a
            tensors[name] = tensors[name] + (alpha / b.shape[-1] * product).reshape(tensors[name].shape)
    return tensors
