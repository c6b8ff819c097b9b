"""Table of docs/several-gpus.md: layers sharded over the GPUs of one host, from results of `-m benchmarks --shard`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import tables

RESULTS = tables.RESULTS.with_name("h100_x2.json")
PARTS = "pairs", "steps", "loads"


def table(path: Path = RESULTS) -> str:
    """A row for each measurement: the time on one GPU, on all of them, and the speed-up."""
    run = json.loads(path.read_text())
    gpus = run["gpus"]
    lines = [
        f"{gpus} {run['device']} of one host, torch {run['torch']}, NCCL {run['nccl']} without NVLS. Products in",
        "CUDA graphs, x and y float16, weights from memory, not from L2; the slower GPU counts:",
        "",
        f"| | format | M | one GPU | {gpus} GPUs | times |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in (row for part in PARTS for row in run[part]):
        times = time(row["one_us"]), time(row["us"]), f"{row['speedup']:.2f}"
        lines.append(f"| {' | '.join([row['what'], row['format'].upper(), str(row.get('M', '')), *times])} |")
    return "\n".join(lines)


def time(us: float) -> str:
    """Microseconds, milliseconds or seconds, with three digits.

    >>> time(45.61), time(12345.6), time(2.5e6)
    ('45.6 us', '12.3 ms', '2.5 s')
    """
    value, unit = (us, "us") if us < 1e3 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{float(f'{value:.3g}'):g} {unit}"
