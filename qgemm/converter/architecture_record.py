"""The record of an architecture, and the tensors that its layers have.

Shapes are written in letters: V vocabulary, P positions, E hidden size, F feed-forward size, H query heads, G key-value
heads, D head size, X experts, M feed-forward size of an expert, S of the shared expert; `letters` lists the others.
Every tensor listed must exist and have its shape, except those of `optional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gguf import MODEL_ARCH, GGUFWriter

from qgemm.codec.packing import Floats

from .config_rules import Rules
from .fused_weights import Split
from .hyperparameters import ROTARY_SETTINGS, Config

Shapes = Mapping[str, str]  # name in a .gguf file -> shape in letters; names of layers omit "blk.N."


def with_biases(shapes: Shapes) -> Shapes:
    """The matrices and vectors, each with a bias."""
    biases = {name.replace(".weight", ".bias"): shape.split()[0] for name, shape in shapes.items()}
    return {**shapes, **biases}


ENDS: Shapes = {"token_embd.weight": "V E", "output_norm.weight": "E"}
ATTENTION: Shapes = {
    "attn_norm.weight": "E", "attn_q.weight": "HD E", "attn_k.weight": "GD E", "attn_v.weight": "GD E",
    "attn_output.weight": "E HD",
}  # fmt: skip
DENSE: Shapes = {"ffn_gate.weight": "F E", "ffn_up.weight": "F E", "ffn_down.weight": "E F"}
EXPERTS: Shapes = {
    "ffn_gate_inp.weight": "X E", "ffn_gate_exps.weight": "X M E", "ffn_up_exps.weight": "X M E",
    "ffn_down_exps.weight": "X E M",
}  # fmt: skip
BEFORE_FFN: Shapes = {"ffn_norm.weight": "E"}
HEAD_NORMS: Shapes = {"attn_q_norm.weight": "D", "attn_k_norm.weight": "D"}
BIASES: Shapes = {"attn_q.bias": "HD", "attn_k.bias": "GD", "attn_v.bias": "GD"}
SHARED_EXPERT: Shapes = {"ffn_gate_shexp.weight": "S E", "ffn_up_shexp.weight": "S E", "ffn_down_shexp.weight": "E S"}
UP_DOWN: Shapes = {"ffn_up.weight": "F E", "ffn_down.weight": "E F"}
FUSED_ATTENTION: Shapes = {"attn_norm.weight": "E", "attn_qkv.weight": "QKV E", "attn_output.weight": "E HD"}
POST_NORMS: Shapes = {"post_attention_norm.weight": "E", "post_ffw_norm.weight": "E"}
ROW_NORMS: Shapes = {"attn_q_norm.weight": "HD", "attn_k_norm.weight": "GD"}
OPTIONAL: Shapes = {**BIASES, "attn_output.bias": "E", "ffn_gate.bias": "F", "ffn_up.bias": "F", "ffn_down.bias": "E"}


class Architecture(NamedTuple):
    """How a family of models becomes a .gguf model.

    kind: the gguf package's architecture. keys: writes the hyperparameters. rules: values that other keys must have.
    layer: the tensors of every layer; those of its feed-forward network are added unless listed: `dense`, or `experts`
    in layers that have a router. by_layer: tensors that some layers have, by the config and the layer's number.
    optional: tensors of layers that may be missing; optional_by_layer: those of some layers.
    ends: tensors outside the layers, besides ends_by_config.
    renames: end of a tensor's name in a layer -> its name in the file, where the gguf package has none.
    tokenizer: llama.cpp's kind of a BPE with pieces, where it is not "llama". pools: whether the model may be one of
    Sentence Transformers, which say how vectors of tokens become one.
    numbers: end of a tensor's name -> the gguf package's method that writes its number, one of each layer, as a key.
    rotary_pairs: whether rows of queries and keys move into llama.cpp's rotary order.
    norms_plus_one: whether the checkpoint stores norms minus one. defaults: values for keys that configs omit.
    factors: kind of rotary scaling -> the tensors that it adds.
    unread: tensors that llama.cpp loads and a checkpoint may lack, with values that change no result.
    read_rotary: keys of rotary embeddings that only some architectures read.
    roles: role of a special token -> its text, where the folder gives no token that role.
    variant: the record of a config whose models llama.cpp calls by another architecture, None if it is this one.
    space: whether text gets a leading space before tokenization, None if the tokenizer decides.
    tied_by_text: whether the text part of a model that sees says if the output is tied, not the whole.
    split: splits a fused tensor of the checkpoint into llama.cpp's tensors, under Hugging Face's names; tensors that do
    not fit are refused.
    """

    kind: MODEL_ARCH
    keys: Callable[[Config, GGUFWriter], None]
    layer: Shapes
    rules: Rules
    rotary_pairs: bool = False
    norms_plus_one: bool = False
    defaults: Mapping[str, Any] = {}
    factors: Mapping[str, Callable[[Config], dict[str, Floats]]] = {}
    split: Split = lambda weight, config, refusal: [weight]
    space: bool | None = None
    read_rotary: tuple[str, ...] = ()

    roles: Mapping[str, str] = {}
    numbers: Mapping[str, str] = {}
    dense: Shapes = DENSE
    experts: Shapes = EXPERTS
    ends: Shapes = ENDS
    optional: Shapes = OPTIONAL
    aliases: Mapping[str, str] = {}
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    by_layer: Callable[[Config, int], Shapes] = lambda config, layer: {}
    optional_by_layer: Callable[[Config, int], Shapes] = lambda config, layer: {}
    ends_by_config: Callable[[Config], Shapes] = lambda config: {}
    unread: Callable[[Config, Mapping[str, int]], Mapping[str, Floats]] = lambda config, sizes: {}
    renames: Mapping[str, str] = {}
    tokenizer: str = "llama"
    pools: bool = False
    tied_by_text: bool = False
    variant: Callable[[Mapping[str, Any]], Any] = lambda document: None

    def shapes(self, config: Config, layer: int, experts: bool) -> Shapes:
        """The tensors of a layer with or without experts."""
        shapes = {**self.layer, **self.by_layer(config, layer)}
        if "ffn_up.weight" in shapes:
            return shapes
        return {**shapes, **(self.experts if experts else self.dense)}

    def config(self, where: str, document: Mapping[str, Any]) -> Config:
        """A config with the defaults, under the names that are used here, with the values that follow from others.

        The text part of a model that sees precedes the whole. But mostly the whole says whether its output is tied.
        """
        text, key = document.get("text_config") or {}, "tie_word_embeddings"
        values = {**document, **text}
        if key in document and not (self.tied_by_text and text):
            values[key] = document[key]
        renamed = {new: values[old] for old, new in self.aliases.items() if values.get(old) is not None}
        rotary = {key: values.pop(key, None) for key in ROTARY_SETTINGS}
        if not any(rotary.values()):  # null and {} stand for the default, which may be under either key
            rotary = {key: self.defaults.get(key) for key in ROTARY_SETTINGS}
        config = Config(where, {**self.defaults, **renamed, **values, **rotary})
        sizes = ("intermediate_size", "moe_intermediate_size")
        config = config.replaced(**{name: config.one_for_layers(name) for name in sizes})
        return Config(where, {**config.values, **self.derived(config)})


def letters(config: Config, tokens: int) -> dict[str, int]:
    """The value of each letter of a shape."""
    heads, dim = config.need("num_attention_heads"), config.head_dim
    groups = config.integer("num_key_value_heads") or heads
    ffn = config.need("intermediate_size")
    return {
        "V": tokens, "P": config.integer("max_position_embeddings") or 0, "E": config.need("hidden_size"),
        "F": ffn, "2F": 2 * ffn, "H": heads, "D": dim, "HD": heads * dim, "2HD": 2 * heads * dim,
        "GD": groups * dim, "3E": 3 * config.need("hidden_size"), "C": config.integer("conv_L_cache") or 0,
        "QKV": (heads + 2 * groups) * dim, "X": config.integer("num_local_experts", "num_experts") or 0,
        "M": config.integer("moe_intermediate_size") or ffn, "2M": 2 * (config.integer("moe_intermediate_size") or ffn),
        "S": config.integer("shared_expert_intermediate_size") or 0,
        **_latent_letters(config, heads), **_linear_letters(config), **_gemma_letters(config, heads), "1": 1,
        "T": config.integer("type_vocab_size") or 0,
    }  # fmt: skip


def _latent_letters(config: Config, heads: int) -> dict[str, int]:
    """The letters of multi-head latent attention: ranks of queries (QR) and of keys and values (KR), sizes of heads."""
    rank, plain, rotated, value = (
        config.integer(name) or 0 for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "QR": config.integer("q_lora_rank") or 0, "KR": rank, "KR+R": rank + rotated, "N": plain, "U": value,
        "HQ": heads * (plain + rotated), "HU": heads * value,
    }  # fmt: skip


def _linear_letters(config: Config) -> dict[str, int]:
    """The letters of linear attention: heads (LH) of size LD, all values (LV), with queries and keys (LQKV), kernel."""
    kernel, key, value, keys, values = (
        config.integer(f"linear_{name}") or 0
        for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    )
    return {
        "LH": values, "2LH": 2 * values, "LD": value, "LV": values * value, "LQKV": 2 * keys * key + values * value,
        "LC": kernel,
    }  # fmt: skip


def _gemma_letters(config: Config, heads: int) -> dict[str, int]:
    """The letters of Gemma 4 and 3n.

    Full attention: FD, HFD, GFD. Embeddings of a layer: PL, of all layers: LPL. Parallel streams: A, AA. Laurel: LR.
    """
    dim, groups, size = (
        config.integer(name) or 0
        for name in ("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input")
    )
    streams = config.integer("altup_num_inputs") or 0
    return {
        "A": streams, "A-1": streams - 1, "AA": streams * streams, "LR": config.integer("laurel_rank") or 0,
        "FD": dim, "HFD": heads * dim, "GFD": groups * dim, "PL": size,
        "LPL": size * config.need("num_hidden_layers"),
    }  # fmt: skip
