"""Records of encoders, whose result is a vector of each token: Bert, XLM-RoBERTa, ModernBERT, Nomic BERT."""

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

from .architecture_record import DENSE, Architecture, Shapes, with_biases
from .config_rules import FULL, GELU, NONE, OFF, SILU, WINDOW, Rule, Rules, decided_elsewhere, only
from .fused_weights import Refusal, renamed_to
from .hyperparameters import Config, common_keys
from .weight import Weight
from .weight_views import reorder_rows, reshaped, transpose_matrices

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
NOMIC_LAYER: Shapes = {
    "attn_qkv.weight": "QKV E", "attn_output.weight": "E E", **with_biases({
        "attn_output_norm.weight": "E", "layer_output_norm.weight": "E",
    }),
}  # fmt: skip
NOMIC_MOE_LAYER: Shapes = {**NOMIC_LAYER, "attn_qkv.bias": "QKV", "attn_output.bias": "E"}
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
NOMIC_BIASES = tuple(f"{name}_bias" for name in ("qkv_proj", "mlp_fc1", "mlp_fc2"))
NOMIC_RULES: Rules = {  # keys of the class of transformers, then those of the model's own code
    "hidden_act": SILU, "activation_function": only("swiglu"), **dict.fromkeys(NOMIC_BIASES, OFF),
    **{key: OFF for key in ("causal", "prenorm", "parallel_block", "parallel_block_tied_norm", "use_rms_norm",
                            "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx")},
    "rotary_emb_fraction": only(1.0), "rotary_emb_scale_base": NONE, "scale_attn_weights": only(True),
    "rotary_scaling_factor": decided_elsewhere(None),  # has no effect up to max_trained_positions
}  # fmt: skip
NOMIC_MOE_RULES: Rules = {
    **NOMIC_RULES, "activation_function": GELU._replace(default="gelu"), **dict.fromkeys(NOMIC_BIASES, only(True)),
    "moe_normalize_expert_weights": OFF, "expert_choice_router": OFF, "num_shared_experts": NONE, "ffn_div": only(1.0),
}  # fmt: skip
PREFIX = re.compile("^(bert|roberta|nomic_bert|distilbert)[.]")  # the encoder within a model that has a head
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


def nomic_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of nomic bert."""
    encoder_keys(config, writer)
    if config.integer("moe_every_n_layers"):
        writer.add_moe_every_n_layers(config.need("moe_every_n_layers"))


def pooling_key(folder: str, writer: GGUFWriter) -> None:
    """Write how the vectors of tokens become one vector of the text, where the folder is one of Sentence Transformers.

    CheckpointError for another way than llama.cpp's: the mean, the first token, the last token.
    """
    path = os.path.join(folder, POOLING)
    if not os.path.lexists(path):
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


def nomic_tensors(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """A tensor of nomic bert; matrices of all experts, [X M, E], become [X, M, E], and second ones [X, E, M]."""
    (weight,) = encoder_tensors(weight, config, refusal)
    if not weight.name.endswith((".experts.mlp.w1", ".experts.mlp.w2")):
        return [weight]
    experts, size = config.need("num_experts"), config.need("intermediate_size")
    if weight.shape[:-1] != (experts * size,):
        raise refusal(weight.name, f"has shape {weight.shape}, not {experts} matrices of {size} rows")
    matrices = reshaped(weight, (experts, size, weight.shape[-1]))
    if weight.name.endswith("w2"):
        matrices = transpose_matrices(matrices)
    return [renamed_to(matrices, f"{weight.name}.weight")]


def _nomic_sizes(config: Config) -> Mapping[str, Any]:
    """The trained context, the first rotary base, and no experts in a model without layers that have them.

    n_positions of the model's own configs is longer than the trained context: 2048 tokens, 512 for the mixture.
    """
    positions = config.need("max_position_embeddings")
    period = max(config.integer("moe_every_n_layers") or 0, 0)
    if config.value("n_positions") is not None:
        if config.value("rotary_emb_base") is None:
            raise config.refusal("rotary_emb_base", None, "is needed")
        trained = config.integer("max_trained_positions") or 2048
        positions = 512 if period and positions == trained == 2048 else min(positions, trained)
    experts = config.value("num_experts") if period else None
    return {
        "max_position_embeddings": positions, "moe_every_n_layers": period, "num_experts": experts,
        **_without_output(config),
    }  # fmt: skip


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
DISTIL_BERT = BERT._replace(
    rules={"activation": GELU._replace(default="gelu"), "sinusoidal_pos_embds": decided_elsewhere(False)},
    ends={name: shape for name, shape in ENDS.items() if name != "token_types.weight"},
    aliases={"dim": "hidden_size", "hidden_dim": "intermediate_size", "n_layers": "num_hidden_layers",
             "n_heads": "num_attention_heads"},
    defaults={"type_vocab_size": 1, "layer_norm_eps": 1e-12, "max_position_embeddings": 512},
)  # fmt: skip
MODERN_BERT = Architecture(
    MODEL_ARCH.MODERN_BERT, modern_keys, MODERN_LAYER, MODERN_RULES, ends=MODERN_ENDS, optional={}, pools=True,
    by_layer=lambda config, layer: {"attn_norm.weight": "E"} if layer else {}, derived=_without_output,
    aliases={
        "norm_eps": "layer_norm_eps", "global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq",
    },
    defaults={"layer_norm_eps": 1e-5, "rope_theta": 160000.0, "rope_local_base_freq": 10000.0, "local_attention": 128},
)  # fmt: skip
NOMIC_BERT_MOE = Architecture(
    MODEL_ARCH.NOMIC_BERT_MOE, nomic_keys, NOMIC_MOE_LAYER, NOMIC_MOE_RULES, optional={}, split=nomic_tensors,
    pools=True,
    ends={name: shape for name, shape in ENDS.items() if name != "position_embd.weight"}, derived=_nomic_sizes,
    dense=with_biases({"ffn_up.weight": "F E", "ffn_down.weight": "E F"}),
    experts={"ffn_gate_inp.weight": "X E", "ffn_up_exps.weight": "X F E", "ffn_down_exps.weight": "X E F"},
    aliases={
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta", "moe_top_k": "num_experts_per_tok",
    },
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "rope_theta": 1000.0},
)  # fmt: skip
NOMIC_BERT = NOMIC_BERT_MOE._replace(
    kind=MODEL_ARCH.NOMIC_BERT, layer=NOMIC_LAYER, rules=NOMIC_RULES, dense=DENSE, experts={},
    variant=lambda document: NOMIC_BERT_MOE if (document.get("moe_every_n_layers") or 0) > 0 else None,
)  # fmt: skip

ENCODERS = {
    "BertModel": BERT,
    "BertForMaskedLM": BERT,
    "DistilBertModel": DISTIL_BERT,
    "DistilBertForMaskedLM": DISTIL_BERT,
    "XLMRobertaModel": XLM_ROBERTA,
    "CamembertModel": XLM_ROBERTA,
    "RobertaModel": XLM_ROBERTA,
    "ModernBertModel": MODERN_BERT,
    "ModernBertForMaskedLM": MODERN_BERT,
    "NomicBertModel": NOMIC_BERT,
    "NomicBertForMaskedLM": NOMIC_BERT,
}
