"""A Hugging Face folder as a .gguf model that llama.cpp loads: names, order of rows, metadata, tokenizer.

Names go through the gguf package's tensor name map. A tensor without a name there, a missing one, or one whose shape
contradicts the config is refused by name. A folder whose config names no architecture is converted tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFValueType, GGUFWriter, Keys, get_tensor_name_map

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.gguf.layout import ARRAY, NUMBERS, STRING
from qgemm.files.paths import PathLike, path_string, shown, shown_path
from qgemm.formats import FORMATS

from .architecture_record import Architecture, letters
from .architectures import ARCHITECTURES
from .checkpoints.configs import MODEL
from .config_keys import check_config
from .config_rules import check_rules
from .encoder_architectures import pooling_key
from .hf_names import LAYER_NUMBER, LEFT_OUT, NUMBERED, OUTPUT, left_out_notes, rotary_order, spellings
from .hyperparameters import WITH_FACTORS, Config, check_heads, rope_kind
from .keep_rules import keep_rule
from .mixture import LAYER
from .tokenizer import tokenizer_keys
from .weight import Source, Weight, numbers_of, weight_from_numbers
from .weight_views import add_one, reorder_rows, reshaped, stack_matrices

ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
ONE_ROW = ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")  # matrices of one row that llama.cpp stores as vectors
ONE_CHANNEL = ("ssm_conv1d.weight", "shortconv.conv.weight")  # [N, 1, K] that llama.cpp stores as [N, K]
F32 = FORMATS["f32"]
LAYER_0 = "blk.0."
ALONE = -1  # number of a tensor that is not stacked
QKV, PROJECTIONS = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")
BIASED_BY_KEY = {  # keys of configs -> the matrices that have biases where the key is true
    "attention_bias": (*QKV, "attn_output"), "attention_out_bias": ("attn_output",), "qkv_bias": QKV,
    "use_qkv_bias": QKV, "mlp_bias": PROJECTIONS, "bias": ("attn_output", *PROJECTIONS), "lm_head_bias": ("output",),
}  # fmt: skip
PROMISED = (*QKV, "ffn_up", "ffn_down")  # matrices that have them in every architecture with a key for them
WHOLE_NORMS = ("ssm_norm.weight",)  # stored as they are beside norms that are stored minus one


def model_config(folder: str) -> tuple[Config, Architecture] | None:
    """The checked config of a folder and the record of its architecture; None if it names no architecture."""
    config_path = os.path.join(folder, MODEL)
    if not os.path.lexists(config_path):
        return None
    values = json_object(config_path)
    return config_of(shown_path(config_path), values) if values.get("architectures") else None


def config_of(where: str, values: Mapping[str, Any]) -> tuple[Config, Architecture]:
    """The checked config of a document that names an architecture; `where` names it in errors."""
    names = values["architectures"]
    check_config(where, {"architectures": names})
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        rule = f"is not an architecture that becomes a .gguf model ({', '.join(ARCHITECTURES)})"
        rule += "; the .safetensors files in the folder convert under their own names"
        raise CheckpointError(f"{where}: architectures: {shown(names[0])} {rule}")
    check_config(where, values)
    architecture = architecture.variant(values) or architecture
    config = architecture.config(where, values)
    check_rules(config, architecture.rules, architecture.read_rotary)
    check_heads(config)
    return config, architecture


def to_gguf_model(source: Source, path: PathLike, tied: bool) -> Source:
    """The source as a .gguf model if its folder's config names an architecture; otherwise unchanged.

    tied: the token embedding is the output matrix, which the folder lacks, though the config does not say so.

    CheckpointError for an unknown architecture, hyperparameter, tensor or tokenizer.
    """
    folder = path_string(path)
    described = model_config(folder)
    if described is None:
        return source
    config, architecture = described
    model = Model(source, config, architecture, tied)
    weights = model.weights()
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture.kind])
    writer.add_type(GGUFType.MODEL)
    writer.add_name(os.path.basename(os.path.abspath(folder)))
    architecture.keys(config, writer)
    if architecture.pools:
        pooling_key(folder, writer)
    model.write_numbers(writer)
    tokenizer_keys(folder, weights["token_embd.weight"].shape[0], writer, architecture)
    notes = [*left_out_notes(model.left_out), *_rotary_notes(config, architecture)]
    metadata = metadata_of(writer)
    if metadata[Keys.Tokenizer.MODEL] == "none":
        notes.append("the folder has no tokenizer.json and no tokenizer.model, so that the file has no vocabulary")
    return replace(source, weights=weights, metadata=metadata, notes=[*source.notes, *notes])


def _rotary_notes(config: Config, architecture: Architecture) -> list[str]:
    """The keys of yarn that llama.cpp reads for mistral 3 alone, where they change the result."""
    usual = {"beta_fast": 32, "beta_slow": 1}
    rope = config.rope
    if rope_kind(rope) != "yarn" or architecture.kind == MODEL_ARCH.MISTRAL3:
        return []
    changed = [key for key, value in usual.items() if rope.number(key) not in (None, value)]
    return [f"{key} of yarn is {rope.value(key)}; llama.cpp computes with {usual[key]}" for key in changed]


class Model:
    """The tensors of a checkpoint under llama.cpp's names."""

    def __init__(self, source: Source, config: Config, architecture: Architecture, tied: bool) -> None:
        self.source, self.config, self.architecture, self.tied = source, config, architecture, tied
        self.where = shown_path(source.path)
        self.layers = config.need("num_hidden_layers")
        self.numbers: dict[str, dict[int, float]] = {}  # method of GGUFWriter -> layer -> number
        self.left_out = [name for name in source.weights if LEFT_OUT.search(name)]
        self.map = get_tensor_name_map(architecture.kind, 1)  # only layer 0: each layer's names cost 1 ms
        self._mapped = cache(self._map)  # all layers have the same names
        self.further = config.integer("num_nextn_predict_layers", "num_mtp_layers") or 0

    def weights(self) -> dict[str, Weight]:
        """All tensors by their new names: embedding and output first, then layer by layer."""
        if self.layers > (count := len(self.source.weights)):
            raise self.config.refusal("num_hidden_layers", self.layers, f"is more than the {count} tensors")
        by_name: dict[str, dict[int, Weight]] = {}  # GGUF name -> number in the stack -> tensor
        for weight in self.source.weights.values():
            if LEFT_OUT.search(weight.name):
                continue
            if weight.values is None or 0 in weight.shape:
                rule = "is empty" if 0 in weight.shape else "holds integers, where a model has weights"
                raise self.refusal(weight.name, f"{rule}: {weight.type} {list(weight.shape)}")
            if self._predicts_further(weight.name):
                self.left_out.append(weight.name)
                continue
            if self._is_number(weight):
                continue
            if not weight.shape:
                raise self.refusal(weight.name, "has no axes")
            for new, number, part in self.parts(weight):
                experts = by_name.setdefault(new, {})
                if experts.setdefault(number, part) is not part:
                    raise self.refusal(part.name, f"would be {shown(new)}, as another tensor is already")
        if self.config.value("tie_word_embeddings") is True:
            by_name.pop(OUTPUT, None)
        weights = {new: self.filled(new, experts) for new, experts in by_name.items()}
        sizes = self._sizes(weights)
        for name, numbers in self.architecture.unread(self.config, sizes).items():
            weights.setdefault(name, weight_from_numbers(name, numbers))
        self._check_shapes(weights, sizes)
        for name, factors in self._factors().items():
            weights[name] = weight_from_numbers(name, factors)
        return {name: weights[name] for name in sorted(weights, key=_layer)}

    def parts(self, weight: Weight) -> Iterator[tuple[str, int, Weight]]:
        """The tensors of the file into which a tensor is split: the new name, the number in the stack, the weights."""
        for part in self.architecture.split(weight, self.config, self.refusal):
            number = NUMBERED.search(part.name)
            yield self._name(part.name), int(number[2]) if number else ALONE, part

    def _name(self, old: str) -> str:
        merged = NUMBERED.sub(r"\1.", old)
        layer = LAYER_NUMBER.search(merged)
        if layer is None:
            new = self._mapped(merged, False)
        elif int(layer[1]) < self.layers:
            new = self._mapped(f"{merged[: layer.start(1)]}0{merged[layer.end(1) :]}", True)
            new = new and f"blk.{layer[1]}.{new.removeprefix(LAYER_0)}"
        else:
            new = None
        if new is None:
            raise self.refusal(old, f"has no name in a .gguf model of {MODEL_ARCH_NAMES[self.architecture.kind]}")
        return new

    def _map(self, merged: str, in_layer: bool) -> str | None:
        """The new name of a tensor of layer 0, or of one outside the layers; merged: without the expert's number."""
        for end, renamed in self.architecture.renames.items() if in_layer else ():
            if merged.endswith(end):
                return LAYER_0 + renamed
        for name in spellings(merged):
            new: str | None = self.map.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is not None and in_layer == new.startswith(LAYER_0):
                return new
        return None

    def _is_number(self, weight: Weight) -> bool:
        """Whether a tensor is a number that becomes a key; it is read."""
        layer = LAYER_NUMBER.search(weight.name)
        for end, method in self.architecture.numbers.items():
            if weight.name.endswith(end) and layer is not None:
                if weight.size != 1:
                    raise self.refusal(weight.name, f"has shape {weight.shape}, not one number")
                self.numbers.setdefault(method, {})[int(layer[1])] = float(numbers_of(weight)(0, 1)[0])
                return True
        return False

    def write_numbers(self, writer: GGUFWriter) -> None:
        """Write the keys of numbers that the checkpoint has as tensors, one of each layer."""
        for end, method in self.architecture.numbers.items():
            numbers = self.numbers.get(method, {})
            if sorted(numbers) != list(range(self.layers)):
                raise self.refusal(f"*{end}", "is missing in some layers")
            getattr(writer, method)([numbers[layer] for layer in range(self.layers)])

    def _predicts_further(self, name: str) -> bool:
        """Whether a tensor belongs to a layer beyond the last, which predicts the token after the next one."""
        layer = LAYER_NUMBER.search(name)
        return layer is not None and self.layers <= int(layer[1]) < self.layers + self.further

    def filled(self, new: str, experts: Mapping[int, Weight]) -> Weight:
        """A tensor under its new name, in llama.cpp's layout."""
        weights = [experts[number] for number in sorted(experts)]
        weight = weights[0]
        if ALONE not in experts and new.endswith("weight"):
            if sorted(experts) != list(range(len(weights))) or len({part.shape for part in weights}) > 1:
                raise self.refusal(weight.name, f"of {max(experts) + 1} experts {len(experts)} are alike")
            weight = stack_matrices(new, weights)
        if new.endswith(ONE_ROW) and len(weight.shape) == 2 and weight.shape[0] == 1:
            weight = reshaped(weight, weight.shape[1:])
        if new.endswith(ONE_CHANNEL) and len(weight.shape) == 3 and weight.shape[1] == 1:
            weight = reshaped(weight, weight.shape[::2])
        kind = new.split(".")[2] if LAYER.match(new) else ""
        if self.architecture.rotary_pairs and kind in ROTATED:
            heads = self.config.integer(ROTATED[kind]) or self.config.need("num_attention_heads")
            rows = weight.shape[0] // heads
            if rows % 2 or weight.shape[0] % heads:
                raise self.refusal(weight.name, f"has {weight.shape[0]} rows, not {heads} heads of pairs")
            weight = reorder_rows(weight, rotary_order(rows))
        if self.architecture.norms_plus_one and new.endswith("norm.weight") and not new.endswith(WHOLE_NORMS):
            weight = add_one(weight)
        rule = keep_rule(new, len(weight.shape), MODEL_ARCH_NAMES[self.architecture.kind])
        return replace(weight, name=new, original=None, kept_as=F32 if rule else None)

    def _factors(self) -> dict[str, Any]:
        """The tensors that hold factors of rotary scaling."""
        kind = rope_kind(self.config.rope)
        factors = self.architecture.factors.get(kind)
        if factors is None and kind in WITH_FACTORS:
            raise self.config.rope.refusal("rope_type", kind, "is not known of this architecture")
        return {} if factors is None else factors(self.config)

    def _sizes(self, weights: Mapping[str, Weight]) -> Mapping[str, int]:
        """The value of each letter of a shape."""
        tokens = weights["token_embd.weight"].shape[0] if "token_embd.weight" in weights else 0
        vocabulary = self.config.integer("vocab_size")
        if tokens and vocabulary not in (None, tokens):
            raise self.refusal("token_embd.weight", f"has {tokens} rows, vocab_size of the config is {vocabulary}")
        return letters(self.config, tokens)

    def _check_shapes(self, weights: Mapping[str, Weight], sizes: Mapping[str, int]) -> None:
        """Refuse a missing tensor, or one whose shape contradicts the config."""
        tied = self.config.value("tie_word_embeddings") is True
        if OUTPUT in weights and self.tied:
            raise self.refusal(OUTPUT, "is there, so that nothing is tied; --drop lm_head leaves it out")
        if OUTPUT not in weights and not (tied or self.tied):
            rule = "is missing, and tie_word_embeddings of the config is not true"
            raise self.refusal("lm_head.weight", f"{rule}; --tied makes the token embedding the output matrix")
        expected = dict(self.expected(weights))
        for name in weights:
            if name not in expected:
                raise self.refusal(name, "is no tensor of a model with this config")
        for name, shape_letters in expected.items():
            shape = tuple(sizes[letter] for letter in shape_letters.split())
            if name not in weights:
                raise self.refusal(name, "is missing")
            if weights[name].shape != shape:
                raise self.refusal(name, f"has shape {weights[name].shape}, {shape} by the config")
        self._check_biases(weights)

    def _check_biases(self, weights: Mapping[str, Weight]) -> None:
        """Refuse biases that the config does not state, unless they are zeros, and missing ones that it states."""
        rules, values = self.architecture.rules, self.config.values
        stated = {key: values.get(key, rules[key].default) is True for key in BIASED_BY_KEY if key in rules}
        always = {**self.architecture.layer, **self.architecture.dense, **self.architecture.ends}
        for name in (*QKV, "attn_output", *PROJECTIONS, "output"):
            keys = [key for key in stated if name in BIASED_BY_KEY[key]]
            if not keys and f"{name}.bias" in always:
                continue
            denials = [f"{key} of the config is not true" for key in keys if not stated[key]]
            denial = "" if keys and not denials else [*denials, "no key of the config states it"][0]
            for stem in [name] if name == "output" else [f"blk.{layer}.{name}" for layer in range(self.layers)]:
                bias = weights.get(f"{stem}.bias")
                if bias is not None and denial and numbers_of(bias)(0, bias.size).any():
                    raise self.refusal(f"{stem}.bias", f"is there, and {denial}")
                if bias is None and not denial and name in PROMISED and f"{stem}.weight" in weights:
                    raise self.refusal(f"{stem}.bias", f"is missing, and {keys[0]} of the config is true")

    def expected(self, weights: Container[str]) -> Iterator[tuple[str, str]]:
        """The tensors of the model, each with its shape in letters.

        weights: the names that exist; a router or an optional tensor is expected only if it does.
        """
        ends = {**self.architecture.ends, **self.architecture.ends_by_config(self.config)}
        yield from {**ends, **({OUTPUT: "V E"} if OUTPUT in weights else {})}.items()
        for layer in range(self.layers):
            stem = f"blk.{layer}."
            shapes = self.architecture.shapes(self.config, layer, f"{stem}ffn_gate_inp.weight" in weights)
            optional = {**self.architecture.optional, **self.architecture.optional_by_layer(self.config, layer)}
            optional = {name: shape for name, shape in optional.items() if stem + name in weights}
            yield from ((stem + name, shape) for name, shape in {**optional, **shapes}.items())

    def refusal(self, name: str, rule: str) -> CheckpointError:
        """The error for a tensor."""
        return CheckpointError(f"{self.where}: tensor {shown(name)}: {rule}")


def metadata_of(writer: GGUFWriter) -> dict[str, Any]:
    """The metadata that a writer of the gguf package holds, each value in its type."""
    metadata: dict[str, Any] = {}
    for key, (value, kind, sub_type) in ((key, _parts(entry)) for key, entry in writer.kv_data[0].items()):
        if kind == ARRAY:
            element = sub_type or (
                GGUFValueType.UINT8 if isinstance(value, bytes) else GGUFValueType.get_type(value[0])
            )
            metadata[key] = list(value) if element == STRING else np.array([*value], NUMBERS[element])
        else:
            metadata[key] = value if kind == STRING else NUMBERS[kind].type(value)
    return metadata


def _parts(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    return value.value, value.type, value.sub_type


def _layer(name: str) -> int:
    match = LAYER.match(name)
    return int(match[1]) if match else -1
