"""Records of encoders, whose result is a vector of each token: Bert, XLM-RoBERTa, ModernBERT."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, RopeScalingType

from qgemm.errors import CheckpointError
from qgemm.files.documents import json_object
from qgemm.files.paths import shown, shown_path

from .architecture_record import Architecture, Shapes, with_biases
from .config_rules import FULL, GELU, OFF, WINDOW, Rule, Rules, decided_elsewhere, only
from .fused_weights import Refusal, renamed_to
from .hyperparameters import Config, common_keys
from .weight import Weight
from .weight_views import reorder_rows

LAYER: Shapes = with_biases({
    "attn_q.weight": "E E", "attn_k.weight": "E E", "attn_v.weight": "E E", "attn_output.weight": "E E",
    "attn_output_norm.weight": "E", "ffn_up.weight": "F E", "ffn_down.weight": "E F", "layer_output_norm.weight": "E",
})  # fmt: skip
ENDS: Shapes = {
    "token_embd.weight": "V E", "position_embd.weight": "P E", "token_types.weight": "T E",
    **with_biases({"token_embd_norm.weight": "E"}),
}  # fmt: skip
RULES: Rules = {
    "hidden_act": GELU._replace(default="gelu"), "is_decoder": OFF, "add_cross_attention": OFF,
    "position_embedding_type": only("absolute", None),
}  # fmt: skip
MODERN_LAYER: Shapes = {
    "attn_qkv.weight": "QKV E", "attn_output.weight": "E E", "ffn_norm.weight": "E", "ffn_up.weight": "2F E",
    "ffn_down.weight": "E F",
}  # fmt: skip
MODERN_ENDS: Shapes = {"token_embd.weight": "V E", "token_embd_norm.weight": "E", "output_norm.weight": "E"}


def period(config: Config) -> int:
    """The layers from one with full attention, the first, to the next."""
    kinds = config.value("layer_types")
    if kinds:
        return next((layer for layer, kind in enumerate(kinds) if layer and kind == FULL), len(kinds))
    return config.integer("global_attn_every_n_layers") or 3


def _full_first(value: Any, config: Config) -> bool:
    layers = range(config.need("num_hidden_layers"))
    return value is None or value == [WINDOW if layer % period(config) else FULL for layer in layers]


MODERN_RULES: Rules = {
    "hidden_activation": GELU._replace(default="gelu"), "attention_bias": OFF, "mlp_bias": OFF, "norm_bias": OFF,
    "layer_types": Rule(None, _full_first, "have full attention elsewhere than in the first layer of each period"),
    **{f"classifier_{key}": decided_elsewhere(value) for key, value in (
        ("pooling", "cls"), ("bias", False), ("activation", "gelu")
    )},
    "decoder_bias": decided_elsewhere(True),
}  # fmt: skip
PREFIX = re.compile("^(bert|roberta)[.]")  # the encoder within a model that has a head
OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
POOLING = os.path.join("1_Pooling", "config.json")
POOLED = {
    "pooling_mode_mean_tokens": PoolingType.MEAN, "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
}  # fmt: skip
POOLED_BY_NAME = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}


def encoder_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of an encoder."""
    common_keys(config, writer, "layer_norm_eps")
    writer.add_causal_attention(False)
    writer.add_token_type_count(config.need("type_vocab_size"))


def modern_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of modern bert, most of whose layers have a window around each token."""
    common_keys(config, writer, "layer_norm_eps")
    writer.add_causal_attention(False)
    writer.add_sliding_window(config.need("local_attention"))
    writer.add_sliding_window_pattern(period(config))
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_vocab_size(config.need("vocab_size"))
    for add in (writer.add_add_bos_token, writer.add_add_eos_token, writer.add_add_sep_token):
        add(True)


def pooling_key(folder: str, writer: GGUFWriter) -> None:
    """Write how the vectors of tokens become one vector of the text, where the folder is one of Sentence Transformers.

    CheckpointError for another way than llama.cpp's: the mean, the first token, the last token.
    """
    path = os.path.join(folder, POOLING)
    if not os.path.exists(path):
        return
    pooling = json_object(path)
    names = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    name = str(pooling.get("pooling_mode")) if "pooling_mode" in pooling else ", ".join(names)
    kind = POOLED_BY_NAME.get(name, POOLED.get(name))
    if kind is None:
        raise CheckpointError(f"{shown_path(path)}: pooling by {shown(name)} is not known to llama.cpp")
    writer.add_pooling_type(kind)


def encoder_tensors(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """A tensor under its present name, without the prefix of a model with a head, and the rows of used positions."""
    name = PREFIX.sub("", weight.name)
    for old, new in OLD_ENDS.items():
        name = name.replace(old, new) if name.endswith(old) else name
    first = config.integer("first_position") or 0
    if first and name.endswith("position_embeddings.weight"):
        rows = weight.shape[0]
        if rows <= first:
            raise refusal(name, f"has {rows} rows, the first {first} of which are not used")
        weight = reorder_rows(weight, np.arange(first, rows), rows)
    return [renamed_to(weight, name)]


def _without_output(config: Config) -> Mapping[str, Any]:
    return {"tie_word_embeddings": True}


def _positions_after_padding(config: Config) -> Mapping[str, Any]:
    """Positions count from the number after the padding token's; those before have no place in the file."""
    padding, positions = config.value("pad_token_id"), config.need("max_position_embeddings")
    if type(padding) is not int or not 0 <= padding < positions - 1:
        raise config.refusal("pad_token_id", padding, f"is not a number below max_position_embeddings, {positions}")
    first = padding + 1
    return {"first_position": first, "max_position_embeddings": positions - first, **_without_output(config)}


BERT = Architecture(
    MODEL_ARCH.BERT, encoder_keys, LAYER, RULES, ends=ENDS, optional={}, split=encoder_tensors, pools=True,
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 512},
    derived=_without_output,
)  # fmt: skip
XLM_ROBERTA = BERT._replace(derived=_positions_after_padding, defaults={**BERT.defaults, "pad_token_id": 1})
MODERN_BERT = Architecture(
    MODEL_ARCH.MODERN_BERT, modern_keys, MODERN_LAYER, MODERN_RULES, ends=MODERN_ENDS, optional={}, pools=True,
    by_layer=lambda config, layer: {"attn_norm.weight": "E"} if layer else {}, derived=_without_output,
    aliases={
        "norm_eps": "layer_norm_eps", "global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq",
    },
    defaults={"layer_norm_eps": 1e-5, "rope_theta": 160000.0, "rope_local_base_freq": 10000.0, "local_attention": 128},
)  # fmt: skip

ENCODERS = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "XLMRobertaModel": XLM_ROBERTA,
    "RobertaModel": XLM_ROBERTA,
    "ModernBertModel": MODERN_BERT,
    "ModernBertForMaskedLM": MODERN_BERT,
}
