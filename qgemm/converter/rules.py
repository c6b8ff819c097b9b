"""The type of each tensor: the rules of llama-quantize as a table, then the user's options.

llama-quantize keeps the tensors that suffer most from few bits: vectors, norms, position tables, routers, small
state-space parameters. No override changes those, since inference engines read them in no other type. It gives the
output matrix more bits, and stores rows that are no multiple of the block as F16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from gguf import GGUFType
from gguf.constants import Keys

from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.codec.search import searched
from qgemm.errors import QgemmError
from qgemm.files.imatrix import Importance, Importances, importances_of_arrays
from qgemm.files.paths import shown, shown_path
from qgemm.formats import FORMATS, written
from qgemm.text import names_in_short

from .checkpoints.write import LAYOUTS, Layout
from .keep_rules import KeepRules, rules_for
from .mixture import (
    EMBEDDINGS,
    Model,
    choose_types,
    fitting,
    needs_importance,
)
from .type_names import one_format
from .weight import Source, Weight, codes_fit

F16, Q8_0, Q6_K = FORMATS["f16"], FORMATS["q8_0"], FORMATS["q6_k"]

OUTPUT = re.compile(r"^output\.weight$|(^|\.)lm_head\.weight$")
TOKEN_EMBEDDING = re.compile(r"^token_embd\.weight$|embed_tokens\.weight$|word_embeddings\.weight$|wte\.weight$")
LAYER_EMBEDDING = re.compile(r"^per_layer_token_embd\.weight$")
CONVERTED_TYPES = ("f32", "f16", "bf16", "q8_0")

Override = tuple[re.Pattern[str], Format]


class Ends(NamedTuple):
    """Formats given for the token embedding and the output matrix; None where not given."""

    tokens: Format | None = None
    output: Format | None = None


class Options(NamedTuple):
    """The options that choose types: see `qgemm convert --help`.

    search: search for better scales than the encoders', for all tensors; one with an importance is always searched.
    """

    type: Format
    overrides: Sequence[tuple[re.Pattern[str], Format]] = ()
    keep: Sequence[re.Pattern[str]] = ()
    pure: bool = False
    allow_requantize: bool = False
    search: bool = False
    importance: Mapping[str, Floats] = MappingProxyType({})
    mixture: str = ""  # a file type of llama-quantize (mixture.py), whose default is `type`
    keep_split: bool = False  # one file per shard of the source
    ends: Ends = Ends()
    layout: str = ""  # layout of the checkpoint to write: awq, gptq, compressed-tensors
    recipe: Mapping[str, Format] = MappingProxyType({})  # types by tensor name, for tensors that nothing else decides
    split_size: int = 0  # the most bytes of tensors in a shard; 0: no limit


class Step(NamedTuple):
    """The planned conversion of a tensor.

    rule: the reason why it was kept or fell back, "" if it gets the requested type. override: the one that chose the
    type. importance: of its columns, where an encoder weighs errors by it.
    """

    weight: Weight
    format: Format
    rule: str = ""
    override: Override | None = None
    importance: Importance | None = None

    @property
    def copied(self) -> bool:
        """Whether the bytes are copied."""
        return self.weight.tensor is not None and self.weight.tensor.format == self.format

    @property
    def by_codes(self) -> bool:
        """Whether codes are copied and at most scales are rounded."""
        return not self.copied and codes_fit(self.format, self.weight.codes)

    @property
    def quantizes(self) -> bool:
        """Whether weights are rounded to new codes: no bytes or codes are copied, and the type is not plain."""
        return not (self.copied or self.by_codes or self.format.plain)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.weight.size // self.format.weights * self.format.block_bytes


def plan(source: Source, options: Options) -> list[Step]:
    """A step for each tensor; QgemmError for conversions that are impossible or need an option."""
    options = _converted_types(source, options)
    _check_patterns(source, options)
    options = options._replace(overrides=[*_with_ends(source, options)])
    rules = rules_for(source)
    head = _logits_matrix(source) if not (options.pure or options.type.plain or options.layout) else None
    types = {} if options.pure or not options.mixture else _mixture_types(source, options, rules)
    steps = []
    for weight in source.weights.values():
        step = _step(weight, options, head, rules, types)
        if options.layout in LAYOUTS:
            step = _in_layout(LAYOUTS[options.layout], step)
        importance = importance_of(weight, options.importance) if step.quantizes else None
        if reason := _refusal(step, options) or _importance_refusal(step, importance, options):
            raise QgemmError(f"{shown_path(source.path)}: tensor {shown(weight.name)}: {reason}")
        steps.append(step._replace(importance=importance if searched(step.format) else None))
    return steps


def free_weights(source: Source, options: Options) -> list[Weight]:
    """The tensors whose type no rule and no other option decides."""
    options = options._replace(overrides=[*_with_ends(source, options)])
    rules = rules_for(source)
    return [weight for weight in source.weights.values() if _fixed_step(weight, options, rules) is None]


def candidate_steps(weight: Weight, types: Sequence[Format], options: Options) -> list[Step]:
    """The steps of a tensor that are possible in these types; F16, which needs no whole blocks, where there is none."""
    steps = []
    for fmt in types:
        step = Step(weight, fmt)
        importance = importance_of(weight, options.importance) if step.quantizes else None
        if not (_refusal(step, options) or _importance_refusal(step, importance, options)):
            steps.append(step._replace(importance=importance if searched(fmt) else None))
    return steps or [Step(weight, F16)]


def dimensions(shape: Sequence[int]) -> int:
    """Dimensions as ggml counts them: leading ones of size 1 do not count; a single row has one. Rows are last."""
    return max((len(shape) - axis for axis, size in enumerate(shape) if size != 1), default=1)


def _in_layout(layout: Layout, step: Step) -> Step:
    """The step adapted to a checkpoint's layout: F16 for formats that it lacks, or shapes that do not fill words."""
    if step.format.plain:
        return step
    reason = layout.refusal(step.format, step.weight.shape) if layout.holds(step.format) else step.rule
    return step._replace(format=F16, rule=f"{reason}: F16") if reason else step


