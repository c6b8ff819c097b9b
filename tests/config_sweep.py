"""Changes of a config, one value at a time, and their effects on transformers' logits and on the converted file."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from class_folders import TOKENS
from gguf import GGUFWriter
from hf_folders import CONFIG, FOLDERS
from model_configs import CONFIGS, SIZES
from torch_logits import torch, transformers

from qgemm.converter.config_keys import TABLES
from qgemm.converter.encoder_architectures import ENCODERS
from qgemm.converter.hf_folder import config_of, metadata_of
from qgemm.converter.hyperparameters import ROTARY_SETTINGS, rope_kind
from qgemm.errors import CheckpointError

Place = tuple[str, ...]  # the keys of nested objects that lead to a value
Document = dict[str, Any]

TINY_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
LABELS = {
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "auto_map",
    "id2label", "label2id", "vision_config", "audio_config", "text_config",
}  # fmt: skip
NOT_OF_TEXT = {  # parts that no text reaches, ids of tokens that stand for images, and outputs beside the logits
    "multimodal_projector_bias", "spatial_merge_size", "audio_token_id", "image_token_id", "video_token_id",
    "output_attentions", "output_hidden_states", "scale_factor", "downsample_factor", "projector_bias",
    "projector_hidden_act", "projector_hidden_size", "projector_use_layernorm",
}  # fmt: skip
SIZES_OF_TENSORS = {  # A checkpoint does not fit a config in which one changes.
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size", "n_embd", "n_layer",
    "n_inner", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank",
}  # fmt: skip
LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv")
ACTIVATIONS = ("silu", "gelu", "relu")
KINDS_OF_ROPE = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
WORDS = ("x", "group_limited_greedy", "relative_key")  # values of keys that name a method
UNKNOWN = (
    True,
    False,
    0,
    1,
    2,
    8,
    0.5,
    "gelu",
    [0],
    ["sliding_attention", "full_attention"],
)  # for a key whose default is null


def document_of(architecture: str) -> Document:
    """The config.json of a tiny model."""
    values: Document = dict(CONFIGS.get(architecture, {}))
    if not values:
        extra = FOLDERS[architecture.replace("ForConditionalGeneration", "ForCausalLM")][0]
        values = {**SIZES, **{key: value for key, value in CONFIG.items() if key not in SIZES}, **extra}
        if architecture == "Gemma3ForConditionalGeneration":
            values = {"text_config": values, "vision_config": TINY_VISION, "mm_tokens_per_image": 4}
    config = getattr(transformers, architecture).config_class(**values)
    return {**json.loads(config.to_json_string()), "architectures": [architecture]}


def model(architecture: str, document: Document) -> Any:
    """A model of this config; a tensor's numbers depend on its name and shape alone."""
    kind = getattr(transformers, architecture)
    network = kind(kind.config_class.from_dict(copy.deepcopy(document))).eval()
    with torch.no_grad():
        tensors = {**dict(network.named_buffers()), **dict(network.named_parameters())}  # tied ones under one name
        for name in tensors.keys() & network.state_dict().keys():
            if tensors[name].is_floating_point():
                tensors[name].copy_(_numbers(name, tuple(tensors[name].shape)))
    return network


def _numbers(name: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    near_one = len(shape) == 1 and not name.endswith("bias")
    return torch.tensor(near_one + rng.standard_normal(shape, np.float32) * (0.1 if near_one else 0.15))


def logits(architecture: str, network: Any) -> Any:
    """The logits of TOKENS, [tokens, vocabulary]; of an encoder its vectors."""
    if architecture == "Llama4ForConditionalGeneration":  # transformers 5.24 computes none of text without an image
        network = network.language_model
    if architecture in ENCODERS and architecture.endswith("ForMaskedLM"):  # the file has no head
        network = network.base_model
    with torch.no_grad():
        output = network(torch.tensor([TOKENS]))
    return (output.last_hidden_state if architecture in ENCODERS else output.logits)[0].numpy()


def changes(architecture: str, document: Document) -> Iterator[tuple[Place, Any]]:
    """Keys of the config and of its objects, with other values; None leaves the key out."""
    config = getattr(transformers, architecture).config_class.from_dict(copy.deepcopy(document))
    parts: list[tuple[Place, Document, Any]] = [((), document, config)]
    if (text := config.get_text_config()) is not config:
        parts.append((("text_config",), document.get("text_config", {}), text))
    for path, values, part in parts:
        values = {**dict.fromkeys(field.name for field in fields(type(part)) if field.init), **part.to_dict(), **values}
        for name in sorted(values.keys() - LABELS - NOT_OF_TEXT - SIZES_OF_TENSORS):
            yield from _changes_of((*path, name), values[name])


def _changes_of(path: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    rotary = any(name in ROTARY_SETTINGS for name in path)
    if isinstance(value, Mapping):
        yield path, None
        for name in {**value, **(TABLES["rotary"] if rotary else {})}:
            if name not in LAYERS or name in value:
                yield from _changes_of((*path, name), value.get(name))
    else:
        for other in _other_values(path[-1], value, rotary):
            if other != value or type(other) is not type(value):
                yield path, other


def _other_values(name: str, value: Any, rotary: bool) -> tuple[Any, ...]:
    if name in ("rope_type", "type"):
        return (None, *KINDS_OF_ROPE)
    if value is None:
        return (0.5, 2) if rotary else UNKNOWN
    if isinstance(value, bool):
        return None, not value
    if isinstance(value, int):
        return None, 0, 1, 2, 8, value // 2, value * 2
    if isinstance(value, float):
        return None, 0.0, value / 2, value * 2
    if isinstance(value, str):
        return (None, *(ACTIVATIONS if "act" in name else WORDS))
    if value and isinstance(value[0], str):
        return (None, value[::-1], *([kind, *value[1:]] for kind in LAYERS), *([kind] * len(value) for kind in LAYERS))
    return None, value[::-1], [0] * len(value), [1] * len(value)


def changed(document: Document, path: Place, value: Any) -> Document:
    """The document with another value, None to leave it out."""
    new = copy.deepcopy(document)
    part = new
    for name in path[:-1]:
        part = part.setdefault(name, {})
    part.pop(path[-1], None)
    if value is not None:
        part[path[-1]] = value
    return new


def written(document: Document) -> Document | None:
    """The keys and tensors of factors that the converter derives from a config alone; None if it refuses it."""
    try:
        config, architecture = config_of("config.json", document)
        writer = GGUFWriter(None, "llama")
        architecture.keys(config, writer)
        factors = architecture.factors.get(rope_kind(config.rope), lambda config: {})(config)
    except CheckpointError:
        return None
    return {
        name: value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in {**metadata_of(writer), **factors}.items()
    }


def shapes(network: Any) -> set[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a model's tensors."""
    return {(name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()}


def save(network: Any, document: Document, path: Path) -> None:
    """Write the folder of a model with this config.json."""
    network.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(document))
