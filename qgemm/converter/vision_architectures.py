"""The vision parts that become projectors for llama.cpp: one record each, following llama.cpp's converter.

Two tensors differ from what that converter writes, since llama.cpp's loader would compute otherwise with them: the
second norm of Llama 4 is `ln2` (the converter's map of names gives `attn_post_norm`), and [IMG_BREAK] of Pixtral is
there (the converter drops it with the tensors of the text model, and the loader refuses a file without it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np
from gguf import GGUFWriter

from .config_rules import NONE, OFF, Rule, Rules, decided_elsewhere, only
from .fused_weights import Refusal
from .hyperparameters import Config, rope_kind
from .vision_record import CHANNELS, Projector, Tensors, biased, in_layers, unbiased
from .weight import Weight
from .weight_views import reorder_rows, reshaped

EPSILON = 1e-6  # every norm of Qwen's encoders has it; no config does
PIXTRAL_EPSILON = 1e-5
ROTARY_BASE = 10000.0
FRAMES = 2  # temporal_patch_size
WINDOW = 112  # pixels


def _usual_rotation(value: Any, config: Config) -> bool:
    rope = Config(config.where, value or {})
    return rope_kind(rope) in ("default", "axial") and (rope.number("rope_theta") or ROTARY_BASE) == ROTARY_BASE


def _same_as_text(value: Any, config: Config) -> bool:
    return value is None or value == config.value("text_size")


CHANNEL_RULE = only(CHANNELS, None)
USUAL_ROTATION = Rule(None, _usual_rotation, f"is not the default rotation with base {ROTARY_BASE:g}")
TEXT_SIZE = Rule(None, _same_as_text, "is not hidden_size of the text model")
TWO = Rule(2, lambda value, config: value in (None, 2), "is not 2, as llama.cpp computes")
LAST_LAYER = Rule(-1, lambda value, config: value in (-1, [-1]), "is not the last layer, -1")


def _joined(*tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for table in tables for name, value in table.items()}


def _query_key_value(weight: Weight) -> list[Weight]:
    """The thirds of a fused matrix or bias."""
    rows = weight.shape[0]
    third = rows // 3
    return [
        replace(reorder_rows(weight, np.arange(i * third, (i + 1) * third), rows),
                name=weight.name.replace(".qkv.", f".{part}."), original=None)
        for i, part in enumerate("qkv")
    ]  # fmt: skip


def frames(weight: Weight, refusal: Refusal) -> list[Weight]:
    """A convolution over two frames [E, C, 2, K, K] as one over each frame, [E, C, K, K]."""
    if not weight.name.endswith("patch_embed.proj.weight"):
        return [weight]
    shape = weight.original or weight.shape
    if len(shape) != 5 or shape[2] != FRAMES:
        raise refusal(weight.name, f"has shape {shape}, not that of a convolution over {FRAMES} frames")
    size, channels, _, height, width = shape
    planes = reshaped(weight, (size * channels * FRAMES, height * width))
    return [
        replace(reshaped(reorder_rows(planes, np.array([i]), FRAMES), (size, channels, height, width)),
                name=f"{weight.name}.{i}", original=None)
        for i in range(FRAMES)
    ]  # fmt: skip


def frames_and_heads(weight: Weight, refusal: Refusal) -> list[Weight]:
    """`frames`, and queries, keys and values as tensors of their own."""
    if ".attn.qkv." not in weight.name:
        return frames(weight, refusal)
    if weight.shape[0] % 3:
        raise refusal(weight.name, f"has {weight.shape[0]} rows, no multiple of 3")
    return _query_key_value(weight)


PATCHES_OF_FRAMES: Tensors = {
    "visual.patch_embed.proj.weight.0": ("v.patch_embd.weight", "E C K K"),
    "visual.patch_embed.proj.weight.1": ("v.patch_embd.weight.1", "E C K K"),
}
QWEN2_ATTENTION = biased({
    "attn.q": "attn_q E E", "attn.k": "attn_k E E", "attn.v": "attn_v E E", "attn.proj": "attn_out E E"
})  # fmt: skip
NORMS = {"norm1": "ln1 E", "norm2": "ln2 E"}
MERGER = biased({"visual.merger.mlp.0": "mm.0 M M", "visual.merger.mlp.2": "mm.2 T M"})
QWEN_RULES: Rules = {
    "in_channels": CHANNEL_RULE, "temporal_patch_size": TWO, "spatial_merge_size": TWO,
    "rope_parameters": USUAL_ROTATION,
}  # fmt: skip
QWEN_NAMES = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_chans": "in_channels"}
QWEN_DEFAULTS = {"num_attention_heads": 16, "patch_size": 14, "spatial_merge_size": 2}


def _qwen2_sizes(config: Config) -> Mapping[str, Any]:
    """The encoder's size is called embed_dim; hidden_size is the text model's, which llama.cpp's key of F holds."""
    size = config.need("embed_dim")
    mlp_size = int(size * (config.number("mlp_ratio") or 4))
    return {"hidden_size": size, "mlp_size": mlp_size, "intermediate_size": config.need("hidden_size")}


