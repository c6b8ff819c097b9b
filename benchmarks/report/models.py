"""Sections of docs/torch.md and docs/recipes.md: whole models, from the results of `python -m benchmarks --model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import tables
from qgemm.cli.model_bench import DENSE, PACKED
from qgemm.cli.model_variants import SAMPLES

RESULTS = tables.RESULTS.with_name("model.json")
MODEL = "llama-3-8b", "q4_k_m"  # the model of docs/recipes.md
COLUMNS = {
    "a16": "prompt a16", "a8": "prompt a8", "a8_g256": "prompt a8_g256", "eager": "eager", "eager_a8": "eager a8",
    "no_products": "eager, no products", "generate": "generate, static cache",
    "graph": "CUDA graph of a step", "compile": "torch.compile", "train": "training",
}  # fmt: skip
assert set(COLUMNS) == set(SAMPLES), "a variant has no column"


def table(path: Path = RESULTS) -> str:
    """A row for each model, dtype, batch and prompt: tokens a second with packed weights, in parentheses dense ones."""
    document = json.loads(path.read_text())
    rows = [row for row in document["rows"] if "tokens_s" in row]
    variants = [variant for variant in COLUMNS if any(row["variant"] == variant for row in rows)]
    speeds = {(case_of(row), row["variant"], row["road"]): row["tokens_s"] for row in rows}
    lines = [
        f"{document['device']}, {settings(rows)}.",
        "Random weights: a .gguf file in `qgemm`'s layers, in parentheses the same model with dense weights of the",
        "dtype of activations; tokens a second.",
        "",
        f"| model | types | x | batch | prompt | {' | '.join(COLUMNS[variant] for variant in variants)} |",
        f"|---|---|---|--:|--:|{'--:|' * len(variants)}",
    ]
    for case in dict.fromkeys(case_of(row) for row in rows):
        cells = (pair(*(speeds.get((case, variant, road)) for road in (PACKED, DENSE))) for variant in variants)
        lines.append(f"| {' | '.join(map(str, case))} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *memory(document["rows"])])


def recipe(variant: str, path: Path = RESULTS) -> str:
    """A sentence on the speed of a recipe by the rows of one variant."""
    document = json.loads(path.read_text())
    rows = [
        row
        for row in document["rows"]
        if row["variant"] == variant and (row["model"], row["types"]) == MODEL and "tokens_s" in row
    ]
    speeds: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["batch"] == 1:
            speeds.setdefault((row["prompt"], row["dtype"]), {})[row["road"]] = row["tokens_s"]
    if not speeds:
        return f"`tools/results/model.json` has no rows of this recipe yet (`--variants {variant}`)."
    cells = (
        f"{number(roads[PACKED])} in {dtype} after {prompt} tokens"
        + (f" (dense {number(roads[DENSE])})" if DENSE in roads else "")
        for (prompt, dtype), roads in speeds.items()
        if PACKED in roads
    )
    return f"Tokens a second of a {MODEL[0]} in {MODEL[1].upper()}, {document['device']}: {', '.join(cells)}."


def loading(path: Path = RESULTS) -> str:
    """A sentence for each model on the time and memory of loading."""
    return "\n".join(memory(json.loads(path.read_text())["rows"]))


def memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each loaded file; the peak of memory where it was measured."""
    for row in rows:
        if row["variant"] == "load" and row["road"] == PACKED:
            peak = f", {row['peak_bytes'] / 1e9:.2f} GB at the peak" if "peak_bytes" in row else ""
            first = f" ({row['first_s']:.1f} s the first time, which compiles kernels)" if "first_s" in row else ""
            yield (
                f"- {row['model']} {row['types']}, {row['layers']} layers: a file of {row['file_bytes'] / 1e9:.2f} GB "
                f"loads in {row['load_s']:.1f} s{first}, {row['weights_bytes'] / 1e9:.2f} GB on the GPU{peak}."
            )


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The cells that identify a line of the table."""
    return row["model"], row["types"], row["dtype"], row["batch"], row["prompt"]


def settings(rows: list[dict[str, Any]]) -> str:
    """The versions of the rows, and settings that differ from torch's defaults."""
    versions = " and ".join(dict.fromkeys(row["versions"] for row in rows))
    notes = dict.fromkeys(row.get("note", "torch's defaults") for row in rows)
    return f"{versions}; {' or '.join(notes)}"


def pair(packed: float | None, dense: float | None) -> str:
    """A cell: the speed with packed weights, in parentheses with dense ones."""
    if packed is None:
        return "-"
    return number(packed) if dense is None else f"{number(packed)} ({number(dense)})"


def number(value: float) -> str:
    """Three digits or all before the point.

    >>> number(17920.4), number(44.33)
    ('17920', '44.3')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
