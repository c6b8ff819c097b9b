"""Targets of GPU products beside the numbers of a results file. Tables are in tables.py, plots in plots.py.

`python -m benchmarks --report` prints the targets, draws the plots next to the results file, rewrites the documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.report.plots import plots
from benchmarks.report.tables import HEADLINE, KBIT, LARGE, OTHERS_M, Rows, baselines, name
from benchmarks.results import CALLS, KEYS, STEPS, X_TYPE, X_TYPES, Results, earlier, key, load, share, speedup
from benchmarks.sweep import steepest
from qgemm.arguments import ACTIVATIONS
from qgemm.text import columns

# Speed-up of q4_0 over cuBLAS in float16, (must, aim), by shape (N, K) and M: for both activations, and for a16 alone.
WIDE = {1: (2.9, 3.3), 4: (2.5, 3.0), 8: (2.2, 2.6), 16: (1.9, 2.3)}
SPEEDUPS = {
    (8192, 8192): {1: (3.3, 3.7), 4: (2.9, 3.4), 8: (2.8, 3.1), 16: (2.3, 2.6)},
    (28672, 8192): {1: (3.6, 3.8), 4: (3.3, 3.7), 8: (3.2, 3.6), 16: (2.6, 3.2)},
    (14336, 4096): WIDE,
    (4096, 14336): WIDE,
    (4096, 4096): {1: (2.3, 3.1), 4: (2.1, 2.8), 8: (2.0, 2.6), 16: (1.7, 2.0)},
}
MANY = (32, 64, 128, 256, 512, 1024, 4096)  # rows of x
WIDE_MANY = ((1.8, 2.2), (1.6, 2.0), (1.15, 1.35), (1.0, 1.1), (1.0, 1.1), (0.98, 1.05), (0.97, 1.02))
A16_SPEEDUPS = {
    (8192, 8192): ((2.2, 2.5), (2.0, 2.3), (1.35, 1.5), (1.05, 1.12), (1.0, 1.05), (0.98, 1.02), (0.97, 1.02)),
    (28672, 8192): ((2.2, 2.8), (1.8, 2.3), (1.25, 1.5), (1.0, 1.1), (1.0, 1.05), (0.98, 1.05), (0.97, 1.02)),
    (14336, 4096): WIDE_MANY,
    (4096, 14336): WIDE_MANY,
    (4096, 4096): ((1.6, 1.9), (1.4, 1.55), (1.25, 1.4), (1.2, 1.3), (1.0, 1.1), (1.0, 1.03), (0.97, 1.0)),
}
A8_LEAST = 0.9  # speed-up over cuBLAS from M = 256 on
# Other formats relative to q4_0: largest time from M = 256 on, least share of memory speed up to M = 64.
SLOWER, LESS_SHARE = 1.1, 0.9
CLIFF = 1.25  # largest ratio of the times of one M and the next
# Share of the speed of memory at M = 1, for large shapes.
SHARES = {
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "q4_k"), (0.83, 0.92)),
    **dict.fromkeys(("q5_k", "q6_k"), (0.75, None)),
}
FASTER = 1.3  # speed-up over llama.cpp
# Kbit: largest time at M = 1 to 8 over that of only reading the packed bytes, by shape; least speed-up over cuBLAS by
# M, on one shape; least speed of the kernels for flat planes relative to reading the same bytes.
OVER_READING = {
    (4096, 4096): dict.fromkeys(KBIT, 1.8),
    **{shape: {**dict.fromkeys(KBIT, 1.5), "kbit4": 1.3} for shape in LARGE},
}
KBIT_SPEEDUPS = {64: 1.8, 1024: 0.85, 4096: 0.85}
PLANES = {"quantize_codebook": 0.6, "dequantize_codebook": 0.7}
# The largest time by x of bfloat16 over that by float16: "a16", and rows of x of K-quants up to FEW; decode steps.
OVER_FLOAT16, K_QUANTS_OVER_FLOAT16, FEW = 1.05, 1.10, 16
# Formats whose products of at least as many rows are no slower than cuBLAS in bfloat16.
PREFILL_FORMATS, PREFILL_M, PREFILL_LEAST = ("q4_0", "q4_k", "q6_k", "mxfp4"), 512, 1.0
MAX_HOST_US = 8.0
STEP_COSTS = {1: (1.25, 1.12), 8: (1.4, 1.25)}  # (must, aim) of a step's time over that of reading its weights, by M
# Host time of a call over that of torch's dense product, or of several weights over one: (must, aim).
CALL_COSTS = {"M = 1, out": (0.5, 0.35), "M = 1, new y": (0.6, 0.45), "3 weights, M = 1, outs": (1.4, None)}


_, BFLOAT16 = X_TYPES
ANY = float("nan")  # stands for a measured value without a target


class Target(NamedTuple):
    """One line of the list: the required value, the aim, and the measured value for each of ACTIVATIONS."""

    name: str
    must: float
    aim: float | None
    measured: tuple[float | None, ...]
    at_most: bool = False  # whether the required value is a maximum

    def verdict(self, value: float | None) -> str:
        """The verdict on a value: "aim" or "must" (reached), "MISS", "-" (not measured), "" without a target."""
        if value is None or value is ANY:
            return "-" if value is None else ""
        sign = -1 if self.at_most else 1
        if self.aim is not None and sign * value >= sign * self.aim:
            return "aim"
        return "must" if sign * value >= sign * self.must else "MISS"


def targets(results: Results) -> Iterator[Target]:
    """All targets, measured or not."""
    rows = Rows(results)

    def measured(measure, fmt, m, shape) -> tuple[float | None, ...]:
        by_activation = (rows(fmt, activation, m, shape) for activation in ACTIVATIONS)
        return tuple(None if row is None else measure(row) for row in by_activation)

    for shape, by_m in SPEEDUPS.items():
        for m, (must, aim) in by_m.items():
            title = f"{HEADLINE} {name(shape)} M={m}: speed-up over cuBLAS"
            yield Target(title, must, aim, measured(speedup, HEADLINE, m, shape))
    for shape, goals in A16_SPEEDUPS.items():
        for m, (must, aim) in zip(MANY, goals, strict=True):
            title = f"{HEADLINE} {name(shape)} M={m}: speed-up over cuBLAS"
            a16, a8 = measured(speedup, HEADLINE, m, shape)
            yield Target(title, must, aim, (a16, ANY))
            if m >= 256:
                yield Target(title, A8_LEAST, None, (ANY, a8))
    for fmt, shape, m in product(rows.formats, SPEEDUPS, OTHERS_M):
        if fmt in (HEADLINE, *KBIT):
            continue
        ours, other = rows(fmt, "a16", m, shape), rows(HEADLINE, "a16", m, shape)
        pair = None if ours is None or other is None or earlier(ours) else (ours, other)
        if m >= 256:
            quantity, bound = "time", SLOWER
            ratio = pair and pair[0]["us"] / pair[1]["us"]
        else:
            quantity, bound = "share of memory speed", LESS_SHARE
            ratio = pair and share(pair[0]) / share(pair[1])
        title = f"{fmt} {name(shape)} M={m}: {quantity} over that of {HEADLINE}"
        yield Target(title, bound, None, (ratio, ANY), at_most=m >= 256)
    for title, times in results.get("sweep", {}).items():
        rise, m = steepest(times)
        yield Target(f"{title} M<={m}: time over that of the M before", CLIFF, None, (rise, ANY), at_most=True)
    for fmt, (must, aim) in SHARES.items():
        for shape in LARGE:
            yield Target(f"{fmt} {name(shape)} M=1: share of memory speed", must, aim, measured(share, fmt, 1, shape))
    for theirs in baselines()["rows"]:
        if theirs["library"] == "llama.cpp":
            fmt, m, shape = theirs["format"], theirs["M"], (theirs["N"], theirs["K"])
            faster = measured(lambda row, us=theirs["us"]: us / row["us"], fmt, m, shape)
            yield Target(f"{fmt} {name(shape)} M={m}: speed-up over llama.cpp", FASTER, None, faster)
    for shape, by_format in OVER_READING.items():
        for fmt, limit in by_format.items():
            for m in (1, 8):
                over = measured(lambda row: 1 / share(row), fmt, m, shape)[0]
                title = f"{fmt} {name(shape)} M={m}: time over reading"
                yield Target(title, limit, None, (over, ANY), at_most=True)
    for m, least in KBIT_SPEEDUPS.items():
        for fmt in KBIT:
            title = f"{fmt} {name(LARGE[0])} M={m}: speed-up over cuBLAS"
            yield Target(title, least, None, (measured(speedup, fmt, m, LARGE[0])[0], ANY))
    yield from of_bfloat16(rows)
    for row in results.get("planes", []):
        title = f"{row['format']} {row['kernel']} of {row['dtype']}: share of reading as many bytes"
        yield Target(title, PLANES[row["kernel"]], None, (row["share"], ANY))
    steps = {key(row, KEYS[STEPS]): row for row in results.get(STEPS, [])}
    for (model, types, m, x), row in steps.items():
        title, float16 = f"{model} {types} M={m}", steps.get((model, types, m, X_TYPE))
        if x == X_TYPE:
            cost = row["us"] / row["read_us"]
            yield Target(f"{title}: a step over reading its bytes", *STEP_COSTS[m], (cost, ANY), at_most=True)
        elif float16 is not None:
            ratio = row["us"] / float16["us"]
            yield Target(f"{title}: a step by {x} over float16", OVER_FLOAT16, None, (ratio, ANY), at_most=True)
    for row in results.get(CALLS, []):
        must, aim = CALL_COSTS.get(row["call"], (None, None))
        if must is not None:
            title = f"{row['library']} {row['call']}: time of the host over that of {row['beside']}"
            yield Target(title, must, aim, (row["us"] / row["beside_us"], ANY), at_most=True)
    host = tuple(results.get("host_us", {}).get(activation) for activation in ACTIVATIONS)
    yield Target("us of the host for a call", MAX_HOST_US, None, host, at_most=True)


def of_bfloat16(rows: Rows) -> Iterator[Target]:
    """The targets of products by x of bfloat16: beside those by float16, and beside cuBLAS in bfloat16."""
    for (fmt, activation, m, n, k, x), row in rows.by_key.items():
        if (activation, x) == ("a16", X_TYPE):
            limit = K_QUANTS_OVER_FLOAT16 if m <= FEW and fmt.endswith("_k") else OVER_FLOAT16
            other = rows(fmt, activation, m, (n, k), BFLOAT16)
            ratio = None if other is None else other["us"] / row["us"]
            title = f"{fmt} {name((n, k))} M={m}: time by bfloat16 over that by float16"
            yield Target(title, limit, None, (ratio, ANY), at_most=True)
            if fmt in PREFILL_FORMATS and m >= PREFILL_M:
                title = f"{fmt} {name((n, k))} M={m}: speed-up over cuBLAS in bfloat16"
                yield Target(title, PREFILL_LEAST, None, (None if other is None else speedup(other), ANY))


def targets_table(results: Results) -> str:
    """All targets, and how many are missed or not measured."""
    rows, verdicts = [("target", "must", "aim", *(cell for a in ACTIVATIONS for cell in (a, "")))], []
    for target in targets(results):
        target_verdicts = [target.verdict(value) for value in target.measured]
        cells = (
            cell
            for value, verdict in zip(target.measured, target_verdicts, strict=True)
            for cell in (f"{value:.2f}" if verdict.isalpha() else "", verdict)
        )
        rows.append((target.name, f"{target.must:.2f}", "" if target.aim is None else f"{target.aim:.2f}", *cells))
        verdicts += filter(None, target_verdicts)
    return f"{columns('<>>' + '><' * len(ACTIVATIONS), rows)}\n\n{counted(verdicts)}"


COUNTED = {"aim": "reach the aim", "must": "the required value", "MISS": "are missed", "-": "are not measured"}


def counted(verdicts: list[str]) -> str:
    """The number of targets by verdict."""
    return ", ".join(f"{verdicts.count(word)} {text}" for word, text in COUNTED.items())


def main(path: Path) -> int:
    """Print the targets and draw the plots; 1 if a target is missed."""
    results = load(path)
    for plot, drawing in plots(results).items():
        (path.parent / f"{path.stem}_{plot}.svg").write_text(drawing)
    table = targets_table(results)
    print(table)
    return 1 if "MISS" in table else 0
