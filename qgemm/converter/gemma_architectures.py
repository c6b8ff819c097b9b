"""Records of Gemma 3n and Gemma 4, whose layers read embeddings of their own and may share keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter

from qgemm.codec.packing import Floats

from .architecture_record import (
    ATTENTION,
    BEFORE_FFN,
    DENSE,
    ENDS,
    HEAD_NORMS,
    POST_NORMS,
    Architecture,
    Shapes,
)  # fmt: skip
from .config_rules import FULL, OFF, WINDOW, Rule, Rules, decided_elsewhere, every, only
from .fused_weights import Refusal
from .hyperparameters import Config, common_keys, gemma3_keys
from .weight import Weight
from .weight_views import pad_rows

NORMS: Shapes = {"attn_norm.weight": "E", "ffn_norm.weight": "E", **POST_NORMS}
OWN_EMBEDDINGS: Shapes = {"inp_gate.weight": "PL E", "proj.weight": "E PL", "post_norm.weight": "E"}
OWN_EMBEDDINGS_ENDS: Shapes = {
    "per_layer_token_embd.weight": "V LPL", "per_layer_model_proj.weight": "LPL E", "per_layer_proj_norm.weight": "PL",
}  # fmt: skip
MIXTURE: Shapes = {
    "ffn_gate_inp.weight": "X E", "ffn_gate_inp.scale": "E", "ffn_gate_up_exps.weight": "X 2M E",
    "ffn_down_exps.weight": "X E M", "ffn_down_exps.scale": "X", "pre_ffw_norm_2.weight": "E",
    "post_ffw_norm_1.weight": "E", "post_ffw_norm_2.weight": "E",
}  # fmt: skip
SPARSITY = 1.6448533535003662  # standard deviations above the mean, which 95% of a normal distribution do not reach
UNROTATED = 1e30  # divides the frequency of a pair of dimensions that is not rotated
PERIOD = 6  # every sixth layer has full attention where the config does not list the kinds


def _ends_with_full(value: Any, config: Config) -> bool:
    layers = config.need("num_hidden_layers")
    return not value or (len(value) == layers and value[-1] == FULL and set(value) <= {FULL, WINDOW})


def _one_kind(value: Any, config: Config) -> bool:
    """Whether layers with full attention, and these alone, have the same sizes of their own."""
    kinds = config.value("layer_types") or []
    layers = [str(layer) for layer, kind in enumerate(kinds) if kind == FULL]
    sizes = list((value or {}).values())
    return not value or (
        sorted(value) == sorted(layers)
        and all(size == sizes[0] for size in sizes)
        and set(sizes[0]) <= {"head_dim", "num_key_value_heads"}
        and all(type(size) is int and 0 < size < 2**16 for size in sizes[0].values())
    )


def _shares_with_last(value: Any, config: Config) -> bool:
    """Whether layers share keys and values as in llama.cpp: those of the last two layers that have their own."""
    own = config.need("num_hidden_layers") - (value or 0)
    kinds = config.value("layer_types") or [FULL if (i + 1) % PERIOD == 0 else WINDOW for i in range(own)]
    return not value or (own > 1 and kinds[own - 2 : own] == [WINDOW, FULL])


GEMMA4_RULES: Rules = {
    "num_kv_shared_layers": Rule(
        0, _shares_with_last, f"follow layers that do not end with {WINDOW} and {FULL}, which llama.cpp shares"
    ),
    "hidden_activation": only("gelu_pytorch_tanh"), "attention_bias": OFF,
    "use_bidirectional_attention": only(None, "vision"), "layer_types": Rule(
        None, _ends_with_full, f"are not {FULL} and {WINDOW} that end with {FULL}"
    ),
    "per_layer_config": Rule(None, _one_kind, f"is not head_dim and num_key_value_heads of all layers of {FULL}"),
    "vocab_size_per_layer_input": Rule(
        262144, lambda value, config: not config.integer("hidden_size_per_layer_input")
        or value == config.value("vocab_size"), "differs from vocab_size",
    ),
}  # fmt: skip


SPARSE_LAYERS = 10  # the first layers of Gemma 3n, a constant of llama.cpp


def _sparse_first(value: Any, config: Config) -> bool:
    """Whether the first ten layers alone are sparse, as by default in a model of more layers."""
    others = config.need("num_hidden_layers") - SPARSE_LAYERS
    return others > 0 and value in (None, [0.95] * SPARSE_LAYERS + [0.0] * others)


def _twenty_own(value: Any, config: Config) -> bool:
    layers = config.need("num_hidden_layers")
    return bool(layers - (value or 0) == 20 or (value == 0 and layers < 20))


GEMMA3N_RULES: Rules = {
    "hidden_activation": only("gelu_pytorch_tanh"), "attention_bias": OFF, "layer_types": every(5),
    "num_kv_shared_layers": Rule(15, _twenty_own, "leaves other than 20 layers with keys and values of their own"),
    "activation_sparsity_pattern": Rule(None, _sparse_first, "is not 0.95 in the first ten layers and 0 after"),
    "altup_num_inputs": only(4), "altup_active_idx": only(0), "altup_correct_scale": only(True),
    "final_logit_softcapping": only(30.0), "altup_coef_clip": decided_elsewhere(120.0), "laurel_rank": only(64),
    "hidden_size_per_layer_input": only(256), "vocab_size_per_layer_input": decided_elsewhere(262144),
}  # fmt: skip


def kinds(config: Config) -> list[str]:
    """The kind of attention of each layer, the last of which has full attention."""
    layers = range(config.need("num_hidden_layers"))
    listed = config.value("layer_types") or [WINDOW if (i + 1) % PERIOD else FULL for i in layers]
    return [*listed[:-1], FULL]


def own_layers(config: Config) -> int:
    """The number of layers with keys and values of their own."""
    return config.need("num_hidden_layers") - (config.integer("num_kv_shared_layers") or 0)


def full_heads(config: Config) -> Mapping[str, Any]:
    """The size and the number of heads in layers with full attention; older configs name them, newer list layers."""
    listed = config.value("per_layer_config") or {}
    layer: Mapping[str, Any] = next(iter(listed.values()), {})
    groups = config.integer("num_global_key_value_heads") if config.value("attention_k_eq_v") is True else None
    return {
        "global_head_dim": layer.get("head_dim") or config.integer("global_head_dim") or 512,
        "num_global_key_value_heads": layer.get("num_key_value_heads") or groups or config.need("num_key_value_heads"),
    }


def gemma4_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of gemma 4; those of layers with full attention differ from those with sliding windows."""
    windows = [kind == WINDOW for kind in kinds(config)]
    own, size = own_layers(config), config.need("intermediate_size")
    groups = config.need("num_key_value_heads"), config.need("num_global_key_value_heads")
    wide = config.value("use_double_wide_mlp") is True
    whole = config.replaced(
        head_dim=config.need("global_head_dim"),
        num_key_value_heads=groups[0] if groups[0] == groups[1] else [groups[not window] for window in windows],
        intermediate_size=[size if layer < own else 2 * size for layer in range(len(windows))] if wide else size,
    )
    common_keys(whole, writer)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(config.need("global_head_dim"))
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_sliding_window(config.need("sliding_window"))
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(len(windows) - own)
    writer.add_embedding_length_per_layer_input(config.integer("hidden_size_per_layer_input") or 0)
    writer.add_add_bos_token(True)
    if config.integer("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.need("moe_intermediate_size"))
    if config.number("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(config.need_number("final_logit_softcapping"))


def proportional_factors(config: Config) -> dict[str, Floats]:
    """The divisors of the frequencies of full attention, which rotates the first pairs of dimensions alone."""
    factor = config.rope.number("factor") or 1.0
    half = config.need("global_head_dim") // 2
    rotated = int((config.rope.number("partial_rotary_factor") or 1.0) * half)
    return {"rope_freqs.weight": np.where(np.arange(half) < rotated, factor, UNROTATED).astype(np.float32)}


def _gemma4(config: Config, layer: int) -> Shapes:
    whole, own = kinds(config)[layer] == FULL, layer < own_layers(config)
    queries, groups, dim = ("HFD", "GFD", "FD") if whole else ("HD", "GD", "D")
    shapes = {"attn_q.weight": f"{queries} E", "attn_output.weight": f"E {queries}", "attn_q_norm.weight": dim}
    if own:
        shapes |= {"attn_k.weight": f"{groups} E", "attn_k_norm.weight": dim}
    if own and not (whole and config.value("attention_k_eq_v") is True):
        shapes |= {"attn_v.weight": f"{groups} E"}
    wide = config.value("use_double_wide_mlp") is True and not own
    shapes |= {name: shape.replace("F", "2F") if wide else shape for name, shape in DENSE.items()}
    if config.value("enable_moe_block") is True:
        shapes |= MIXTURE
    return {**shapes, **(OWN_EMBEDDINGS if config.integer("hidden_size_per_layer_input") else {})}


def _shared(config: Config, layer: int) -> Shapes:
    """Keys and values of layers that share those of others: older checkpoints have them, and nobody reads them."""
    groups, dim = ("GFD", "FD") if kinds(config)[layer] == FULL else ("GD", "D")
    shapes = {"attn_k.weight": f"{groups} E", "attn_v.weight": f"{groups} E", "attn_k_norm.weight": dim}
    return shapes if layer >= own_layers(config) else {}


def _ends(config: Config) -> Shapes:
    return {**ENDS, **(OWN_EMBEDDINGS_ENDS if config.integer("hidden_size_per_layer_input") else {})}


GEMMA4 = Architecture(
    MODEL_ARCH.GEMMA4, gemma4_keys, {**NORMS, "layer_output_scale.weight": "1"}, GEMMA4_RULES,
    factors={"proportional": proportional_factors}, by_layer=_gemma4, optional_by_layer=_shared,
    ends_by_config=_ends, derived=full_heads,
    aliases={"top_k_experts": "num_experts_per_tok"}, read_rotary=("partial_rotary_factor",), tokenizer="gemma4",
    space=False,
    renames={".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"},
    defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512, "num_key_value_heads": 4,
              "hidden_size_per_layer_input": 256,
              "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                     "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
)  # fmt: skip


def gemma3n_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of gemma 3n."""
    gemma3_keys(config, writer)
    writer.add_altup_active_idx(config.integer("altup_active_idx") or 0)
    writer.add_altup_num_inputs(config.need("altup_num_inputs"))
    writer.add_embedding_length_per_layer_input(config.need("hidden_size_per_layer_input"))
    writer.add_shared_kv_layers(config.integer("num_kv_shared_layers") or 0)
    layers = config.need("num_hidden_layers")
    writer.add_sliding_window_pattern([(layer + 1) % 5 > 0 for layer in range(layers)])
    writer.add_activation_sparsity_scale([SPARSITY] * SPARSE_LAYERS + [-inf] * (layers - SPARSE_LAYERS))


def unread_keys(config: Config, sizes: Mapping[str, int]) -> Mapping[str, Floats]:
    """Keys and values of layers that share those of others: transformers 5 leaves them out, llama.cpp loads them."""
    shapes = {"attn_k.weight": "GD E", "attn_v.weight": "GD E", "attn_k_norm.weight": "D"}
    return {
        f"blk.{layer}.{name}": np.zeros([sizes[letter] for letter in shape.split()], np.float32)
        for layer in range(own_layers(config), config.need("num_hidden_layers"))
        for name, shape in shapes.items()
    }


def padded_embeddings(weight: Weight, config: Config, refusal: Refusal) -> list[Weight]:
    """Rows of zeros for tokens of images and sounds, whose embeddings come from elsewhere."""
    if weight.name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight")):
        rows = config.need("vocab_size")
        return [pad_rows(weight, rows) if weight.shape[0] < rows else weight]
    return [weight]


GEMMA3N = Architecture(
    MODEL_ARCH.GEMMA3N, gemma3n_keys,
    {
        **ATTENTION, **HEAD_NORMS, **BEFORE_FFN, **POST_NORMS, **OWN_EMBEDDINGS, "altup_correct_coef.weight": "A A",
        "altup_correct_scale.weight": "E", "altup_predict_coef.weight": "AA A", "altup_router.weight": "A E",
        "altup_router_norm.weight": "E", "laurel_l.weight": "LR E", "laurel_r.weight": "E LR",
        "laurel_post_norm.weight": "E",
    },
    GEMMA3N_RULES, unread=unread_keys, split=padded_embeddings, space=False,
    ends={**ENDS, **OWN_EMBEDDINGS_ENDS, "altup_proj.weight": "A-1 E E", "altup_unembd_proj.weight": "A-1 E E"},
    defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512, "final_logit_softcapping": 30.0,
              "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262400, "altup_num_inputs": 4,
              "hidden_size_per_layer_input": 256, "laurel_rank": 64},
)  # fmt: skip

GEMMAS = {
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
}
