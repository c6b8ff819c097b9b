"""Which type each tensor gets: the rules of llama-quantize, as a table, then the options' word.

llama-quantize keeps what suffers most from few bits: vectors, norms, position tables, routers, small state-space
parameters; no override reaches those, since inference engines read them in no other type. It gives the output matrix
more bits, and a row that no block fits is stored as F16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from gguf.constants import MODEL_ARCH_NAMES, Keys

from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.errors import QgemmError, UnsupportedError
from qgemm.files.imatrix import Importance, Importances, of_arrays
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS, format_named, written

from .checkpoints.write import LAYOUTS, Layout
from .mixture import ALIASES, EMBEDDINGS, FILE_TYPES, GLM5, LAYER, MIXTURES, Model, chosen, fitting, needs_importance
from .weight import Source, Weight, takes

F16, Q8_0, Q6_K = FORMATS["f16"], FORMATS["q8_0"], FORMATS["q6_k"]

KEPT = (
    # rule                what the name of a tensor of a .gguf file holds (llama.cpp 0c1e57098, src/llama-quant.cpp)
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
KEPT_OF_GLM5 = (
    ("indexer",           r"indexer\.(attn_q_b|attn_k|proj)|indexer_compressor_(gate|ape)"),
    ("state space",       r"ssm_(f_a|f_b|g_a|g_b|beta)"),
    ("small projection",  r"hc_|attn_kv_a_mqa|attn_k_b|attn_v_b"),
)  # fmt: skip
KEPT_ELSEWHERE = (
    # rule                the same in the names of other checkpoints, Hugging Face's above all
    ("norm",              r"norm\.|_norm$|layernorm|ln_[f\d]+\."),
    ("bias",              r"bias$"),
    ("positions",         r"position_embeddings|wpe\.weight"),
    ("token types",       r"token_type_embeddings"),
    ("router",            r"mlp\.gate\.weight|block_sparse_moe\.gate\.weight|\.router\."),
    ("state space",       r"ssm_a$|ssm_d$|conv1d\.weight"),
)  # fmt: skip
OUTPUT = re.compile(r"^output\.weight$|(^|\.)lm_head\.weight$")
TOKENS = re.compile(r"^token_embd\.weight$|embed_tokens\.weight$|word_embeddings\.weight$|wte\.weight$")


TOKENS_OF_LAYERS = re.compile(r"^per_layer_token_embd\.weight$")

ARCHITECTURES = frozenset(MODEL_ARCH_NAMES.values())  # whose tensors have llama.cpp's names

Override = tuple[re.Pattern[str], Format]


class Rules(NamedTuple):
    """What keeps a tensor of a source, by the names that its kind of file has.

    model: whether those are llama.cpp's. There dimensions are counted as ggml counts them.
    """

    model: bool
    kept: Sequence[tuple[str, re.Pattern[str]]]


class Ends(NamedTuple):
    """Formats that are said for the token embedding and the output matrix; None where nothing is."""

    tokens: Format | None = None
    output: Format | None = None


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
    mixture: str = ""  # a file type of llama-quantize (mixture.py), of which `type` is the default
    keep_split: bool = False  # a file for each of the source's shards
    ends: Ends = Ends()
    layout: str = ""  # of a checkpoint that is written: awq, gptq, compressed-tensors


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
    _check_patterns(source, options)
    options = options._replace(overrides=[*_of_ends(source, options)])
    rules = _rules(source)
    head = _head(source) if not (options.pure or options.type.plain or options.layout) else None
    types = {} if options.pure or not options.mixture else _mixed(source, options, rules)
    steps = []
    for weight in source.weights.values():
        step = _step(weight, options, head, rules, types)
        if options.layout:
            step = _stored_by(LAYOUTS[options.layout], step)
        if reason := _refused(step, options) or _unimportant(step, options):
            raise QgemmError(f"{shown_path(source.path)}: tensor {shown(weight.name)}: {reason}")
        steps.append(step)
    return steps


def dimensions(shape: Sequence[int]) -> int:
    """Dimensions as ggml counts them: without leading ones of size 1, rows last; of a row alone one."""
    return max((len(shape) - axis for axis, size in enumerate(shape) if size != 1), default=1)


def _stored_by(layout: Layout, step: Step) -> Step:
    """The step in what a checkpoint holds: F16 for blocks of other formats, and for matrices that fill no words."""
    if step.format.plain:
        return step
    reason = layout.refusal(step.format, step.weight.shape) if layout.holds(step.format) else step.rule
    return Step(step.weight, F16, f"{reason}: F16") if reason else step


def keeps(name: str, ndim: int, architecture: str) -> str:
    """The rule by which a tensor of a .gguf file stays as it is, "" if it is quantized."""
    rows = [*KEPT, *(KEPT_OF_GLM5 if architecture == GLM5 else ()), ("not a weight", r"(?<!weight)$")]
    return "1-D" if ndim < 2 else next((rule for rule, pattern in rows if re.search(pattern, name)), "")


def _rules(source: Source) -> Rules:
    """The rules for the names of a source."""
    architecture = str(source.metadata.get(Keys.General.ARCHITECTURE, ""))
    model = architecture in ARCHITECTURES or any(map(LAYER.match, source.weights))
    rows = [*KEPT, *(KEPT_OF_GLM5 if architecture == GLM5 else ()), *(() if model else KEPT_ELSEWHERE)]
    if any(name.endswith("weight") for name in source.weights):
        rows.append(("not a weight", r"(?<!weight)$"))
    return Rules(model, [(rule, re.compile(pattern)) for rule, pattern in rows])


def _check_patterns(source: Source, options: Options) -> None:
    """Refuse an option for tensors of which there are none: its name is misspelt, or the file another one."""
    said = [("--keep", pattern, "") for pattern in options.keep if pattern is not OUTPUT]  # tied, it is no tensor
    said += [("--tensor-type", pattern, f"={fmt}") for pattern, fmt in options.overrides]
    for option, pattern, rest in said:
        if not any(map(pattern.search, source.weights)):
            raise QgemmError(
                f"{shown_path(source.path)}: {option} {shown(pattern.pattern + rest)} fits no tensor's name"
            )


def _of_ends(source: Source, options: Options) -> Iterator[Override]:
    """All overrides, with those of options.ends: before the others; after them for the table of tokens of each layer,
    and for a token embedding that is the output matrix as well. QgemmError if there is no such tensor.
    """
    tokens, output = options.ends
    has_output = any(map(OUTPUT.search, source.weights))
    tied = not has_output and not options.pure and any(map(TOKENS.search, source.weights))
    for option, pattern, fmt, there in (
        ("--token-embedding-type", TOKENS, tokens, any(map(TOKENS.search, source.weights))),
        ("--output-tensor-type", OUTPUT, output, has_output or tied),
    ):
        if fmt is not None and not there:
            raise QgemmError(f"{shown_path(source.path)}: {option}: no tensor's name is one of those")
        if fmt is not None:
            yield pattern, fmt
    yield from options.overrides
    if tokens is not None:
        yield TOKENS_OF_LAYERS, tokens
    if output is not None and tied:
        yield from ((pattern, output) for pattern in (TOKENS, TOKENS_OF_LAYERS))


def _mixed(source: Source, options: Options, rules: Rules) -> dict[str, str]:
    """The types that a file type gives the tensors for which nothing else is said, by their names in a .gguf file.

    Without such names, where no rule of a mixture speaks of a tensor, {} for a file type that is called after a type.
    """
    if not rules.model:
        if options.mixture in FORMATS:
            return {}
        raise QgemmError(
            f"{shown_path(source.path)}: {options.mixture} chooses types by the names of tensors in a .gguf file "
            f"(blk.0.attn_v.weight), which this has not; convert it with --like BASE.gguf, or to one type, e.g. q4_0"
        )
    quantized = [weight.name for weight in source.weights.values() if _said(weight, options, rules) is None]
    shapes = {name: weight.shape for name, weight in source.weights.items()}
    model = Model.of(source.metadata)
    return chosen(options.mixture, model, shapes, quantized, bool(options.importance), options.keep_split)


def _said(weight: Weight, options: Options, rules: Rules) -> Step | None:
    """What becomes of a tensor that a rule keeps or an override names, None of the others."""
    for pattern in options.keep:
        if pattern.search(weight.name):
            return _kept(weight, "--keep")
    if weight.values is None and not weight.quantized:
        return _kept(weight, "integers")
    if (dimensions(weight.shape) if rules.model else len(weight.shape)) < 2:
        return _kept(weight, "1-D")
    for rule, kept in rules.kept:
        if kept.search(weight.name):
            return _kept(weight, rule)
    for pattern, fmt in options.overrides:
        if pattern.search(weight.name):
            shorter = _fallback(weight, fmt) if options.mixture else Step(weight, fmt)
            return Step(weight, fmt) if shorter.format == F16 else shorter  # what was asked for is no F16 unnoticed
    if options.layout and not options.pure:
        for pattern, what in ((OUTPUT, "output matrix"), (TOKENS, "token embedding")):
            if pattern.search(weight.name):
                return _kept(weight, what)
    return _kept(weight, "no decoder") if weight.values is None else None


def _fallback(weight: Weight, fmt: Format) -> Step:
    """In a file type: the type, or what llama-quantize takes for rows that it does not fit."""
    found = FORMATS[fitting(fmt.name, weight.shape[-1])]
    return Step(weight, found, "" if found == fmt else f"row length not a multiple of {fmt.weights}: {found}")


def _step(weight: Weight, options: Options, head: str | None, rules: Rules, types: Mapping[str, str]) -> Step:
    said = _said(weight, options, rules)
    if said is not None:
        return said
    if weight.name in types:
        fmt = FORMATS[types[weight.name]]
        why = options.mixture.upper()
        if weight.name == head:
            why = "output matrix"
        elif weight.shape[-1] % options.type.weights:
            why = f"row length not a multiple of {options.type.weights}"
        return Step(weight, fmt, "" if fmt == options.type else f"{why}: {fmt}")
    if weight.name == head and options.type != Q8_0:
        better = Q6_K if Q6_K.encode is not None and weight.shape[-1] % Q6_K.weights == 0 else Q8_0
        return _fitting(weight, better)._replace(rule=f"output matrix: {better}")
    return (_fallback if options.mixture else _fitting)(weight, options.type)


def _kept(weight: Weight, rule: str) -> Step:
    """The weight in the type that it has, or where a .gguf file has no such type, in F16, which holds it."""
    own = F16 if weight.tensor is None else weight.tensor.format
    return Step(weight, weight.kept_as or own, rule)


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
    if weight.shape[-1] % fmt.weights:
        return f"rows of {weight.shape[-1]} weights are no whole blocks of {fmt}, which have {fmt.weights}"
    closest = weight.irregular and fmt == Q8_0  # the least that quantizing again can lose
    if weight.quantized and not (fmt.plain or step.by_codes or closest or options.allow_requantize):
        return f"is {weight.type}: quantizing it again, to {fmt}, loses twice, and needs --allow-requantize"
    return ""


def _unimportant(step: Step, options: Options) -> str:
    """Why a step cannot be done with the importance matrix that there is, or is not, or ""."""
    weight, fmt = step.weight, step.format
    if step.copied or step.by_codes or fmt.plain:
        return ""
    found = importance_of(weight, options)
    if found is None:
        needed = needs_importance(weight.name, fmt.name, options.mixture)
        return f"{fmt} needs an importance matrix (--imatrix) that has this tensor" if needed else ""
    if found.size != columns(weight):
        matrices = prod(weight.shape[:-2])
        return f"its importance has {found.size} values, not those of {matrices} x {weight.shape[-1]} columns"
    return ""


def importance_of(weight: Weight, options: Options) -> Importance | None:
    """The importance of a tensor's columns, None if there is none.

    That of a token embedding may be of another size, since it is no mean over activations: then it is passed over.
    """
    known = options.importance
    found = (known if isinstance(known, Importances) else of_arrays(known)).importance(weight.name)
    if found is not None and weight.name in EMBEDDINGS and found.size != columns(weight):
        return None
    return found


def columns(weight: Weight) -> int:
    """The columns of all matrices of a tensor."""
    return prod(weight.shape[:-2]) * weight.shape[-1]


def asked(kind: str | Format) -> tuple[Format, str]:
    """The type that is asked for, and the file type that mixes it with others, "" if none does."""
    if isinstance(kind, str):
        name = ALIASES.get(kind.lower(), kind.lower())
        if name in FILE_TYPES:
            return FORMATS[FILE_TYPES[name].default], name
    try:
        return format_named(kind, to_write=True), ""
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; file types that mix them: {', '.join(MIXTURES).upper()}") from None


def override(text: str) -> tuple[re.Pattern[str], Format]:
    """REGEX=TYPE."""
    pattern, equals, name = text.rpartition("=")
    if not equals:
        raise QgemmError(f"{text!r} is not REGEX=TYPE")
    try:
        return re.compile(pattern), format_named(name, to_write=True)
    except re.error as error:
        raise QgemmError(f"{pattern!r} is not a regular expression: {error}") from None
