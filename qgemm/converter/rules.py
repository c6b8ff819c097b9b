"""Which type each tensor gets: the options' word first, then the rules of llama-quantize, as a table.

llama-quantize keeps what suffers most from few bits: vectors, norms, position tables, routers, small state-space
parameters. It gives the output matrix more bits, and a row that no block fits is stored as F16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.errors import QgemmError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS, format_named, written

from .weight import Source, Weight, takes

F16, Q8_0, Q6_K = FORMATS["f16"], FORMATS["q8_0"], FORMATS["q6_k"]

KEPT = (
    # rule                what the name holds
    ("norm",              r"norm\.|_norm$|layernorm|ln_[f\d]+\."),
    ("bias",              r"bias$"),
    ("positions",         r"position_embd|position_embeddings|wpe\.weight|attn_rel_b"),
    ("token types",       r"token_types|token_type_embeddings"),
    ("router",            r"ffn_gate_inp|mlp\.gate\.weight|block_sparse_moe\.gate\.weight|\.router\."),
    ("state space",       r"ssm_conv1d|ssm_a$|ssm_d$|conv1d\.weight|shortconv\.conv"),
    ("small projection",  r"altup|laurel|per_layer_model_proj"),
    ("time mix",          r"time_mix_(first|w0|w1|w2|v0|v1|v2|a0|a1|a2|g1|g2|decay_w1|decay_w2|lerp_fused)"),
)  # fmt: skip
OUTPUT = re.compile(r"^output\.weight$|(^|\.)lm_head\.weight$")
TOKENS = re.compile(r"^token_embd\.weight$|embed_tokens\.weight$|word_embeddings\.weight$|wte\.weight$")


class Options(NamedTuple):
    """What may be said about types: see `qgemm convert --help`.

    search: look for better scales than the encoders', for all tensors; those with an importance get it anyway.
    """

    type: Format
    overrides: Sequence[tuple[re.Pattern[str], Format]] = ()
    keep: Sequence[re.Pattern[str]] = ()
    pure: bool = False
    allow_requantize: bool = False
    search: bool = False
    importance: Mapping[str, Floats] = MappingProxyType({})


class Step(NamedTuple):
    """What becomes of a tensor, and the rule by which it was kept or fell back, "" where it got the type asked for."""

    weight: Weight
    format: Format
    rule: str = ""

    @property
    def copied(self) -> bool:
        """Whether the bytes stay."""
        return self.weight.tensor is not None and self.weight.tensor.format == self.format

    @property
    def by_codes(self) -> bool:
        """Whether codes are copied, and scales alone may be rounded."""
        return not self.copied and takes(self.format, self.weight.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.weight.size // self.format.weights * self.format.block_bytes


def planned(source: Source, options: Options) -> list[Step]:
    """A step for each tensor; QgemmError for what must not or cannot be done."""
    named = any(name.endswith("weight") for name in source.weights)
    head = _head(source) if not options.pure and not options.type.plain else None
    steps = []
    for weight in source.weights.values():
        step = _step(weight, options, head, named)
        if reason := _refused(step, options):
            raise QgemmError(f"{shown_path(source.path)}: tensor {shown(weight.name)}: {reason}")
        steps.append(step)
    return steps


def _step(weight: Weight, options: Options, head: str | None, named: bool) -> Step:
    for pattern in options.keep:
        if pattern.search(weight.name):
            return _kept(weight, "--keep")
    for pattern, fmt in options.overrides:
        if pattern.search(weight.name):
            return _fitting(weight, fmt)
    if weight.values is None:
        return _kept(weight, "no decoder" if weight.quantized else "integers")
    if len(weight.shape) < 2:
        return _kept(weight, "1-D")
    for rule, pattern_text in KEPT:
        if re.search(pattern_text, weight.name):
            return _kept(weight, rule)
    if named and not weight.name.endswith("weight"):
        return _kept(weight, "not a weight")
    if weight.name == head and options.type != Q8_0:
        better = Q6_K if Q6_K.encode is not None and weight.shape[-1] % Q6_K.weights == 0 else Q8_0
        return _fitting(weight, better)._replace(rule=f"output matrix: {better}")
    return _fitting(weight, options.type)


def _kept(weight: Weight, rule: str) -> Step:
    """The weight in the type that it has, or where a .gguf file has no such type, in F16, which holds it."""
    return Step(weight, F16 if weight.tensor is None else weight.tensor.format, rule)


def _fitting(weight: Weight, fmt: Format) -> Step:
    if weight.shape[-1] % fmt.weights == 0:
        return Step(weight, fmt)
    return Step(weight, F16, f"row length not a multiple of {fmt.weights}: F16")


def _head(source: Source) -> str | None:
    """The name of the matrix that makes logits: the output's or, where it is tied to it, the token embedding's."""
    for pattern in (OUTPUT, TOKENS):
        for name in source.weights:
            if pattern.search(name):
                return name
    return None


def _refused(step: Step, options: Options) -> str:
    """Why a step cannot be done, or ""."""
    weight, fmt = step.weight, step.format
    if 0 in weight.shape:
        return f"is empty: shape {weight.shape}"
    if step.copied:
        return ""
    if weight.values is None:
        return f"{weight.type} cannot be converted, it has no decoder" if weight.quantized else "holds integers"
    if weight.tensor is None and step.rule in ("--keep", "no decoder"):
        return f"{weight.type} cannot be kept, GGUF has no such type"
    if fmt.encode is None:
        return f"{fmt} has no encoder; types that can be written: {written()}"
    closest = weight.irregular and fmt == Q8_0  # the least that quantizing again can lose
    if weight.quantized and not (fmt.plain or step.by_codes or closest or options.allow_requantize):
        return f"is {weight.type}: quantizing it again, to {fmt}, loses twice, and needs --allow-requantize"
    return ""


def override(text: str) -> tuple[re.Pattern[str], Format]:
    """REGEX=TYPE."""
    pattern, equals, name = text.rpartition("=")
    if not equals:
        raise QgemmError(f"{text!r} is not REGEX=TYPE")
    try:
        return re.compile(pattern), format_named(name, to_write=True)
    except re.error as error:
        raise QgemmError(f"{pattern!r} is not a regular expression: {error}") from None