def _converted_types(source: Source, options: Options) -> Options:
    """The options, without the rules of a file type where llama.cpp's converter writes the file: adapters, projectors.

    Other types than that converter's are refused: rows of an adapter's B have the length of its rank, 8 or 16.
    """
    kind = source.metadata.get(Keys.General.TYPE)
    if kind != GGUFType.ADAPTER and (kind != GGUFType.MMPROJ or source.is_gguf):
        return options
    name = options.mixture or str(options.type).lower()
    if name not in CONVERTED_TYPES:
        subject = "an adapter" if kind == GGUFType.ADAPTER else "a projector"
        raise QgemmError(
            f"{shown_path(source.path)}: {subject} is written as {', '.join(CONVERTED_TYPES)}, not as {name}"
        )
    return options._replace(mixture="")


def _check_patterns(source: Source, options: Options) -> None:
    """Refuse an option whose pattern matches no tensor: it is misspelt, or meant for another file."""
    # OUTPUT may match nothing: a tied output matrix is no tensor.
    patterns = [("--keep", pattern, "") for pattern in options.keep if pattern is not OUTPUT]
    patterns += [("--tensor-type", pattern, f"={fmt}") for pattern, fmt in options.overrides]
    for option, pattern, rest in patterns:
        if not any(map(pattern.search, source.weights)):
            raise QgemmError(
                f"{shown_path(source.path)}: {option} {shown(pattern.pattern + rest)} fits no tensor's name"
            )
    if options.importance and not any(name in source.weights for name in options.importance):
        names = f"it has {names_in_short(options.importance)}, the tensors are {names_in_short(source.weights)}"
        raise QgemmError(f"{shown_path(source.path)}: --imatrix: the importance matrix is of other tensors: {names}")


def _with_ends(source: Source, options: Options) -> Iterator[Override]:
    """All overrides, including those of options.ends; QgemmError if the source lacks the matrix of one of these.

    The ends precede other overrides, but follow them for per-layer token tables and for a tied token embedding.
    """
    tokens, output = options.ends
    has_output = any(map(OUTPUT.search, source.weights))
    tied = not has_output and not options.pure and any(map(TOKEN_EMBEDDING.search, source.weights))
    for option, pattern, fmt, exists in (
        ("--token-embedding-type", TOKEN_EMBEDDING, tokens, any(map(TOKEN_EMBEDDING.search, source.weights))),
        ("--output-tensor-type", OUTPUT, output, has_output or tied),
    ):
        if fmt is not None and not exists:
            raise QgemmError(f"{shown_path(source.path)}: {option}: no tensor's name is one of those")
        if fmt is not None:
            yield pattern, fmt
    yield from options.overrides
    if tokens is not None:
        yield LAYER_EMBEDDING, tokens
    if output is not None and tied:
        yield from ((pattern, output) for pattern in (TOKEN_EMBEDDING, LAYER_EMBEDDING))


def _mixture_types(source: Source, options: Options, rules: KeepRules) -> dict[str, str]:
    """The types that a file type gives to the tensors that nothing else decides, by name.

    {} for names other than a .gguf file's where the file type is named like a format, and thus needs no mixture rules.
    """
    if not rules.gguf_names:
        if options.mixture in FORMATS:
            return {}
        raise QgemmError(
            f"{shown_path(source.path)}: {options.mixture} chooses types by the names of tensors in a .gguf file "
            f"(blk.0.attn_v.weight), which this has not; convert it with --like BASE.gguf, or to one type, e.g. q4_0"
        )
    quantized = [weight.name for weight in source.weights.values() if _fixed_step(weight, options, rules) is None]
    shapes = {name: weight.shape for name, weight in source.weights.items()}
    model = Model.from_metadata(source.metadata)
    return choose_types(options.mixture, model, shapes, quantized, bool(options.importance), options.keep_split)


