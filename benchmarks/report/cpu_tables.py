"""Tables of tools/results/cpu.json and encode_cpu.json for the documents: the CPU beside ggml and NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks import encoders
from benchmarks.contest import GGML, IK, NUMPY, ROWS, SHAPES, Case, Row, latest, machine, over, rows_of, runs, time_of
from benchmarks.report import tables

CPU = tables.RESULTS.with_name("cpu.json")
ENCODE = tables.RESULTS.with_name("encode_cpu.json")
SHORT = ("q4_0", "q4_k")  # formats of README's table
SHAPE = SHAPES[0]


def short_table(path: Path = CPU) -> str:
    """The section of README: milliseconds of ours, and of the best layout of ggml or ik_llama.cpp, at one shape."""
    return "\n\n".join(map(short_table_of, latest(path)))


def short_table_of(run: dict[str, Any]) -> str:
    """The part of one CPU."""
    rows = {(row.case.format, row.case.m): row for row in native(run) if row.case.where == "hot"}
    m = [m for m, where in ROWS if where == "hot"]
    others = "ggml, ik" if "ik" in run else "ggml"
    head = ["M =", *(f"{count}, `a8` / {others}" for count in m), *(f"{count}, `a16` / NumPy" for count in m[1:])]
    lines = [
        f"{machine(run)},",
        f"N x K = {SHAPE[0]}x{SHAPE[1]}, milliseconds: `a8` / {others}, repacked where that is faster; `a16` / NumPy",
        "on dense float32 weights:",
        "",
        f"| {' | '.join(head)} |",
        f"|---|{'--:|' * (2 * len(m) - 1)}",
    ]
    for name in SHORT:
        ours = [pair(rows[name, count].ms, "a8", GGML, IK) for count in m]
        exact = [pair(rows[name, count].ms, "a16", (NUMPY,)) for count in m[1:]]
        lines.append(f"| {name.upper()} | {' | '.join([*ours, *exact])} |")
    return "\n".join(lines)


def pair(ms: dict[str, float], ours: str, *theirs: Iterable[str]) -> str:
    """A cell with our time and the least of each library that was measured."""
    least = (min((ms[name] for name in names if name in ms), default=None) for names in theirs)
    return f"{time_of(ms, ours):.3g} / {', '.join(f'{time:.3g}' for time in least if time is not None)}"


def native(run: dict[str, Any]) -> list[Row]:
    """The rows of one shape, with all instructions of the CPU."""
    return [row for row in rows_of(run) if (row.case.n, row.case.k) == SHAPE and row.case.isa == "native"]


def long_table(path: Path = CPU) -> str:
    """The section of the kernel notes: speed relative to the best layouts of ggml and ik_llama.cpp; a16; AVX2."""
    return "\n\n".join(map(long_table_of, runs(path)))


def long_table_of(run: dict[str, Any]) -> str:
    """The part of one CPU."""
    every = rows_of(run)
    head = [f"M = {m}, {where}" for m, where in ROWS]
    others = "the best layouts' times of ggml and ik_llama.cpp" if "ik" in run else "the best layout's time of ggml"
    lines = [
        f"{machine(run)}:",
        f"{others} / ours, the faster of ours by blocks and by packed weights, `a8`; in parentheses",
        "ours in milliseconds. hot: W in a cache; DRAM: copies of 128 MB in turn, 15 at most.",
        "",
        f"| format | N x K | {' | '.join(head)} |",
        f"|---|---|{'--:|' * len(head)}",
    ]
    by_case = {row.case: row for row in every}
    shapes = list(dict.fromkeys(row.case[:3] for row in every))  # format, N, K
    for shape in shapes:
        rows = (by_case.get(Case(*shape, m, where)) for m, where in ROWS)
        cells = ("" if row is None else f"{ratios(row)} ({time_of(row.ms, 'a8'):.3g})" for row in rows)
        lines.append(f"| {shape[0]} | {shape[1]}x{shape[2]} | {' | '.join(cells)} |")
    lines += [
        "",
        "`a16`: its time / `a8`'s for one row of x; NumPy's on dense float32 weights / `a16`'s for 16 and 512.",
        "",
        "| format | N x K | M = 1 | M = 16 | M = 512 |",
        "|---|---|--:|--:|--:|",
    ]
    for shape in shapes:
        single, *several = (by_case[Case(*shape, m)] for m in (1, 16, 512))
        times = 1 / ratio(single, "a16", ("a8",)), *(ratio(row, "a16", (NUMPY,)) for row in several)
        cells = (f"{value:.2f}" for value in times)
        lines.append(f"| {shape[0]} | {shape[1]}x{shape[2]} | {' | '.join(cells)} |")
    narrow = [row for row in every if row.case.isa == "AVX2"]
    cells = (f"{row.case.format} M = {row.case.m}: {ratio(row, 'a8', GGML):.2f}" for row in narrow)
    text = f"Without AVX-512, beside ggml built without it: {', '.join(cells)}."
    lines += ["", *wrap(text, 120)] if narrow else []
    lines += [
        "",
        f"A call besides its kernel: {run['host_us_a8']:.3g} us (`a8`), {run['host_us_a16']:.3g} us (`a16`). First",
        f"product: {run['first_s']:.2g} s from an empty cache, {run['warm_ms']:.2g} ms from a filled one.",
    ]
    return "\n".join(lines)


def ratio(row: Row, ours: str, theirs: Iterable[str]) -> float:
    """The least of their times over ours."""
    quotient = over(row.ms, ours, theirs)
    assert quotient is not None, f"{row.case} lacks {theirs}"
    return quotient


def ratios(row: Row) -> str:
    """The speed relative to each library that was measured."""
    quotients = (over(row.ms, "a8", theirs) for theirs in (GGML, IK))
    return ", ".join(f"{quotient:.2f}" for quotient in quotients if quotient is not None)


def encode_table(path: Path = ENCODE) -> str:
    """The section of the notes on encoding: millions of weights a second of ours and ggml's, all formats."""
    run = json.loads(path.read_text())
    rows = {row.case: row for row in encoders.rows_of(run)}
    lines = [
        f"{run['cpu']}, {run['threads']} threads, beside ggml_quantize_chunk of ggml {run['ggml']} on one:",
        "millions of weights a second, ours / ggml's; in parentheses ours over ggml's times the threads.",
        "",
        "| format | plain | with an importance matrix |",
        "|---|--:|--:|",
    ]
    for name in dict.fromkeys(case.format for case in rows):
        cells = (_speeds(rows.get(encoders.Case(name, imatrix)), run["threads"]) for imatrix in (False, True))
        lines.append(f"| {name.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speeds(row: encoders.Row | None, threads: int) -> str:
    """A cell, empty if there is no such encoder."""
    if row is None:
        return ""
    ours, theirs = (f"{speed:.{0 if speed > 99 else 1}f}" for speed in map(row.speed, (encoders.OURS, encoders.GGML)))
    return f"{ours} / {theirs} ({row.ratio(threads):.2f})"
