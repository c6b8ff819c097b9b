"""The table of docs/engines.md: tokens a second of vLLM, from the results of `python -m benchmarks.engines`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.engines import DENSE, KEY, LONG_PROMPT, MARLIN, OUTPUT, PLUGIN, PROMPT, QGEMM
from benchmarks.report import tables

RESULTS = tables.RESULTS.with_name("engines.json")
ROADS = {
    QGEMM: "`qgemm.vllm`", PLUGIN: "vllm-gguf-plugin's kernels", DENSE: "bfloat16 weights", MARLIN: "AWQ, by Marlin",
}  # fmt: skip


def tokens_a_second(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """The measured speeds, by KEY."""
    return {tuple(row[name] for name in KEY): row["tokens_s"] for row in rows if "tokens_s" in row}


def table(path: Path = RESULTS) -> str:
    """A row for each model and road: tokens a second by number of sequences, prompts, memory."""
    document = json.loads(path.read_text())
    rows: list[dict[str, Any]] = document["rows"]
    speeds = tokens_a_second(rows)
    streams = sorted({row["streams"] for row in rows if row["prompt"] == PROMPT})
    starts = [row for row in rows if "gpu_bytes" in row]
    versions = " and ".join(dict.fromkeys(row["versions"] for row in starts))
    lines = [
        f"{document['device']}, {versions}; bfloat16, random weights.",
        f"Tokens a second of some sequences at once, of {PROMPT} tokens each that {OUTPUT} follow; of prompts of",
        f"{LONG_PROMPT} tokens; GB of a GPU beyond the keys and values, when the engine is ready.",
        "",
        f"| model | types | weights multiplied by | {' | '.join(map(str, streams))} | prompts | GB |",
        f"|---|---|---|{'--:|' * len(streams)}--:|--:|",
    ]
    for row in starts:
        case = row["model"], row["types"], row["road"]
        cells = [speeds.get((*case, count, PROMPT)) for count in streams]
        cells.append(next((value for key, value in speeds.items() if key[:3] == case and key[4] == LONG_PROMPT), None))
        memory = (row["gpu_bytes"] - row["kv_bytes"]) / 1e9
        texts = ["-" if value is None else f"{value:.0f}" for value in cells]
        lines.append(f"| {row['model']} | {row['types']} | {ROADS[row['road']]} | {' | '.join(texts)} | {memory:.1f} |")
    return "\n".join(lines)
