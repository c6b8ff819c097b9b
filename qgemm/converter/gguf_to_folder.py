"""A .gguf model as a Hugging Face folder: the inverse of hf_folder.py, for the architectures of INVERSES.

The config follows from the file's keys. Then the folder's own conversion is computed: a key or a tensor of the file
that it lacks, or has with another value, is one that the folder cannot express, and is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter
from gguf.constants import Keys

from qgemm.codec.format import Format
from qgemm.errors import CheckpointError, QgemmError
from qgemm.files.paths import shown, shown_path

from .checkpoints.configs import MODEL
from .hf_folder import ROTATED, Model, config_of, metadata_of
from .hf_names import OUTPUT, rotary_order
from .hyperparameters import Config, llama3_factors
from .mixture import LAYER
from .tokenizer_files import tokenizer_files
from .weight import SAFETENSORS, Source, Weight, numbers_of
from .weight_views import map_numbers, reorder_rows

EMBEDDING = "token_embd.weight"
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **MLP}
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA2 = {
    **ATTENTION, **MLP, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
PHI3 = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


class Inverse(NamedTuple):
    """A model class of Hugging Face: its name, its model_type, and its modules by the names of a file's tensors.

    biases: key of the config, "" for none -> tensors whose biases all layers have where the key is true.
    """

    name: str
    model_type: str
    modules: Mapping[str, str]
    biases: Mapping[str, tuple[str, ...]] = {}


INVERSES = {  # general.architecture -> the class; Mistral's files are llama's
    "llama": Inverse("LlamaForCausalLM", "llama", LLAMA, {"attention_bias": PROJECTIONS, "mlp_bias": (*MLP,)}),
    "qwen2": Inverse("Qwen2ForCausalLM", "qwen2", LLAMA, {"": PROJECTIONS[:3]}),
    "qwen3": Inverse("Qwen3ForCausalLM", "qwen3", {**LLAMA, **HEAD_NORMS}),
    "gemma": Inverse("GemmaForCausalLM", "gemma", LLAMA),
    "gemma2": Inverse("Gemma2ForCausalLM", "gemma2", GEMMA2),
    "gemma3": Inverse("Gemma3ForCausalLM", "gemma3_text", {**GEMMA2, **HEAD_NORMS}),
    "phi3": Inverse("Phi3ForCausalLM", "phi3", PHI3),
}
NUMBERS = {  # key of config.json -> key of the file after the architecture
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa", "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
SCALING = {  # key of rope_scaling -> key of the file after the architecture and "rope.scaling."
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "extrapolation_factor": "yarn_ext_factor", "attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}  # fmt: skip
LLAMA3 = tuple(  # the scalings of Llama 3.1 to 3.3; their factors are a tensor of the file
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192} for factor in (8.0, 32.0)
)  # fmt: skip
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
SCALES_BY_SHARE = {"gemma2": 46, "gemma3": 62}  # architecture -> layers of the model that scales by another size
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
        inverse = INVERSES.get(self.architecture)
        if inverse is None:
            rule = f"{shown(self.architecture)} does not become a folder, only {', '.join(INVERSES)}"
            raise CheckpointError(f"{self.where}: general.architecture: {rule}")
        if EMBEDDING not in source.weights:
            raise self._refusal(f"tensor {shown(EMBEDDING)}", "is missing")
        self.inverse = inverse

    def folder(self) -> Source:
        """The source of the folder."""
        document = self._document()
        config, architecture = config_of(f"{self.where}: as a folder: {MODEL}", document)
        plus_one = architecture.norms_plus_one
        weights = {}
        for name, weight in self.source.weights.items():
            if name in (FACTORS, LONG, SHORT):
                continue
            weights[self._name(name)] = replace(
                self._stored(name, weight, config, architecture.rotary_pairs, plus_one),
                name=self._name(name), kept_as=self.fmt,
            )  # fmt: skip
        writer = GGUFWriter(None, MODEL_ARCH_NAMES[architecture.kind])
        architecture.keys(config, writer)
        back = Model(replace(self.source, weights=weights), config, architecture, tied=False).weights()
        self._check(metadata_of(writer), back, config)
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

    def _name(self, name: str) -> str:
        """The name of a tensor in the folder."""
        layer = LAYER.match(name)
        stem, _, end = name[layer.end() if layer else 0 :].lstrip(".").rpartition(".")
        module = (self.inverse.modules if layer else ENDS).get(stem)
        if module is None or end not in ("weight", "bias"):
            raise self._refusal(f"tensor {shown(name)}", f"has no place in a {self.inverse.name}")
        return f"model.layers.{layer[1]}.{module}.{end}" if layer else f"{module}.{end}"

    def _stored(self, name: str, weight: Weight, config: Config, rotary_pairs: bool, plus_one: bool) -> Weight:
        """A tensor in the order of rows and with the numbers of the folder."""
        kind = name.split(".")[2] if LAYER.match(name) else ""
        if rotary_pairs and kind in ROTATED:
            heads = config.integer(ROTATED[kind]) or config.need("num_attention_heads")
            rows = weight.shape[0] // heads
            if rows % 2 or weight.shape[0] % heads:
                raise self._refusal(f"tensor {shown(name)}", f"has {weight.shape[0]} rows, not {heads} heads of pairs")
            return reorder_rows(weight, np.argsort(rotary_order(rows)))
        if plus_one and name.endswith("norm.weight"):
            return map_numbers(weight, lambda numbers: numbers - np.float32(1))
        return weight

    def _document(self) -> dict[str, Any]:
        """The config.json."""
        document: dict[str, Any] = {
            "architectures": [self.inverse.name], "model_type": self.inverse.model_type,
            "vocab_size": self.source.weights[EMBEDDING].shape[0], "dtype": DTYPES[str(self.fmt).lower()],
            "tie_word_embeddings": OUTPUT not in self.source.weights, "rope_theta": 10000.0,
        }  # fmt: skip
        for key, stored in NUMBERS.items():
            if (number := self._number(stored)) is not None:
                document[key] = number
        for token, stored in TOKENS.items():
            number = self.source.metadata.get(stored)
            document[f"{token}_token_id"] = None if number is None else int(number)
        for key, stems in self.inverse.biases.items():
            if key:
                document[key] = f"blk.0.{stems[0]}.bias" in self.source.weights
        if self.architecture in SCALES_BY_SHARE:
            share = document.get("hidden_size", 0) // max(document.get("num_attention_heads", 1), 1)
            by_share = document.get("num_hidden_layers") == SCALES_BY_SHARE[self.architecture]
            document["query_pre_attn_scalar"] = share if by_share else document.get("head_dim", share)
        if self.architecture == "phi3":
            document |= self._phi3(document)
        elif scaling := self._scaling(document):
            document["rope_scaling"] = scaling
        return document

    def _phi3(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of Phi-3: the trained context, the rotated share of a head, the factors of a long context."""
        values: dict[str, Any] = {
            "original_max_position_embeddings": self._number("rope.scaling.original_context_length")
        }
        head = document.get("hidden_size", 0) // max(document.get("num_attention_heads", 1), 1)
        rotated = self._number("rope.dimension_count")
        if rotated is not None and head and rotated != head:
            values["partial_rotary_factor"] = rotated / head
        if not document.get("sliding_window"):
            values["sliding_window"] = None
        if LONG in self.source.weights and SHORT in self.source.weights:
            factors = {key: self._factors(name) for key, name in (("long_factor", LONG), ("short_factor", SHORT))}
            values["rope_scaling"] = {"rope_type": "longrope", "type": "longrope", **factors}
        return values

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
            raise self._refusal(f"tensor {shown(FACTORS)}", "holds no factors of Llama 3.1 to 3.3")
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
        if isinstance(value, np.floating):
            return float(str(value))
        if isinstance(value, np.integer):
            return int(value)
        raise self._refusal(f"key {shown(f'{self.architecture}.{key}')}", "is no number, as the config needs")

    def _check(self, keys: Mapping[str, Any], back: Mapping[str, Weight], config: Config) -> None:
        """Refuse a key or a tensor of the file that the folder's own conversion does not have."""
        heads = config.need("num_attention_heads")
        implied = {  # values that a file without these keys has as well
            "vocab_size": config.need("vocab_size"), "rope.dimension_count": config.head_dim,
            "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
            "attention.head_count_kv": heads, "rope.scaling.type": "none",
        }  # fmt: skip
        values: dict[str, Any] = {f"{self.architecture}.{key}": value for key, value in implied.items()}
        values |= keys
        for key, value in self.source.metadata.items():
            if not key.startswith(f"{self.architecture}."):
                continue
            if key not in values or not np.array_equal(values[key], value):
                rule = f"{shown(str(value))} cannot be expressed by the config of a {self.inverse.name}"
                raise self._refusal(f"key {shown(key)}", rule)
        for name in self._differing(back, config):
            raise self._refusal(f"tensor {shown(name)}", f"is not the one that a {self.inverse.name} would have")

    def _differing(self, back: Mapping[str, Weight], config: Config) -> Iterator[str]:
        """Names of tensors that the file or the folder's class has alone, and of factors that differ."""
        weights = self.source.weights
        layers = range(config.need("num_hidden_layers"))
        stems = [stem for key, stems in self.inverse.biases.items() if not key or config.value(key) for stem in stems]
        biases = {f"blk.{layer}.{stem}.bias" for layer in layers for stem in stems}
        yield from sorted(biases ^ {name for name in weights if name.endswith(".bias")})
        yield from sorted(set(weights) ^ set(back))
        for name in (FACTORS, LONG, SHORT):
            if name in weights:
                stored, own = (numbers_of(tensors[name])(0, tensors[name].size) for tensors in (weights, back))
                if not np.array_equal(stored, own):
                    yield name

    def _refusal(self, subject: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {subject}: {rule}")
