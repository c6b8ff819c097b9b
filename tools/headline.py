"""README's numbers, from the results files: products on a GPU, a serving engine, products on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.contest import GGML, latest
from benchmarks.engines import DENSE, MARLIN, PROMPT, QGEMM
from benchmarks.report import cpu_tables, eight_bit_tables, engines, tables
from benchmarks.results import X_TYPES, Row, load, speedup
from benchmarks.stale import is_stale

SHAPE = tables.LARGE[0]
ROWS_OF_X = (1, 8, 64, 256, 1024, 4096)  # by `a16`; the last ones by eight bits of both factors as well
EIGHT_BITS_M = (1024, 4096)
CPU_ROWS = 512
SEQUENCES = 32


def text(gpu: Path = tables.RESULTS, eight_bits: Path = eight_bit_tables.RESULTS, cpu: Path = cpu_tables.CPU) -> str:
    """A table of products on a GPU, and two items of a list, each a speed-up with its case and its time or speed."""
    return "\n\n".join([products(gpu, eight_bits), f"{served()}\n{on_cpu(cpu)}"])


def products(gpu: Path = tables.RESULTS, eight_bits: Path = eight_bit_tables.RESULTS) -> str:
    """A row for each type of x that was measured, and one for llama.cpp; a column for each number of rows of x."""
    results, results_of_8_bits = load(gpu), load(eight_bits)
    a16, a8, kind = tables.Rows(results), tables.Rows(results_of_8_bits), eight_bit_tables.KIND
    lines, stale = [], False
    for x in X_TYPES:
        rows = [a16(tables.HEADLINE, "a16", m, SHAPE, x) for m in ROWS_OF_X]
        rows_of_8_bits = [a8(tables.HEADLINE, kind, m, SHAPE, x) for m in EIGHT_BITS_M]
        if any([*rows, *rows_of_8_bits]):
            lines.append([f"{x}, us (over cuBLAS)", *(tables.both([row], cell) for row in [*rows, *rows_of_8_bits])])
        stale = stale or any(row and is_stale("rows", row, results) for row in rows)
        stale = stale or any(row and is_stale("rows", row, results_of_8_bits) for row in rows_of_8_bits)
    llama = tables.baseline_rows("llama.cpp", tables.HEADLINE, SHAPE)
    lines.append(["llama.cpp, us", *(f"{llama[m]['us']:.4g}" for m in ROWS_OF_X), *[""] * len(EIGHT_BITS_M)])
    head = ["rows of x", *map(str, ROWS_OF_X), *(f"{m}, `{kind}`" for m in EIGHT_BITS_M)]
    earlier = " by earlier kernels" * stale
    case = f"{tables.HEADLINE.upper()} {tables.name(SHAPE)} on an H200{earlier}; cuBLAS has weights of the type of x:"
    return f"{case}\n\n{tables.markdown(head, lines)}"


def cell(row: Row) -> str:
    """A cell: the time, and how many times faster than cuBLAS with weights of the type of x."""
    return f"{row['us']:.{0 if row['us'] >= 100 else 1}f} ({speedup(row):.1f}x)"


def served(path: Path = engines.RESULTS) -> str:
    """SEQUENCES at once by vLLM, beside weights of bfloat16 and Marlin."""
    document = json.loads(path.read_text())
    speeds, types = engines.tokens_a_second(document["rows"]), {QGEMM: "q4_k_m", DENSE: "bf16", MARLIN: "awq"}
    packed, dense, marlin = (speeds["llama-3-8b", kind, road, SEQUENCES, PROMPT] for road, kind in types.items())
    gpu = document["device"].removeprefix("NVIDIA ")
    return (
        f"- **vLLM, {SEQUENCES} requests: {packed / dense:.1f}x its bfloat16, {packed / marlin:.1f}x AWQ by Marlin.** "
        f"{packed:.0f} tokens/s of a Llama-3-8B in {types[QGEMM].upper()} on an {gpu}."
    )


def on_cpu(path: Path = cpu_tables.CPU) -> str:
    """A product of CPU_ROWS rows of x beside ggml's best layout, on each CPU that was measured."""
    speeds, times = [], []
    for run in latest(path):
        rows = {(row.case.format, row.case.m): row for row in cpu_tables.native(run) if row.case.where == "hot"}
        row = rows[tables.HEADLINE, CPU_ROWS]
        speeds.append(f"{cpu_tables.ratio(row, 'a8', GGML):.1f}x ggml with {run['isa']}")
        times.append(f"{row.ms['a8']:.0f}")
    n, k = cpu_tables.SHAPE
    return (
        f"- **CPU, {CPU_ROWS} tokens: {', '.join(speeds)}.** {' and '.join(times)} ms "
        f"for {tables.HEADLINE.upper()} {n}x{k} with `a8`."
    )
