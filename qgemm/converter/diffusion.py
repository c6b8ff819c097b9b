"""Diffusion models: the architecture that ComfyUI-GGUF looks for, by tensors' names, and its rules of types.

A .gguf file of another architecture is refused by that loader. The matrices that a model quantizes badly (embeddings of
time and text, first and last layers) keep 16 bits; vectors, small tensors and the parts in `single` become F32, which
the loader requires where a model reads them as parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from gguf.constants import Keys

from qgemm.codec.format import Format
from qgemm.errors import QgemmError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS
from qgemm.text import names_in_short

from .weight import Source, Weight

SMALL = 1024  # weights; tensors of up to this many become F32
PREFIXES = "model.diffusion_model.", "model.", "net."


class Diffusion(NamedTuple):
    """marks: alternatives, each the tensors that such a model has all of. unquantized: parts of names of tensors that
    are not quantized; those that begin with = are whole names. single: parts of names of tensors in F32.
    """

    marks: tuple[tuple[str, ...], ...]
    unquantized: tuple[str, ...]
    single: tuple[str, ...] = ()


FLUX_LIKE = "txt_in.", "img_in.", "time_in.", "vector_in.", "guidance_in.", "final_layer."
UNET = (
    "class_embedding.", "time_embedding.", "add_embedding.", "time_embed.", "label_emb.", "conv_in.", "conv_out.",
    "=input_blocks.0.0.weight", "=out.2.weight",
)  # fmt: skip
MODELS: dict[str, Diffusion] = {  # the first whose marks fit
    "qwen_image": Diffusion(
        (("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"),),
        ("img_in.", "txt_in.", "time_text_embed.", "norm_out.", "proj_out."),
    ),
    "flux": Diffusion((("double_blocks.0.img_attn.proj.weight",),), FLUX_LIKE),
    "sd3": Diffusion(
        (("joint_blocks.0.x_block.attn.qkv.weight",),),
        ("final_layer.", "time_text_embed.", "context_embedder.", "t_embedder.", "y_embedder.", "x_embedder.",
         "=proj_out.weight", "=pos_embed"),
    ),
    "aura": Diffusion(
        (("double_layers.3.modX.1.weight",),),
        ("t_embedder.", "init_x_linear.", "=modF.1.weight", "=cond_seq_linear.weight", "=final_linear.weight",
         "=positional_encoding", "=register_tokens"),
    ),
    "hidream": Diffusion(
        (("caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),),
        ("p_embedder.", "t_embedder.", "x_embedder.", "final_layer.", ".ff_i.gate.weight", "caption_projection."),
        (".ff_i.gate.weight", "img_emb.emb_pos"),
    ),
    "cosmos": Diffusion(
        (("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),),
        ("p_embedder.", "t_embedder.", "t_embedding_norm.", "x_embedder.", "pos_embedder.", "final_layer."),
        ("pos_embedder",),
    ),
    "ltxv": Diffusion(
        (("adaln_single.emb.timestep_embedder.linear_2.weight", "transformer_blocks.27.scale_shift_table",
          "caption_projection.linear_2.weight"),),
        ("adaln_single.", "caption_projection.", "patchify_proj.", "proj_out.", "scale_shift_table"),
        ("scale_shift_table",),
    ),
    "hyvid": Diffusion(
        (("double_blocks.0.img_attn_proj.weight", "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"),),
        FLUX_LIKE,
    ),
    "wan": Diffusion(
        (("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),),
        ("modulation.", "patch_embedding.", "text_embedding.", "time_projection.", "time_embedding.", "img_emb.",
         "head."),
        (".modulation",),
    ),
    "sdxl": Diffusion(
        (
            ("down_blocks.0.downsamplers.0.conv.weight", "add_embedding.linear_1.weight"),
            ("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "output_blocks.2.2.conv.weight",
             "output_blocks.5.2.conv.weight"),
            ("label_emb.0.0.weight",),
        ),
        UNET,
    ),
    "sd1": Diffusion(
        (
            ("down_blocks.0.downsamplers.0.conv.weight",),
            ("input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "input_blocks.9.0.op.weight",
             "output_blocks.2.1.conv.weight", "output_blocks.5.2.conv.weight", "output_blocks.8.2.conv.weight"),
        ),
        UNET,
    ),
    "lumina2": Diffusion(
        (("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),),
        ("t_embedder.", "x_embedder.", "cap_embedder.", "context_refiner.", "noise_refiner.", "final_layer."),
    ),
}  # fmt: skip


def architecture_of(names: Iterable[str]) -> str:
    """The model whose tensors have these names; "" for any other."""
    plain = {name.removeprefix(prefix) for name in names for prefix in ("", *PREFIXES)}
    fitting = (name for name, model in MODELS.items() if any(plain.issuperset(marks) for marks in model.marks))
    return next(fitting, "")


def with_architecture(source: Source, architecture: str) -> Source:
    """The source with this general.architecture or, if it is a diffusion model in no .gguf file, with its own."""
    metadata = source.metadata
    if not architecture and not source.is_gguf and Keys.General.ARCHITECTURE not in metadata:
        architecture = architecture_of(source.weights)
    if not architecture:
        return source
    if not re.fullmatch(r"[a-z0-9_.-]+", architecture):
        rule = f"--architecture {shown(architecture)} is not a name of lower-case letters, digits, _, . and -"
        raise QgemmError(f"{shown_path(source.path)}: {rule}")
    others: Mapping[str, object] = {key: metadata[key] for key in metadata if key != Keys.General.ARCHITECTURE}
    source = replace(source, metadata={Keys.General.ARCHITECTURE: architecture, **others})
    model = MODELS.get(architecture)
    return source if model is None or source.is_gguf else _of_model(source, model)


def _of_model(source: Source, model: Diffusion) -> Source:
    """The diffusion model alone, without a prefix of its names; tensors beside it, of a VAE or a text encoder, go."""
    prefix = next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in source.weights)), "")
    weights = {
        name.removeprefix(prefix): replace(weight, name=name.removeprefix(prefix), kept_as=kept_type(model, weight))
        for name, weight in source.weights.items()
        if name.startswith(prefix)
    }
    others = [name for name in source.weights if not name.startswith(prefix)]
    notes = [f"left out, since they are not {prefix}...: {names_in_short(others)}"] if others else []
    return replace(source, weights=weights, notes=[*source.notes, *notes])


def keep_patterns(model: Diffusion) -> list[tuple[str, re.Pattern[str]]]:
    """Rules and the names of tensors that they keep."""
    texts = [("diffusion", part) for part in model.unquantized] + [("F32", part) for part in model.single]
    return [
        (rule, re.compile(rf"(^|\.){re.escape(part[1:])}$" if part.startswith("=") else re.escape(part)))
        for rule, part in texts
    ]


def kept_type(model: Diffusion, weight: Weight) -> Format | None:
    """The type of a tensor that is not quantized: F32, or 16 bits (F32 becomes F16); None for types that stay."""
    own = None if weight.tensor is None else str(weight.tensor.format)
    if own not in ("F32", "BF16"):
        return weight.kept_as
    small = len(weight.shape) < 2 or prod(weight.shape) <= SMALL
    if small or any(part in weight.name for part in model.single):
        return FORMATS["f32"]
    return FORMATS["bf16" if own == "BF16" else "f16"]
