"""What a conversion did to each tensor: a table for people, a document for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

from qgemm.text import binary_size, columns, json_text, json_value, printable

from .rules import Step

# What becomes of weights: the same values; the same codes, with rounded scales; rounded to a type without blocks;
# quantized for the first time, or again. Only a comparison finds blocks that come from nowhere.
EXACT, SCALES, ROUNDED, QUANTIZED, REQUANTIZED = "exact", "rounded-scale", "rounded", "quantized", "requantized"
DIFFERENT = "different"


class Line(NamedTuple):
    """One tensor: its types, what happened, and the relative RMS error, None before it is known."""

    name: str
    shape: tuple[int, ...]
    old: str
    new: str
    how: str
    error: float | None
    bpw: float
    nbytes: int
    rule: str = ""


def line(step: Step, error: float | None) -> Line:
    """The report line of a step; error: the relative RMS error that it made, None if it is still to be made."""
    weight, fmt = step.weight, step.format
    return Line(
        weight.name, weight.shape, weight.type, str(fmt), outcome(step, error), error, fmt.bpw, step.nbytes, step.rule
    )


def outcome(step: Step, error: float | None) -> str:
    """What becomes of the weights; before the error is known, the worst that is possible."""
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
    """One row a tensor: what both the converter and `qgemm verify` print."""
    head = ("tensor", "shape", "from", "to", "bpw", "size", "how", "relative RMS")
    rows = [
        (
            printable(each.name), "x".join(map(str, each.shape)), each.old, each.new, f"{each.bpw:g}",
            binary_size(each.nbytes), each.how, "-" if each.error is None else f"{each.error:.3g}",
        )
        for each in lines
    ]  # fmt: skip
    return columns("<<<<>><>", [head, *rows])


def totals(lines: Sequence[Line], nbytes: int) -> list[str]:
    """The sums: tensors by what happened, bytes before and after, what was kept or fell back and why."""
    weights = sum(_size(each) for each in lines)
    after = sum(each.nbytes for each in lines)
    bpw = 8 * after / weights if weights else 0.0
    hows = ", ".join(f"{count} {how}" for how, count in Counter(each.how for each in lines).items())
    rules = Counter(each.rule for each in lines if each.rule)
    text = [
        f"{len(lines)} tensors: {hows}",
        f"{binary_size(nbytes)} -> {binary_size(after)} of tensor data, {bpw:.3g} bits per weight",
        f"{sum(rules.values())} of {len(lines)} tensors kept or fell back",
    ]
    return text + [f"  {count:>5}  {rule}" for rule, count in rules.most_common()]


def document(source: str, target: str, type: str, lines: Sequence[Line], nbytes: int) -> Mapping[str, Any]:
    """The report as a JSON document."""
    after = sum(each.nbytes for each in lines)
    weights = sum(_size(each) for each in lines)
    return {
        "source": source,
        "target": target,
        "type": type,
        "bytes_before": nbytes,
        "bytes_after": after,
        "bpw": 8 * after / weights if weights else 0.0,
        "kept_or_fell_back": sum(bool(each.rule) for each in lines),
        "rules": dict(Counter(each.rule for each in lines if each.rule)),
        "tensors": [
            {
                "name": json_text(each.name), "shape": list(each.shape), "from": each.old, "to": each.new,
                "how": each.how, "relative_rms": json_value(each.error), "bpw": each.bpw, "bytes": each.nbytes,
                "rule": each.rule,
            }
            for each in lines
        ],
    }  # fmt: skip


def _size(each: Line) -> int:
    size = 1
    for n in each.shape:
        size *= n
    return size
