"""A Hugging Face folder as a .gguf model that llama.cpp loads: names, order of rows, metadata, tokenizer.

Names go through the gguf package's map of names; what has none, is missing, or has another shape than the config says
is refused by its name. Without a config, or one that names no architecture, a folder is tensors and stays so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFType, GGUFValueType, GGUFWriter, get_tensor_name_map

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.gguf.layout import ARRAY, NUMBERS, STRING
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.formats import FORMATS

from .architectures import ARCHITECTURES, ENDS, Architecture, letters
from .checkpoints.configs import MODEL
from .hf_names import ELSEWHERE, EXPERT, OUTPUT, rotary_order, spellings
from .hyperparameters import Config, rope_kind
from .mixture import LAYER
from .rules import keeps
from .tokenizer import tokenizer_keys
from .weight import Source, Weight, of_numbers
from .weight_views import in_order, plus_one, stacked

ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
F32 = FORMATS["f32"]


def as_model(source: Source, path: PathLike) -> Source:
    """The source as a .gguf model, if its folder's config names an architecture; as it is otherwise.

    CheckpointError for an architecture, a hyperparameter, a tensor or a tokenizer that is not known.
    """
    folder = path_string(path)
    config_path = os.path.join(folder, MODEL)
    if not os.path.exists(config_path):
        return source
    values = json_object(config_path)
    names = values.get("architectures")
    if not isinstance(names, list) or not names:
        return source
    where = shown_path(config_path)
    architecture = ARCHITECTURES.get(str(names[0]))
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        what = f"{where}: {shown(str(names[0]))} is not an architecture that becomes a .gguf model ({known})"
        raise CheckpointError(f"{what}; the .safetensors files in it convert under their own names")
    text = values.get("text_config")
    config = Config(where, {**architecture.defaults, **values, **(text if isinstance(text, dict) else {})})
    model = _Model(source, config, architecture)
    weights = model.weights()
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture.kind])
    writer.add_type(GGUFType.MODEL)
    writer.add_name(os.path.basename(os.path.abspath(folder)))
    architecture.keys(config, writer)
    tokenizer_keys(folder, weights["token_embd.weight"].shape[0], writer, architecture.space)
    return replace(source, weights=weights, metadata=values_of(writer))


class _Model:
    """The tensors of a checkpoint under llama.cpp's names."""

    def __init__(self, source: Source, config: Config, architecture: Architecture) -> None:
        self.source, self.config, self.architecture = source, config, architecture
        self.where = shown_path(source.path)
        self.layers = config.need("num_hidden_layers")
        if self.layers > len(source.weights):
            raise config.refusal("num_hidden_layers", self.layers, f"is more than the {len(source.weights)} tensors")
        self.map = get_tensor_name_map(architecture.kind, self.layers)

    def weights(self) -> dict[str, Weight]:
        """All tensors by their new names: the ends of the model, then layer by layer."""
        found: dict[str, dict[int, Weight]] = {}  # then by number of the expert
        for weight in self.source.weights.values():
            if ELSEWHERE.search(weight.name):
                continue
            for part in self.architecture.split(weight):
                new = self._name(part.name)
                number = EXPERT.search(part.name)
                experts = found.setdefault(new, {})
                if experts.setdefault(int(number[1]) if number else 0, part) is not part:
                    raise self._refusal(part.name, f"would be {shown(new)}, as another tensor is already")
        if self.config.given("tie_word_embeddings") is True:
            found.pop(OUTPUT, None)
        weights = {new: self._filled(new, experts) for new, experts in found.items()}
        for name, factors in self._factors().items():
            weights[name] = of_numbers(name, factors)
        self._check_shapes(weights)
        return {name: weights[name] for name in sorted(weights, key=_layer)}

    def _name(self, old: str) -> str:
        for name in spellings(old):
            new: str | None = self.map.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is not None:
                return new
        raise self._refusal(old, f"has no name in a .gguf model of {MODEL_ARCH_NAMES[self.architecture.kind]}")

    def _filled(self, new: str, experts: Mapping[int, Weight]) -> Weight:
        """A tensor under its new name, in llama.cpp's layout."""
        weights = [experts[number] for number in sorted(experts)]
        weight = weights[0]
        if "_exps." in new and len(weight.shape) < 3 and new.endswith("weight"):
            if sorted(experts) != list(range(len(weights))) or len({each.shape for each in weights}) > 1:
                raise self._refusal(weight.name, f"of {max(experts) + 1} experts {len(experts)} are alike")
            weight = stacked(new, weights)
        kind = new.split(".")[2] if LAYER.match(new) else ""
        if self.architecture.rotary_pairs and kind in ROTATED:
            heads = self.config.integer(ROTATED[kind]) or self.config.need("num_attention_heads")
            rows = weight.shape[0] // heads
            if rows % 2 or weight.shape[0] % heads:
                raise self._refusal(weight.name, f"has {weight.shape[0]} rows, not {heads} heads of pairs")
            weight = in_order(weight, rotary_order(rows))
        if self.architecture.norms_plus_one and new.endswith("norm.weight"):
            weight = plus_one(weight)
        kept = keeps(new, len(weight.shape), MODEL_ARCH_NAMES[self.architecture.kind])
        return replace(weight, name=new, original=None, kept_as=F32 if kept else None)

    def _factors(self) -> dict[str, Any]:
        """What the scaling of rotary embeddings adds to the tensors."""
        kind = rope_kind(self.config.rope)
        factors = self.architecture.factors.get(kind)
        if factors is None and kind in ("llama3", "longrope"):
            raise self.config.rope.refusal("rope_type", kind, "is not known of this architecture")
        return {} if factors is None else factors(self.config)

    def _check_shapes(self, weights: Mapping[str, Weight]) -> None:
        """Refuse a tensor that is missing, or of another shape than the config says."""
        tokens = weights["token_embd.weight"].shape[0] if "token_embd.weight" in weights else 0
        sizes = letters(self.config, tokens)
        wanted = {**ENDS, **({OUTPUT: "V E"} if OUTPUT in weights else {})}
        for layer in range(self.layers):
            stem = f"blk.{layer}."
            shapes = self.architecture.shapes(experts=f"{stem}ffn_gate_inp.weight" in weights)
            wanted |= {stem + name: shape for name, shape in shapes.items()}
        for name, letters_of in wanted.items():
            shape = tuple(sizes[letter] for letter in letters_of.split())
            if name not in weights:
                raise self._refusal(name, "is missing")
            if weights[name].shape != shape:
                raise self._refusal(name, f"has shape {weights[name].shape}, {shape} by the config")

    def _refusal(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tensor {shown(name)}: {rule}")


def values_of(writer: GGUFWriter) -> dict[str, Any]:
    """The keys that a writer of the gguf package was given, each of its type."""
    found: dict[str, Any] = {}
    for key, (value, kind, sub_type) in ((key, _parts(each)) for key, each in writer.kv_data[0].items()):
        if kind == ARRAY:
            element = GGUFValueType.get_type(value[0]) if sub_type is None else sub_type
            found[key] = list(value) if element == STRING else np.array(value, NUMBERS[element])
        else:
            found[key] = value if kind == STRING else NUMBERS[kind].type(value)
    return found


def _parts(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    return value.value, value.type, value.sub_type


def _layer(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else -1
