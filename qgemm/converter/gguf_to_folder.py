"""A .gguf model as a Hugging Face folder: the inverse of hf_folder.py, for the architectures of INVERSES.

Rows return to their places by the conversion itself, which is applied to the numbers of rows. The config follows from
the file's keys. Then the folder's own conversion is computed: a key or a tensor of the file
that it lacks, or has with another value, is one that the folder cannot express, and is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter
from gguf.constants import Keys

from qgemm.codec.format import Format
from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.paths import shown, shown_path
from qgemm.text import names_in_short

from .architecture_record import Architecture
from .architectures import ARCHITECTURES
from .checkpoints.configs import MODEL
from .config_keys import check_config
from .folder_classes import INVERSES, NUMBERS, Inverse
from .folder_tensors import Part, Restorer
from .hf_folder import Model, config_of, metadata_of
from .hf_names import OUTPUT
from .hyperparameters import Config, llama3_factors
from .mixture import LAYER
from .tokenizer_files import tokenizer_files
from .weight import SAFETENSORS, Source, Weight, numbers_of

EMBEDDING = "token_embd.weight"
SCALING = {  # key of rope_scaling -> key of the file after the architecture and "rope.scaling."
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "extrapolation_factor": "yarn_ext_factor", "attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow", "mscale_all_dim": "yarn_log_multiplier",
}  # fmt: skip
LLAMA3 = tuple(  # the scalings of Llama 3.1 to 3.3 and of Llama 4; their factors are a tensor of the file
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
     "original_max_position_embeddings": 8192} for factor, high in ((8.0, 4.0), (32.0, 4.0), (16.0, 1.0))
)  # fmt: skip
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FURTHER, BLOCKS = "nextn_predict_layers", "block_count"  # keys after the architecture
WITH_TRAINED = ("phi3", "phimoe")  # architectures whose config has the trained context besides rope_scaling
TOKENS = {"bos": Keys.Tokenizer.BOS_ID, "eos": Keys.Tokenizer.EOS_ID, "pad": Keys.Tokenizer.PAD_ID}
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def to_folder(source: Source, fmt: Format) -> Source:
    """The tensors of a .gguf model under the names of Hugging Face in one format, and its config and chat template.

    CheckpointError for an architecture, a key or a tensor that the folder could not express.
    """
    return _File(source, fmt).folder()


class _File:
    """A .gguf model that becomes a folder."""

    def __init__(self, source: Source, fmt: Format) -> None:
        self.source, self.fmt = source, fmt
        self.where = shown_path(source.path)
        if not source.is_gguf:
            raise QgemmError(f"{self.where}: is no .gguf file: --layout huggingface is for one that becomes a folder")
        self.architecture = str(source.metadata.get(Keys.General.ARCHITECTURE, ""))
        if self.architecture not in INVERSES:
            rule = f"{shown(self.architecture)} does not become a folder, only {', '.join(INVERSES)}"
            raise CheckpointError(f"{self.where}: general.architecture: {rule}")
        if EMBEDDING not in source.weights:
            raise self._refusal(f"tensor {shown(EMBEDDING)}", "is missing")
        self.source = self._without_further_layers()
        self.inverse = self._inverse()

    def _without_further_layers(self) -> Source:
        """The source without the last layers where they predict the token after the next one: transformers has none."""
        count, blocks = self._number(FURTHER), self._number(BLOCKS)
        if not count or blocks is None or not 0 < count < blocks:
            return self.source
        weights = self.source.weights
        dropped = [name for name in weights if (layer := LAYER.match(name)) and int(layer[1]) >= blocks - count]
        key, metadata = f"{self.architecture}.{BLOCKS}", dict(self.source.metadata)
        del metadata[f"{self.architecture}.{FURTHER}"]
        metadata[key] = metadata[key] - metadata[key].dtype.type(count)
        note = f"left out, since they predict further tokens: {names_in_short(dropped)}"
        weights = {name: weight for name, weight in weights.items() if name not in set(dropped)}
        return replace(self.source, weights=weights, metadata=metadata, notes=[*self.source.notes, note])

    def _inverse(self) -> Inverse:
        """The class of the architecture whose marker the file has."""
        stems = {part for name in self.source.weights for part in name.split(".")}
        for inverse in INVERSES[self.architecture]:
            number = self.source.metadata.get(f"{self.architecture}.{inverse.marker}")
            if not inverse.marker or inverse.marker in stems or number:
                return inverse
        raise AssertionError(f"{self.architecture} has no class without a marker")

    def folder(self) -> Source:
        """The source of the folder."""
        document = self._document()
        config, architecture = config_of(f"{self.where}: as a folder: {MODEL}", document)
        weights = self._weights(config, architecture)
        writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture.kind])
        architecture.keys(config, writer)
        model = Model(replace(self.source, weights=weights), config, architecture, tied=False)
        self._check(metadata_of(writer), model, config)
        files = {MODEL: (json.dumps(document, indent=2) + "\n").encode()}
        template = self.source.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE)
        if isinstance(template, str):
            files["chat_template.jinja"] = template.encode("utf-8", "surrogateescape")
        tokenizer = tokenizer_files(self.source.metadata)
        files |= tokenizer.files
        metadata = {f"{SAFETENSORS}format": "pt"}
        return replace(
            self.source, weights=weights, metadata=metadata, is_gguf=False, beside=files,
            notes=[*self.source.notes, tokenizer.note],
        )  # fmt: skip

    def _weights(self, config: Config, architecture: Architecture) -> dict[str, Weight]:
        """The tensors of the folder."""
        parts: dict[str, list[Part]] = {}  # name in the folder -> its parts in the file
        for name, weight in self.source.weights.items():
            if name not in (FACTORS, LONG, SHORT):
                part = self._part(name, weight)
                parts.setdefault(part.target, []).append(part)
        model = Model(self.source, config, architecture, tied=False)
        restored = Restorer(model, self.inverse)
        weights = [weight for target in parts.values() for weight in restored.weights(target)]
        return {weight.name: replace(weight, kept_as=self.fmt) for weight in weights}

    def _part(self, name: str, weight: Weight) -> Part:
        """A tensor of the file with its name in the folder."""
        layer = LAYER.match(name)
        rest = name[layer.end() if layer else 0 :].lstrip(".")
        stem, _, end = rest.rpartition(".")
        modules = self.inverse.modules if layer else self.inverse.ends
        module = modules.get(stem)
        target = modules.get(rest) or (f"{module}.{end}" if module and end in ("weight", "bias") else None)
        if target is None:
            raise self._refusal(f"tensor {shown(name)}", f"has no place in a {self.inverse.name}")
        return Part(f"{self.inverse.layers}.{layer[1]}.{target}" if layer else target, stem, end, weight)

    def _document(self) -> dict[str, Any]:
        """The config.json."""
        document: dict[str, Any] = {
            "architectures": [self.inverse.name], "model_type": self.inverse.model_type,
            "vocab_size": self.source.weights[EMBEDDING].shape[0], "dtype": DTYPES[str(self.fmt).lower()],
            "tie_word_embeddings": OUTPUT not in self.source.weights, "rope_theta": 10000.0,
        }  # fmt: skip
        document |= self.inverse.values
        for key, stored in NUMBERS.items():
            if (number := self._number(stored)) is not None:
                document[key] = number
        for token, stored in TOKENS.items():
            number = self.source.metadata.get(stored)
            document[f"{token}_token_id"] = None if number is None else int(number)
        for (key, value), names in self.inverse.optional.items():
            document.setdefault(key, (f"blk.0.{names[0]}" in self.source.weights) == value)
        check_config(f"{self.where}: as a folder: {MODEL}", document)  # before sizes of arrays depend on it
        if self.architecture in WITH_TRAINED:
            document |= self._long_context()
        elif scaling := self._scaling(document):
            document["rope_scaling"] = scaling
        if "head_dim" in ARCHITECTURES[self.inverse.name].defaults:
            document.setdefault("head_dim", _head_dim(document))
        document |= self._rotated(document)
        self.inverse.finish(document)
        for key, name in self.inverse.names.items():
            if key in document:
                value = document.pop(key)
                document |= {name: value} if name else {}
        return document

    def _rotated(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The rotated dimensions of a head: their share, or their number where heads have other parts."""
        rotated = self._number("rope.dimension_count")
        if rotated is None:
            return {}
        if "kv_lora_rank" in document:
            return {"rope.dimension_count": rotated}
        head = document.get("head_dim", _head_dim(document))
        partial = "partial_rotary_factor" in ARCHITECTURES[self.inverse.name].read_rotary or rotated != head
        return {"partial_rotary_factor": rotated / head} if partial and head else {}

    def _long_context(self) -> dict[str, Any]:
        """The trained context of a model with factors for a long one, and the factors."""
        trained = {"original_max_position_embeddings": self._number("rope.scaling.original_context_length")}
        if not {LONG, SHORT} <= set(self.source.weights):
            return trained
        factors = {key: self._factors(name) for key, name in (("long_factor", LONG), ("short_factor", SHORT))}
        scaling: dict[str, Any] = {"rope_type": "longrope", "type": "longrope", **factors}
        if self.architecture == "phimoe":
            scale = self._number("rope.scaling.attn_factor")
            scaling |= {**trained, "short_mscale": scale, "long_mscale": scale}
        return {**trained, "rope_scaling": scaling}

    def _factors(self, name: str) -> list[float]:
        weight = self.source.weights[name]
        return [float(str(number)) for number in numbers_of(weight)(0, weight.size)]

    def _scaling(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The scaling of rotary embeddings, empty without one."""
        if FACTORS in self.source.weights:
            weight = self.source.weights[FACTORS]
            stored = numbers_of(weight)(0, weight.size)
            for scaling in LLAMA3:
                config = Config(self.where, {**document, "rope_scaling": scaling})
                if np.array_equal(llama3_factors(config)[FACTORS], stored):
                    return dict(scaling)
            raise self._refusal(f"tensor {shown(FACTORS)}", "holds no factors of Llama 3.1 to 3.3 or 4")
        kind = self.source.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return {}
        numbers = {key: self._number(f"rope.scaling.{stored}") for key, stored in SCALING.items()}
        return {"rope_type": str(kind), **{key: number for key, number in numbers.items() if number is not None}}

    def _number(self, key: str) -> int | float | None:
        """The value of a key of the architecture: the shortest decimal number that float32 rounds to it."""
        value = self.source.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if isinstance(value, np.floating):
            return float(str(value))
        if isinstance(value, np.integer):
            return int(value)
        raise self._refusal(f"key {shown(f'{self.architecture}.{key}')}", "is no number, as the config needs")

    def _check(self, keys: Mapping[str, Any], model: Model, config: Config) -> None:
        """Refuse a key or a tensor of the file that the folder's own conversion does not have."""
        heads = config.need("num_attention_heads")
        implied = {  # values that a file without these keys has as well
            "vocab_size": config.need("vocab_size"), "rope.dimension_count": config.head_dim,
            "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
            "attention.head_count_kv": heads, "rope.scaling.type": "none", "expert_group_count": 1,
            "expert_group_used_count": 1,
            "attention.layer_norm_rms_epsilon": keys.get(f"{self.architecture}.attention.layer_norm_epsilon"),
        }  # fmt: skip
        values: dict[str, Any] = {f"{self.architecture}.{key}": value for key, value in implied.items()}
        values |= keys
        for key, value in self.source.metadata.items():
            if not key.startswith(f"{self.architecture}."):
                continue
            if key not in values or not np.array_equal(values[key], value):
                rule = f"{shown(str(value))} cannot be expressed by the config of a {self.inverse.name}"
                raise self._refusal(f"key {shown(key)}", rule)
        for name in self._differing(model, config):
            raise self._refusal(f"tensor {shown(name)}", f"is not the one that a {self.inverse.name} would have")

    def _differing(self, model: Model, config: Config) -> Iterator[str]:
        """Names of tensors that the file or the folder's class has alone, and of factors that differ."""
        weights, back = self.source.weights, model.weights()
        layers = range(config.need("num_hidden_layers"))
        routers = {name for name in weights if name.endswith("ffn_gate_inp.weight")}
        needed = {name for name, _ in model.expected(routers)} | {OUTPUT, FACTORS, LONG, SHORT}
        optional = {
            f"blk.{layer}.{name}"
            for (key, value), names in self.inverse.optional.items()
            for layer in layers
            for name in names
            if config.value(key) is value
        }
        yield from sorted({name for name in weights if name not in needed} ^ (optional - needed))
        yield from sorted(set(weights) ^ set(back))
        for name in (FACTORS, LONG, SHORT):
            if name in weights:
                stored, own = (numbers_of(tensors[name])(0, tensors[name].size) for tensors in (weights, back))
                if not np.array_equal(stored, own):
                    yield name

    def _refusal(self, subject: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {subject}: {rule}")


def _head_dim(document: Mapping[str, Any]) -> int:
    """The size of a head of a config that does not have it."""
    size: int = document.get("hidden_size", 0) // max(document.get("num_attention_heads", 1), 1)
    return size
