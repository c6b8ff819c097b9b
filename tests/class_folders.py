"""Folders of tiny checkpoints of the classes in tests/data/model_classes.json, and the files that they become."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from files import safetensors

import qgemm

# Class -> "config" and shapes of "tensors" as transformers saves them; "keys" and shapes of "file" after conversion,
# the "digest" of its tensors in float32, and the "logits" that llama.cpp computes with the file after TOKENS.
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "model_classes.json").read_text(encoding="utf-8")
)


TOKENS = list(range(3, 27))  # the text whose logits llama.cpp and transformers compute


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Random tensors of a class's checkpoint, in float16: matrices near 0, norms and other vectors near 1."""
    rng = np.random.default_rng(0)
    tensors = {}
    for key, shape in CLASSES[name]["tensors"].items():
        near_one = len(shape) == 1 and not key.endswith("bias")
        tensors[key] = (near_one + rng.standard_normal(shape) * (0.1 if near_one else 0.125)).astype(np.float16)
    return tensors


def folder(path: Path, name: str, tensors: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """The folder of a class's checkpoint; config: values that differ, None for a key that is left out."""
    path.mkdir(exist_ok=True)
    values = {key: value for key, value in CLASSES[name]["config"].items() if key not in config}
    values |= {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values))
    safetensors(path / "model.safetensors", tensors_of(name) if tensors is None else tensors)
    return path


def converted(path: Path, target: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the metadata of the float32 file that a folder becomes."""
    qgemm.convert(path, target, "f32", force=True)
    with qgemm.open(target, copy=True) as file:
        return {name: tensor.dequantize() for name, tensor in file.items()}, dict(file.metadata)


def digest(tensors: dict[str, np.ndarray]) -> str:
    """The hash of the tensors of a file, which tells whether `logits` are of this file."""
    sums = sha256()
    for name in sorted(tensors):
        sums.update(name.encode() + np.ascontiguousarray(tensors[name], np.float32).tobytes())
    return sums.hexdigest()


def plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """The keys of the model alone, with values as JSON has them."""
    general = ("general.", "tokenizer.ggml.")
    return {
        key: value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        for key, value in metadata.items()
        if not key.startswith(general) or key in ("general.architecture", "tokenizer.ggml.add_bos_token")
    }
