"""The report of a conversion: a table for people, a JSON document for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

from qgemm.text import binary_size, columns, json_text, json_value, printable

from .rules import Step

# Outcome of a conversion: the same values; the same codes with rounded scales; rounded to a plain type; quantized for
# the first time, or again. DIFFERENT occurs only in comparisons: blocks that do not derive from the source.
EXACT, SCALES, ROUNDED, QUANTIZED, REQUANTIZED = "exact", "rounded-scale", "rounded", "quantized", "requantized"
DIFFERENT = "different"


class Line(NamedTuple):
    """One tensor: its types, the outcome, and the relative RMS error, None before it is known."""

    name: str
    shape: tuple[int, ...]
    old: str
    new: str
    how: str
    error: float | None
    bpw: float
    nbytes: int
    rule: str = ""


def report_line(step: Step, error: float | None) -> Line:
    """The report line of a step; error: its relative RMS error, None before the conversion."""
    weight, fmt = step.weight, step.format
    return Line(
        weight.name, weight.shape, weight.type, str(fmt), outcome(step, error), error, fmt.bpw, step.nbytes, step.rule
    )


def outcome(step: Step, error: float | None) -> str:
    """The outcome of a step; before the error is known, the worst possible one."""
    if step.copied or error == 0:
        return EXACT
    if step.by_codes:
        return SCALES
    if step.format.plain:
        return ROUNDED
    return REQUANTIZED if step.weight.quantized else QUANTIZED


def relative(error: float, power: float) -> float:
    """The relative RMS error from the sums of squares of the error and of the weights."""
    return sqrt(error / power) if power else inf if error else 0.0


def table(lines: Sequence[Line]) -> str:
    """One row per tensor, for the converter and `qgemm verify`."""
    head = ("tensor", "shape", "from", "to", "bpw", "size", "how", "relative RMS")
    rows = [
        (
            printable(line.name), "x".join(map(str, line.shape)), line.old, line.new, f"{line.bpw:g}",
            binary_size(line.nbytes), line.how, "-" if line.error is None else f"{line.error:.3g}",
        )
        for line in lines
    ]  # fmt: skip
    return columns("<<<<>><>", [head, *rows])


def totals(lines: Sequence[Line], nbytes: int, notes: Sequence[str] = ()) -> list[str]:
    """The totals: tensors by outcome, size before and after, the rules that kept a type or made it fall back, notes."""
    weights = sum(_size(line) for line in lines)
    after = sum(line.nbytes for line in lines)
    bpw = 8 * after / weights if weights else 0.0
    hows = ", ".join(f"{count} {how}" for how, count in Counter(line.how for line in lines).items())
    rules = Counter(line.rule for line in lines if line.rule)
    text = [
        f"{len(lines)} tensors: {hows}",
        f"{binary_size(nbytes)} -> {binary_size(after)} of tensor data, {bpw:.3g} bits per weight",
        f"{sum(rules.values())} of {len(lines)} tensors kept or fell back",
    ]
    text += [f"  {count:>5}  {rule}" for rule, count in rules.most_common()]
    return text + [f"note: {printable(note)}" for note in notes]


def document(
    source: str, target: str, type: str, lines: Sequence[Line], nbytes: int, notes: Sequence[str] = ()
) -> Mapping[str, Any]:
    """The report as a JSON document."""
    after = sum(line.nbytes for line in lines)
    weights = sum(_size(line) for line in lines)
    return {
        "source": source,
        "target": target,
        "type": type,
        "bytes_before": nbytes,
        "bytes_after": after,
        "bpw": 8 * after / weights if weights else 0.0,
        "kept_or_fell_back": sum(bool(line.rule) for line in lines),
        "rules": dict(Counter(line.rule for line in lines if line.rule)),
        "notes": [json_text(note) for note in notes],
        "tensors": [
            {
                "name": json_text(line.name), "shape": list(line.shape), "from": line.old, "to": line.new,
                "how": line.how, "relative_rms": json_value(line.error), "bpw": line.bpw, "bytes": line.nbytes,
                "rule": line.rule,
            }
            for line in lines
        ],
    }  # fmt: skip


def _size(line: Line) -> int:
    size = 1
    for n in line.shape:
        size *= n
    return size