def qwen2_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Qwen2-VL's encoder, whose activation is llama.cpp's default."""
    writer.add_vision_attention_layernorm_eps(EPSILON)


def qwen25_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Qwen2.5-VL's encoder, whose layers have windows between those with full attention."""
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(config.value("fullatt_block_indexes")[0] + 1)
    writer.add_vision_attention_layernorm_eps(EPSILON)


def _full_at_one_period(value: Any, config: Config) -> bool:
    period = value[0] + 1 if value else 0
    return bool(value) and list(value) == list(range(period - 1, config.need("num_hidden_layers"), period))


def _deep_tensors(config: Config) -> Tensors:
    """The mergers of layers whose features enter the text model early; files name them by the encoder's layer."""
    return _joined(*(
        biased({
            f"visual.deepstack_merger_list.{i}.norm": f"v.deepstack.{layer}.norm M",
            f"visual.deepstack_merger_list.{i}.linear_fc1": f"v.deepstack.{layer}.fc1 M M",
            f"visual.deepstack_merger_list.{i}.linear_fc2": f"v.deepstack.{layer}.fc2 T M",
        })
        for i, layer in enumerate(config.value("deepstack_visual_indexes") or ())
    ))  # fmt: skip


def _deep_layers(value: Any, config: Config) -> bool:
    layers = list(value or ())
    return layers == sorted(set(layers)) and all(0 <= layer < config.need("num_hidden_layers") for layer in layers)


def _qwen3_sizes(config: Config) -> Mapping[str, Any]:
    count = config.need("num_position_embeddings")
    return {"positions": count, "image_size": isqrt(count) * config.need("patch_size")}


def qwen3_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Qwen3-VL's encoder."""
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(config.need("spatial_merge_size"))
    writer.add_vision_attention_layernorm_eps(EPSILON)
    deep = config.value("deepstack_visual_indexes") or ()
    writer.add_vision_is_deepstack_layers([layer in deep for layer in range(config.need("num_hidden_layers"))])


