"""Which tensors keep their type: the rules of llama-quantize as tables, and those for names of other checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, Keys

from . import diffusion
from .mixture import GLM5, LAYER
from .weight import Source

PROJECTOR = MODEL_ARCH_NAMES[MODEL_ARCH.MMPROJ]
ARCHITECTURES = frozenset(MODEL_ARCH_NAMES.values())  # models of these use llama.cpp's names

KEEP_RULES = (
    # rule                pattern of tensor names in a .gguf file (llama.cpp 0c1e57098, src/llama-quant.cpp)
    ("norm",              r"_norm\.weight"),
    ("router",            r"ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight"),
    ("positions",         r"^position_embd\.weight$|\.position_embd|sam\.pos_embd|\.rel_pos|attn_rel_b\.weight"),
    ("token types",       r"^token_types\.weight$"),
    ("small projection",  r"altup|laurel|per_layer_model_proj"),
    ("state space",       r"ssm_conv1d|shortconv\.conv\.weight"),
    ("indexer",           r"indexer\.[kq]_proj\.weight"),
    ("time mix",          r"time_mix_(first|w0|w1|w2|v0|v1|v2|a0|a1|a2|g1|g2|decay_w1|decay_w2|lerp_fused)\.weight"),
    ("image encoder",     r"sam\.neck\.|sam\.net_|\.patch_embd|\.patch_merger"),
    ("audio codebook",    r"a\.rvq\.codebook|mm\.a\.code_embd"),
)  # fmt: skip
# The converter of llama.cpp writes this tensor of a folder in one type; llama-quantize does not keep that type.
PROJECTOR_KEEP_RULES = (("projection to text", r"^mm\.input_projection\.weight"),)
GLM5_KEEP_RULES = (
    ("indexer",           r"indexer\.(attn_q_b|attn_k|proj)|indexer_compressor_(gate|ape)"),
    ("state space",       r"ssm_(f_a|f_b|g_a|g_b|beta)"),
    ("small projection",  r"hc_|attn_kv_a_mqa|attn_k_b|attn_v_b"),
)  # fmt: skip
OTHER_KEEP_RULES = (
    # rule                pattern of tensor names in other checkpoints, mainly Hugging Face's
    ("norm",              r"norm\.|_norm$|layernorm|ln_[f\d]+\."),
    ("bias",              r"bias$"),
    ("positions",         r"position_embeddings|wpe\.weight"),
    ("token types",       r"token_type_embeddings"),
    ("router",            r"mlp\.gate\.weight|block_sparse_moe\.gate\.weight|\.router\."),
    ("state space",       r"ssm_a$|ssm_d$|conv1d\.weight"),
)  # fmt: skip


class KeepRules(NamedTuple):
    """The rules that keep tensors of a source, for the names that its kind of file uses.

    gguf_names: whether these are llama.cpp's; dimensions are then counted as ggml counts them. matrices: whether only
    tensors of two dimensions are quantized, as in diffusion models.
    """

    gguf_names: bool
    patterns: Sequence[tuple[str, re.Pattern[str]]]
    matrices: bool = False


def keep_rule(name: str, ndim: int, architecture: str) -> str:
    """The rule by which a tensor of a .gguf file keeps its type, "" if it is quantized."""
    if ndim < 2:
        return "1-D"
    return next((rule for rule, pattern in _compiled(architecture == GLM5) if pattern.search(name)), "")


@cache
def _compiled(glm5: bool) -> list[tuple[str, re.Pattern[str]]]:
    """The rules of .gguf files with their patterns: re.search with text looks each up in a cache, for every tensor."""
    rows = [*KEEP_RULES, *(GLM5_KEEP_RULES if glm5 else ()), ("not a weight", r"(?<!weight)$")]
    return [(rule, re.compile(pattern)) for rule, pattern in rows]


def rules_for(source: Source) -> KeepRules:
    """The keep rules for the names of a source."""
    architecture = str(source.metadata.get(Keys.General.ARCHITECTURE, ""))
    if architecture in diffusion.MODELS:
        patterns = diffusion.keep_patterns(diffusion.MODELS[architecture])
        return KeepRules(False, [*patterns, ("not a weight", re.compile(r"(?<!weight)$"))], matrices=True)
    gguf_names = architecture in ARCHITECTURES or any(map(LAYER.match, source.weights))
    rows = [*KEEP_RULES, *(GLM5_KEEP_RULES if architecture == GLM5 else ()), *(() if gguf_names else OTHER_KEEP_RULES)]
    if architecture == PROJECTOR and not source.is_gguf:
        rows += PROJECTOR_KEEP_RULES
    if any(name.endswith("weight") for name in source.weights):
        rows.append(("not a weight", r"(?<!weight)$"))
    return KeepRules(gguf_names, [(rule, re.compile(pattern)) for rule, pattern in rows])
