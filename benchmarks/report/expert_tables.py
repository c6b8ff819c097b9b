"""Table of docs/kernels/experts.md: layers of experts, by `python -m benchmarks --moe`, from the results files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import tables
from benchmarks.results import EXPERTS_HOST, X_TYPES, x_of

RESULTS = tables.RESULTS, tables.RESULTS.with_name("h100.json")  # files without rows of experts are left out
SPEEDS = {"NVIDIA H200": (4.39, 4.8), "NVIDIA H100 80GB HBM3": (3.05, 3.35)}  # TB/s: of a large read; nominal
# us of Marlin MoE on an H20 of nominally 4.0 TB/s: https://github.com/FlagOpen/FlagGems/issues/4350
MARLIN, H20 = {("mixtral-8x7b", 1): 134, ("mixtral-8x7b", 8): 392, ("mixtral-8x7b", 64): 1190}, 4.0
LAYER = "model", "types", "M", "skew"  # a row of the table
BESIDE = {"one_by_one_us": "one by one", "cublas_us": "decoded, cuBLAS", "grouped_mm_us": "grouped_mm bf16"}


def table(paths: tuple[Path, ...] = RESULTS) -> str:
    """A table for each GPU."""
    files = (json.loads(path.read_text()) for path in paths)
    return "\n\n".join("\n".join(lines(results)) for results in files if results.get("experts"))


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The rows of one GPU, and the host's time of a call."""
    head = ["layer", "T", "us", "times reading", "TFLOP/s", *BESIDE.values(), "Marlin, scaled"]
    yield f"{results['device']}, which reads {results['read_gbs'] / 1e3:.2f} TB/s; us, {tables.TYPES_OF_CELLS}:"
    yield ""
    layers: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in results["experts"]:
        layers.setdefault(tuple(row[name] for name in LAYER), {})[x_of(row)] = row
    yield tables.markdown(head, [cells(by_type, results["device"]) for by_type in layers.values()])
    if host := results.get(EXPERTS_HOST):
        yield ""
        yield "Host time of a call on the fast path, us, beside a call of `matmul`:"
        yield ""
        yield tables.markdown(["call", "us", "product", "times"], list(map(host_cells, host)))


def host_cells(row: dict[str, Any]) -> list[str]:
    """The host's time of a call, and over that of a product."""
    return [row["call"], number(row["us"]), number(row["product_us"]), f"{row['us'] / row['product_us']:.2f}"]


def cells(by_type: dict[str, dict[str, Any]], device: str) -> list[str]:
    """One layer by x of each type: its times, and the times of other ways to compute it, of the first type."""
    _, nominal = SPEEDS[device]
    row, rows = next(iter(by_type.values())), [by_type.get(x) for x in X_TYPES]
    marlin = None if row["skew"] else MARLIN.get((row["model"], row["M"]))
    return [
        f"{row['model']} {row['types']}", f"{row['M']}{', skewed' * row['skew']}",
        tables.both(rows, lambda row: number(row["us"])),
        tables.both(rows, lambda row: f"{row['us'] / row['read_us']:.2f}"),
        tables.both(rows, lambda row: number(row["tflops"])),
        *(number(row[name]) if name in row else "" for name in BESIDE),
        number(marlin * H20 / nominal) if marlin else "",
    ]  # fmt: skip


def number(value: float) -> str:
    """Three digits.

    >>> number(12.345), number(1717.4)
    ('12.3', '1717')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