QWEN2_VL = Projector(
    "qwen2vl_merger",
    {**in_layers("visual.blocks", {**QWEN2_ATTENTION, **biased({
        **NORMS, "mlp.fc1": "ffn_up F E", "mlp.fc2": "ffn_down E F"})}),
     **PATCHES_OF_FRAMES, **biased({"visual.merger.ln_q": "v.post_ln E"}), **MERGER},
    qwen2_keys,
    {**QWEN_RULES, "hidden_act": only("quick_gelu"), "intermediate_size": TEXT_SIZE},
    split=frames_and_heads, aliases=QWEN_NAMES, derived=_qwen2_sizes,
    defaults={**QWEN_DEFAULTS, "num_hidden_layers": 32, "embed_dim": 1280, "hidden_size": 3584, "image_size": 560},
)  # fmt: skip
QWEN25_VL = Projector(
    "qwen2.5vl_merger",
    {**in_layers("visual.blocks", {**QWEN2_ATTENTION, **unbiased(NORMS), **biased({
        "mlp.gate_proj": "ffn_gate F E", "mlp.up_proj": "ffn_up F E", "mlp.down_proj": "ffn_down E F"})}),
     **PATCHES_OF_FRAMES, **unbiased({"visual.merger.ln_q": "v.post_ln E"}), **MERGER},
    qwen25_keys,
    {**QWEN_RULES, "hidden_act": only("silu"), "out_hidden_size": TEXT_SIZE._replace(default=3584),
     "window_size": only(WINDOW),
     "fullatt_block_indexes": Rule([7, 15, 23, 31], _full_at_one_period, "are not the layers of one period")},
    split=frames_and_heads, aliases=QWEN_NAMES,
    defaults={**QWEN_DEFAULTS, "num_hidden_layers": 32, "hidden_size": 3584, "intermediate_size": 3420,
              "image_size": 560, "fullatt_block_indexes": [7, 15, 23, 31]},
)  # fmt: skip
QWEN3_VL = Projector(
    "qwen3vl_merger",
    {**in_layers("visual.blocks", biased({
        **NORMS, "attn.qkv": "attn_qkv 3E E", "attn.proj": "attn_out E E", "mlp.linear_fc1": "ffn_up F E",
        "mlp.linear_fc2": "ffn_down E F"})),
     **PATCHES_OF_FRAMES, "visual.patch_embed.proj.bias": ("v.patch_embd.bias", "E"),
     "visual.pos_embed.weight": ("v.position_embd.weight", "P E"),
     **biased({"visual.merger.norm": "v.post_ln E", "visual.merger.linear_fc1": "mm.0 M M",
               "visual.merger.linear_fc2": "mm.2 T M"})},
    qwen3_keys,
    {**QWEN_RULES, "hidden_act": only("gelu_pytorch_tanh"), "out_hidden_size": TEXT_SIZE._replace(default=3584),
     "deepstack_visual_indexes": Rule([8, 16, 24], _deep_layers, "are not layers of the encoder in their order"),
     "num_position_embeddings": Rule(2304, lambda value, config: isqrt(value) ** 2 == value, "is no square")},
    tensors_by_config=_deep_tensors, split=frames, aliases=QWEN_NAMES, derived=_qwen3_sizes,
    defaults={**QWEN_DEFAULTS, "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
              "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
)  # fmt: skip

QWEN35 = QWEN3_VL._replace(
    rules={**QWEN3_VL.rules, "deepstack_visual_indexes": NONE},
    defaults={**QWEN3_VL.defaults, "deepstack_visual_indexes": []},
)  # fmt: skip


def _patches(config: Config) -> int:
    return (config.need("image_size") // config.need("patch_size")) ** 2


def _pool(config: Config) -> int:
    """Patches on a side that Gemma 3 averages into one token."""
    return config.need("image_size") // config.need("patch_size") // isqrt(config.need("mm_tokens_per_image"))


def gemma3_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Gemma 3's encoder, a SigLIP."""
    writer.add_vision_attention_layernorm_eps(config.need_number("layer_norm_eps"))
    writer.add_vision_use_gelu(True)
    if _pool(config) != 4:  # llama.cpp's default
        writer.add_vision_projector_scale_factor(_pool(config))


def _pools_evenly(value: Any, config: Config) -> bool:
    """Whether tokens of an image form a square that divides the square of its patches."""
    side = isqrt(value)
    return side * side == value and (config.need("image_size") // config.need("patch_size")) % side == 0


SIGLIP_LAYER = biased({
    "layer_norm1": "ln1 E", "layer_norm2": "ln2 E", "self_attn.q_proj": "attn_q E E", "self_attn.k_proj": "attn_k E E",
    "self_attn.v_proj": "attn_v E E", "self_attn.out_proj": "attn_out E E", "mlp.fc1": "ffn_up F E",
    "mlp.fc2": "ffn_down E F",
})  # fmt: skip
GEMMA3 = Projector(
    "gemma3",
    {**in_layers("vision_tower.encoder.layers", SIGLIP_LAYER),
     **biased({"vision_tower.embeddings.patch_embedding": "v.patch_embd E C K K",
               "vision_tower.post_layernorm": "v.post_ln E"}),
     "vision_tower.embeddings.position_embedding.weight": ("v.position_embd.weight", "P E"),
     "multi_modal_projector.mm_input_projection_weight": ("mm.input_projection.weight", "E T"),
     **unbiased({"multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm E"})},
    gemma3_keys,
    {"hidden_act": only("gelu_pytorch_tanh"), "num_channels": CHANNEL_RULE,
     "model_type": only("siglip_vision_model"),
     "mm_tokens_per_image": Rule(256, _pools_evenly, "is no square that divides the image's patches")},
    inherited=("mm_tokens_per_image",), derived=lambda config: {"positions": _patches(config)},
    plus_one=("mm.soft_emb_norm.weight",),
    types={"v.patch_embd.weight": "f32", "mm.input_projection.weight": "f16"},
    defaults={"model_type": "siglip_vision_model", "hidden_size": 768, "intermediate_size": 3072,
              "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "patch_size": 16,
              "layer_norm_eps": 1e-6, "mm_tokens_per_image": 256},
)  # fmt: skip


def llama4_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Llama 4's encoder."""
    writer.add_vision_attention_layernorm_eps(config.need_number("norm_eps"))
    writer.add_vision_projector_scale_factor(round(1 / config.need_number("pixel_shuffle_ratio")))
    writer.add_vision_use_gelu(True)


LLAMA4_LAYER = biased({
    "input_layernorm": "ln1 E", "post_attention_layernorm": "ln2 E", "self_attn.q_proj": "attn_q E E",
    "self_attn.k_proj": "attn_k E E", "self_attn.v_proj": "attn_v E E", "self_attn.o_proj": "attn_out E E",
    "mlp.fc1": "ffn_up F E", "mlp.fc2": "ffn_down E F",
})  # fmt: skip
LLAMA4 = Projector(
    "llama4",
    {**in_layers("vision_model.model.layers", LLAMA4_LAYER),
     "vision_model.class_embedding": ("v.class_embd", "E"),
     "vision_model.positional_embedding_vlm": ("v.position_embd.weight", "P E"),
     **biased({"vision_model.layernorm_pre": "v.pre_ln E", "vision_model.layernorm_post": "v.post_ln E"}),
     **unbiased({"vision_model.patch_embedding.linear": "v.patch_embd E CKK",
                 "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1 I F",
                 "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2 O O",
                 "multi_modal_projector.linear_1": "mm.model.fc T V"})},
    llama4_keys,
    {"hidden_act": only("gelu"), "num_channels": CHANNEL_RULE, "multi_modal_projector_bias": OFF,
     "vision_feature_select_strategy": only("default"), "vision_feature_layer": LAST_LAYER,
     "rope_parameters": USUAL_ROTATION, "rope_theta": only(ROTARY_BASE, None),
     "pixel_shuffle_ratio": Rule(0.5, lambda value, config: (1 / value).is_integer(), "is not one by a whole number")},
    derived=lambda config: {"positions": _patches(config) + 1},
    defaults={"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
              "image_size": 448, "patch_size": 14, "norm_eps": 1e-5, "pixel_shuffle_ratio": 0.5,
              "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680},
)  # fmt: skip


def pixtral_keys(config: Config, writer: GGUFWriter) -> None:
    """Write the keys of Pixtral's encoder; Mistral 3 merges squares of its patches."""
    writer.add_vision_attention_layernorm_eps(PIXTRAL_EPSILON)
    add: Callable[[bool], None] = (
        writer.add_vision_use_silu if config.value("hidden_act") == "silu" else writer.add_vision_use_gelu
    )
    add(True)
    if config.integer("spatial_merge_size"):
        writer.add_vision_spatial_merge_size(config.need("spatial_merge_size"))


def _whole_head(value: Any, config: Config) -> bool:
    return value is None or value * config.need("num_attention_heads") == config.need("hidden_size")


PIXTRAL_LAYER = unbiased({
    "attention_norm": "ln1 E", "ffn_norm": "ln2 E", "attention.q_proj": "attn_q E E", "attention.k_proj": "attn_k E E",
    "attention.v_proj": "attn_v E E", "attention.o_proj": "attn_out E E", "feed_forward.gate_proj": "ffn_gate F E",
    "feed_forward.up_proj": "ffn_up F E", "feed_forward.down_proj": "ffn_down E F",
})  # fmt: skip
PROJECTION = {"multi_modal_projector.linear_1": "mm.1 T E", "multi_modal_projector.linear_2": "mm.2 T T"}
PIXTRAL_MODEL_RULES: Rules = {
    "projector_hidden_act": only("gelu"), "vision_feature_layer": LAST_LAYER,
    "multimodal_projector_bias": decided_elsewhere(False),
}  # fmt: skip
PIXTRAL = Projector(
    "pixtral",
    {**in_layers("vision_tower.transformer.layers", PIXTRAL_LAYER),
     **unbiased({"vision_tower.ln_pre": "v.pre_ln E", "vision_tower.patch_conv": "v.patch_embd E C K K",
                 **PROJECTION})},
    pixtral_keys,
    {"model_type": only("pixtral"), "num_channels": CHANNEL_RULE, "rope_parameters": USUAL_ROTATION,
     "rope_theta": only(ROTARY_BASE, None), "head_dim": Rule(None, _whole_head, "is not the share of a head"),
     "hidden_act": Rule("gelu", lambda value, config: value in ("gelu", "silu"), "is neither gelu nor silu")},
    {**PIXTRAL_MODEL_RULES, "spatial_merge_size": NONE,
     "vision_feature_layer": LAST_LAYER._replace(default=-2), "image_seq_length": decided_elsewhere(576),
     "vision_feature_select_strategy": Rule("default", lambda value, config: value == "full", "is not full")},
    optional={name: tensor for name, tensor in biased(PROJECTION).items() if name.endswith(".bias")},
    rotary_pairs=True, tokens={"[IMG_BREAK]": "v.token_embd.img_break"},
    defaults={"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
              "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 1024, "patch_size": 16,
              "hidden_act": "gelu"},
)  # fmt: skip
MISTRAL3 = PIXTRAL._replace(
    tensors={
        **PIXTRAL.tensors,
        **unbiased({"multi_modal_projector.norm": "mm.input_norm E",
                    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger E M"}),
    },
    model_rules={
        **PIXTRAL_MODEL_RULES,
        "rms_norm_eps": Rule(1e-6, lambda value, config: value == PIXTRAL_EPSILON,
                             f"is not {PIXTRAL_EPSILON:g}, as llama.cpp computes the projector's norm"),
    },
    inherited=("spatial_merge_size",),
    defaults={**PIXTRAL.defaults, "model_type": "pixtral", "spatial_merge_size": 2},
)  # fmt: skip

PROJECTORS: Mapping[str, Projector] = {
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN25_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForConditionalGeneration": QWEN35,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Llama4ForConditionalGeneration": LLAMA4,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "LlavaForConditionalGeneration": PIXTRAL,
}
