"""Table of docs/kernels/experts.md: layers of experts, from rows of `qgemm bench --moe` in the results files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import tables
from benchmarks.results import EXPERTS_HOST

RESULTS = tables.RESULTS, tables.RESULTS.with_name("h100.json")  # of which those with rows are shown
SPEEDS = {"NVIDIA H200": (4.39, 4.8), "NVIDIA H100 80GB HBM3": (3.05, 3.35)}  # TB/s: of a large read; nominal
PEAK = 788  # TFLOP/s of cuBLAS with float16 on an H200
# What is wanted on an H200: us of one token, which another GPU may exceed as it reads slower; more tokens: times
# reading the experts that they meet, or a share of PEAK.
WANTED = {
    "gpt-oss-120b": {1: "18 us", 8: "1.5", 64: "1.4", 512: "1.6", 4096: "55%"},
    "qwen3-30b-a3b": {1: "9 us", 8: "1.7", 64: "1.6", 512: "1.8", 4096: "50%"},
    "mixtral-8x7b": {1: "54 us", 8: "1.3", 64: "1.3", 512: "60%", 4096: "70%"},
}
# us of Marlin MoE on an H20 of nominally 4.0 TB/s: https://github.com/FlagOpen/FlagGems/issues/4350
MARLIN, H20 = {("mixtral-8x7b", 1): 134, ("mixtral-8x7b", 8): 392, ("mixtral-8x7b", 64): 1190}, 4.0
MOST_HOST = 2.5  # calls of a product that a layer's may take the host
BESIDE = {"one_by_one_us": "one by one", "cublas_us": "decoded, cuBLAS", "grouped_mm_us": "grouped_mm bf16"}


def table(paths: tuple[Path, ...] = RESULTS) -> str:
    """A table for each GPU."""
    found = (json.loads(path.read_text()) for path in paths)
    return "\n\n".join("\n".join(lines(results)) for results in found if results.get("experts"))


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The rows of one GPU. A must that is missed is bold."""
    head = ["layer", "T", "us", "times reading", "TFLOP/s", "wanted", *BESIDE.values(), "Marlin, scaled"]
    yield f"{results['device']}, which reads {results['read_gbs'] / 1e3:.2f} TB/s; us:"
    yield ""
    yield tables.markdown(head, [cells(row, results["device"]) for row in results["experts"]])
    if host := results.get(EXPERTS_HOST):
        yield ""
        yield f"The host, us of a call that is like an earlier one, wanted at most {MOST_HOST} times a product's:"
        yield ""
        yield tables.markdown(["call", "us", "product", "times"], list(map(host_cells, host)))


def host_cells(row: dict[str, Any]) -> list[str]:
    """What a call costs the host."""
    times = row["us"] / row["product_us"]
    ratio = f"{times:.2f}" if times <= MOST_HOST else f"**{times:.2f}**"
    return [row["call"], number(row["us"]), number(row["product_us"]), ratio]


def cells(row: dict[str, Any], device: str) -> list[str]:
    """One row: the layer, its time and what stands beside it."""
    reading, (reads, nominal) = row["us"] / row["read_us"], SPEEDS[device]
    wanted = "" if row["skew"] else WANTED[row["model"]].get(row["M"], "")
    if wanted.endswith("us"):
        most = float(wanted.split()[0]) * SPEEDS["NVIDIA H200"][0] / reads
        wanted, missed = f"{most:.1f} us", row["us"] > most
    elif wanted.endswith("%"):
        missed = row["tflops"] < PEAK * float(wanted[:-1]) / 100
    else:
        missed = bool(wanted) and reading > float(wanted)
    marlin = None if row["skew"] else MARLIN.get((row["model"], row["M"]))
    return [
        f"{row['model']} {row['types']}", f"{row['M']}{', skewed' * row['skew']}", number(row["us"]), f"{reading:.2f}",
        number(row["tflops"]), f"**{wanted}**" if missed else wanted,
        *(number(row[name]) if name in row else "" for name in BESIDE),
        number(marlin * H20 / nominal) if marlin else "",
    ]  # fmt: skip


def number(value: float) -> str:
    """Three digits.

    >>> number(12.345), number(1717.4)
    ('12.3', '1717')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