def _fixed_step(weight: Weight, options: Options, rules: KeepRules) -> Step | None:
    """The step of a tensor that a rule keeps or an override names, None for others."""
    for pattern in options.keep:
        if pattern.search(weight.name):
            return _keep_step(weight, "--keep")
    if weight.values is None and not weight.quantized:
        return _keep_step(weight, "integers")
    if (dimensions(weight.shape) if rules.gguf_names else len(weight.shape)) < 2:
        return _keep_step(weight, "1-D")
    if rules.matrices and len(weight.original or weight.shape) > 2:
        return _keep_step(weight, "no matrix")
    for rule, pattern in rules.patterns:
        if pattern.search(weight.name):
            return _keep_step(weight, rule)
    for override in options.overrides:
        if override[0].search(weight.name):
            return Step(weight, override[1], override=override)
    if options.layout and not options.pure:
        for pattern, rule in ((OUTPUT, "output matrix"), (TOKEN_EMBEDDING, "token embedding")):
            if pattern.search(weight.name):
                return _keep_step(weight, rule)
    return _keep_step(weight, "no decoder") if weight.values is None else None


def _fallback(weight: Weight, fmt: Format) -> Step:
    """In a file type: the type, or llama-quantize's substitute for rows that are no multiple of its block."""
    substitute = FORMATS[fitting(fmt.name, weight.shape[-1])]
    return Step(
        weight, substitute, "" if substitute == fmt else f"row length not a multiple of {fmt.weights}: {substitute}"
    )


def _step(weight: Weight, options: Options, head: str | None, rules: KeepRules, types: Mapping[str, str]) -> Step:
    fixed = _fixed_step(weight, options, rules)
    if fixed is not None:
        return fixed
    if weight.name in options.recipe:
        return Step(weight, options.recipe[weight.name])
    if weight.name in types:
        fmt = FORMATS[types[weight.name]]
        reason = options.mixture.upper()
        if weight.name == head:
            reason = "output matrix"
        elif weight.shape[-1] % options.type.weights:
            reason = f"row length not a multiple of {options.type.weights}"
        return Step(weight, fmt, "" if fmt == options.type else f"{reason}: {fmt}")
    if weight.name == head and options.type != Q8_0:
        better = Q6_K if Q6_K.encode is not None and weight.shape[-1] % Q6_K.weights == 0 else Q8_0
        return _fitting(weight, better)._replace(rule=f"output matrix: {better}")
    return (_fallback if options.mixture else _fitting)(weight, options.type)


def _keep_step(weight: Weight, rule: str) -> Step:
    """The step that keeps the tensor's type; F16, which holds it, where GGUF has no such type."""
    fmt = F16 if weight.tensor is None else weight.tensor.format
    return Step(weight, weight.kept_as or fmt, rule)


def _fitting(weight: Weight, fmt: Format) -> Step:
    if weight.shape[-1] % fmt.weights == 0:
        return Step(weight, fmt)
    return Step(weight, F16, f"row length not a multiple of {fmt.weights}: F16")


def _logits_matrix(source: Source) -> str | None:
    """The name of the matrix that computes logits: the output matrix or, where tied, the token embedding."""
    for pattern in (OUTPUT, TOKEN_EMBEDDING):
        for name in source.weights:
            if pattern.search(name):
                return name
    return None


def _refusal(step: Step, options: Options) -> str:
    """Why a step cannot be done, "" if it can."""
    weight, fmt = step.weight, step.format
    if 0 in weight.shape:
        return f"is empty: shape {weight.shape}; --drop leaves it out"
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
    closest = weight.irregular and fmt == Q8_0  # Q8_0 loses least when quantizing again
    if weight.quantized and not (fmt.plain or step.by_codes or closest or options.allow_requantize):
        return f"is {weight.type}: quantizing it again, to {fmt}, loses twice, and needs --allow-requantize"
    return ""


def _importance_refusal(step: Step, importance: Importance | None, options: Options) -> str:
    """Why a step cannot be done with the importance of its tensor or without one, "" if it can."""
    weight, fmt = step.weight, step.format
    if not step.quantizes:
        return ""
    if importance is None:
        needed = needs_importance(weight.name, fmt.name, options.mixture)
        return f"{fmt} needs an importance matrix (--imatrix) that has this tensor" if needed else ""
    if importance.size != columns(weight):
        matrices = prod(weight.shape[:-2])
        return f"its importance has {importance.size} values, not those of {matrices} x {weight.shape[-1]} columns"
    return ""


def importance_of(weight: Weight, matrix: Mapping[str, Floats]) -> Importance | None:
    """The importance of a tensor's columns, None if there is none.

    A token embedding's may have another size, since it is no mean over activations; it is ignored then.
    """
    importances = matrix if isinstance(matrix, Importances) else importances_of_arrays(matrix)
    importance = importances.importance(weight.name)
    if importance is not None and weight.name in EMBEDDINGS and importance.size != columns(weight):
        return None
    return importance


def columns(weight: Weight) -> int:
    """The columns of all matrices of a tensor together."""
    return prod(weight.shape[:-2]) * weight.shape[-1]


def parse_override(text: str) -> Override:
    """Parse REGEX=TYPE."""
    pattern, equals, name = text.rpartition("=")
    if not equals:
        raise QgemmError(f"{text!r} is not REGEX=TYPE")
    try:
        return re.compile(pattern), one_format(name)
    except re.error as error:
        raise QgemmError(f"{pattern!r} is not a regular expression: {error}") from None
