"""Folders of tiny models with a vision part, and the projectors that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from files import safetensors

import qgemm

# Class -> "config", shapes of the folder's "tensors"; "keys" and, by name, type and shape of the "file" in F16.
CLASSES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "vision_projectors.json").read_text(encoding="utf-8")
)["classes"]
IMAGES = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.75]}
IMAGE_BREAK = 12  # the number of Pixtral's token


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Random tensors of a class's folder in float16."""
    rng = np.random.default_rng(0)
    return {key: rng.standard_normal(shape).astype(np.float16) for key, shape in CLASSES[name]["tensors"].items()}


def folder(
    path: Path, name: str, tensors: dict[str, np.ndarray] | None = None, vision: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """A class's folder; vision, images and config: values that differ."""
    path.mkdir(exist_ok=True)
    document = json.loads(json.dumps(CLASSES[name]["config"]))
    document["vision_config"] |= vision or {}
    (path / "config.json").write_text(json.dumps({**document, **config}))
    (path / "preprocessor_config.json").write_text(json.dumps({**IMAGES, **(images or {})}))
    added = {str(IMAGE_BREAK): {"content": "[IMG_BREAK]", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    safetensors(path / "model.safetensors", tensors_of(name) if tensors is None else tensors)
    return path


class Projector(NamedTuple):
    """A projector: its tensors' values and types by their names, its metadata."""

    values: dict[str, np.ndarray]
    types: dict[str, str]
    metadata: dict[str, Any]


def projector(path: Path, target: Path, kind: str = "f16") -> Projector:
    """The projector that a folder becomes."""
    qgemm.convert(path, target, kind, mmproj=True, force=True)
    with qgemm.open(target, copy=True) as file:
        types = {name: tensor.format.name for name, tensor in file.items()}
        return Projector({name: tensor.dequantize() for name, tensor in file.items()}, types, dict(file.metadata))
