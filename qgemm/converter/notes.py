"""Sentences for the user about a conversion: tensors that are left out, importances and options without an effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qgemm.codec.search import searched
from qgemm.files.paths import shown
from qgemm.text import names_in_short

from .rules import LAYER_EMBEDDING, OUTPUT, TOKEN_EMBEDDING, Options, Step
from .weight import Source


def notes(source: Source, options: Options, steps: Sequence[Step]) -> Iterator[str]:
    """All sentences about a planned conversion."""
    yield from source.notes
    yield from _overrides_without_effect(options, steps)
    if any(pattern is OUTPUT for pattern in options.keep) and not any(OUTPUT.search(name) for name in source.weights):
        yield "--leave-output-tensor changes nothing: there is no output matrix"
    if options.search and not any(step.quantizes and searched(step.format) for step in steps):
        yield "--search changes nothing: no tensor is quantized to a type that can be searched"
    if options.importance:
        yield from _importances(source, options, steps)


def _overrides_without_effect(options: Options, steps: Sequence[Step]) -> Iterator[str]:
    """Overrides that choose the type of no tensor."""
    chosen = {(step.override[0], step.override[1].name) for step in steps if step.override is not None}
    for pattern, fmt in options.overrides:
        if (pattern, fmt.name) not in chosen:
            step = next(step for step in steps if pattern.search(step.weight.name))
            reason = f"keeps its type ({step.rule})" if step.override is None else "gets the type of another option"
            option = f"--tensor-type {shown(f'{pattern.pattern}={fmt}')}"
            yield f"{option} changes no tensor: {shown(step.weight.name)} {reason}"
    tokens, output = options.ends
    if tokens is not None and (TOKEN_EMBEDDING, tokens.name) not in chosen:
        yield "--token-embedding-type changes no tensor: an option or a rule keeps the token embedding"
    ends = OUTPUT, TOKEN_EMBEDDING, LAYER_EMBEDDING
    if output is not None and not any((end, output.name) in chosen for end in ends):
        yield "--output-tensor-type changes no tensor: another option has chosen the type of the output matrix"


def _importances(source: Source, options: Options, steps: Sequence[Step]) -> Iterator[str]:
    """The tensors that took no importances, and the importances that no tensor took."""
    quantized = [step for step in steps if step.quantizes]
    without = [step.weight.name for step in quantized if step.importance is None]
    text = f"{len(quantized) - len(without)} of {len(quantized)} quantized tensors took importances"
    yield f"{text}, not {names_in_short(without)}" if without else text
    strangers = [name for name in options.importance if name not in source.weights]
    if strangers:
        count = f"{len(strangers)} of the importance matrix's {len(options.importance)} entries are"
        yield f"{count} of no tensor here: {names_in_short(strangers)}"
