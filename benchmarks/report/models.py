"""Table of docs/torch.md: whole models that generate text, from the results of `python -m benchmarks --model`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.model import DENSE, PACKED
from benchmarks.report import tables

RESULTS = tables.RESULTS.with_name("model.json")
CELLS = "prompt_tokens_s", "tokens_s", "graph_tokens_s"


def table(path: Path = RESULTS) -> str:
    """A row for each model, batch and prompt: tokens a second with packed weights, in parentheses with dense ones."""
    results = json.loads(path.read_text())
    by_case = {(row["model"], row["road"], row["batch"], row["prompt"]): row for row in results["rows"]}
    cases = [key for key in by_case if key[1] == PACKED and key[2]]
    lines = [
        f"{results['device']}, {results['versions']}. Random weights: a .gguf file of Q4_K_M in `qgemm`'s layers, in",
        f"parentheses {DENSE}; tokens a second.",
        "",
        "| model | batch | prompt | reading the prompt | eager | CUDA graph of a step |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for model, _, batch, prompt in cases:
        packed, dense = (by_case[model, road, batch, prompt] for road in (PACKED, DENSE))
        cells = (f"{number(packed[cell])} ({number(dense[cell])})" for cell in CELLS)
        lines.append(f"| {model} | {batch} | {prompt} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", " ".join(memory(results["rows"]))])


def memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence on the memory of each whole model."""
    for row in rows:
        if "load_s" in row and row["road"] == PACKED and row["layers"] > 2:
            more = row["weights_bytes"] / row["file_bytes"] - 1
            yield (
                f"{row['model']}: a file of {row['file_bytes'] / 1e9:.2f} GB, {more:.1%} more on the GPU; 16 bits a "
                f"weight would need {2 * row['weights'] / 1e9:.1f} GB."
            )


def number(value: float) -> str:
    """Three digits or all before the point.

    >>> number(17920.4), number(44.33)
    ('17920', '44.3')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
