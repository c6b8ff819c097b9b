"""README's four numbers, from the results files: one token, many tokens, a serving engine, the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.contest import GGML, latest
from benchmarks.engines import DENSE, MARLIN, PROMPT, QGEMM
from benchmarks.report import cpu_tables, eight_bit_tables, engines, tables
from benchmarks.results import Results, Row, load, speedup
from benchmarks.stale import is_stale

SHAPE = tables.LARGE[0]
MANY_TOKENS = 4096
CPU_ROWS = 512
SEQUENCES = 32


def text(gpu: Path = tables.RESULTS, eight_bits: Path = eight_bit_tables.RESULTS, cpu: Path = cpu_tables.CPU) -> str:
    """Four items of a list, each a speed-up with its case and its time or speed."""
    return "\n".join([one_token(gpu), many_tokens(eight_bits), served(), on_cpu(cpu)])


def one_token(path: Path = tables.RESULTS) -> str:
    """A product of one row of x beside cuBLAS and llama.cpp."""
    results = load(path)
    row = tables.Rows(results)(tables.HEADLINE, "a16", 1, SHAPE)
    llama = tables.baseline_rows("llama.cpp", tables.HEADLINE, SHAPE)[1]
    if row is None:
        raise KeyError(f"{tables.HEADLINE} of {tables.name(SHAPE)} with M = 1 was not measured")
    return (
        f"- **One token: {speedup(row):.1f}x cuBLAS float16, {llama['us'] / row['us']:.1f}x llama.cpp.** "
        f"{row['us']:.1f} us{by_bfloat16(results, 'a16', 1, '.1f')} for {tables.HEADLINE.upper()} {tables.name(SHAPE)} "
        f"{on_gpu(row, results)}."
    )


def by_bfloat16(results: Results, activation: str, m: int, digits: str) -> str:
    """The time of the same product by x of bfloat16 in parentheses; empty if it was not measured."""
    row = tables.Rows(results)(tables.HEADLINE, activation, m, SHAPE, "bfloat16")
    return "" if row is None else f" (bfloat16 {row['us']:{digits}})"


def many_tokens(path: Path = eight_bit_tables.RESULTS) -> str:
    """A product of MANY_TOKENS rows of x beside cuBLAS, both factors quantized to eight bits."""
    results, kind = load(path), eight_bit_tables.KIND
    row = eight_bit_tables.measured(tables.Rows(results), tables.HEADLINE, kind, MANY_TOKENS, SHAPE)
    return (
        f"- **{MANY_TOKENS} tokens: {speedup(row):.1f}x cuBLAS float16** with `{kind}`: "
        f"{row['us']:.0f} us{by_bfloat16(results, kind, MANY_TOKENS, '.0f')} for {tables.HEADLINE.upper()} "
        f"{tables.name(SHAPE)} {on_gpu(row, results)}."
    )


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


def on_gpu(row: Row, results: Results) -> str:
    """The GPU, and whether the kernels of a row have changed since it was measured."""
    return f"on an H200{' by earlier kernels' * is_stale('rows', row, results)}"


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
