"""What a results file says: targets beside measured numbers, the tables of README.md, and two plots.

`tools/bench.py --report` prints the first, rewrites the second and draws the third beside the results file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import svg

from qgemm.bench.results import MMA, SUSTAINED, Results, Row, earlier, key, load, share, speedup
from qgemm.bench.sweep import steepest
from qgemm.ops import ACTIVATIONS
from qgemm.text import columns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results" / "h200.json"  # the one that README shows
HEADLINE = "q4_0"  # the format of README's first table and of the plot of speed-ups

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
A8_LEAST = 0.9  # of cuBLAS' speed, from M = 256 on
# The time of other formats over that of q4_0 from M = 256 on, at most; share of memory speed over its, up to M = 64.
OTHERS_M = (16, 32, 64, 256, 512, 1024, 4096)
SLOWER, LESS_SHARE = 1.1, 0.9
CLIFF = 1.25  # by which time grows from one M to the next, at most
# Share of the speed of memory at M = 1, for large shapes.
LARGE = ((8192, 8192), (28672, 8192))
SHARES = {
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "q4_k"), (0.83, 0.92)),
    **dict.fromkeys(("q5_k", "q6_k"), (0.75, None)),
}
# llama.cpp on the same GPU by the same protocol, us; ours must be FASTER times as fast.
FASTER = 1.3
LLAMA_CPP = {
    ("q4_0", 8192, 8192): {1: 17.1, 8: 38.2, 32: 51.1, 64: 68.7, 128: 114.5, 256: 172.5, 1024: 661, 4096: 2628},
    ("q8_0", 8192, 8192): {1: 24.6, 8: 51.6, 32: 58.8, 64: 74.7, 128: 113.5, 256: 175.8, 1024: 691, 4096: 2792},
    ("q4_0", 4096, 4096): {1: 6.9, 8: 13.0, 16: 16.8, 64: 26.6, 256: 63.7, 4096: 677},
    ("q4_0", 14336, 4096): {1: 17.2, 8: 35.0, 16: 37.2, 64: 60.7, 256: 169.6, 4096: 2234},
}
# Kbit: the longest time at M = 1 to 8 over that of only reading the packed bytes, by shape; the least speed-up over
# cuBLAS by M, on one shape; of the speed of reading as many bytes, what the kernels for flat planes reach.
KBIT = ("kbit2", "kbit3", "kbit4", "kbit5")
OVER_READING = {
    (4096, 4096): dict.fromkeys(KBIT, 1.8),
    **{shape: {**dict.fromkeys(KBIT, 1.5), "kbit4": 1.3} for shape in LARGE},
}
KBIT_SPEEDUPS = {64: 1.8, 1024: 0.85, 4096: 0.85}
PLANES = {"quantize_codebook": 0.6, "dequantize_codebook": 0.7}
MOST_HOST_US = 8.0
KBIT_M = (1, 8, 64, 1024)  # of README's tables


ANY = float("nan")  # in place of a measured value for which there is no target


class Target(NamedTuple):
    """One line of the list: what must be reached, what is aimed at, what was measured for each of ACTIVATIONS."""

    what: str
    must: float
    aim: float | None
    measured: tuple[float | None, ...]
    at_most: bool = False  # otherwise at least

    def verdict(self, value: float | None) -> str:
        """How a measured value stands: "aim", "must" (reached, not the aim), "MISS", "-" if it is not there."""
        if value is None or value is ANY:
            return "-" if value is None else ""
        sign = -1 if self.at_most else 1
        if self.aim is not None and sign * value >= sign * self.aim:
            return "aim"
        return "must" if sign * value >= sign * self.must else "MISS"


class Rows:
    """The rows of a results file by what they are about."""

    def __init__(self, results: Results) -> None:
        self.by_key = {key(row): row for row in results["rows"]}

    def __call__(self, fmt: str, activation: str, m: int, shape: tuple[int, int]) -> Row | None:
        return self.by_key.get((fmt, activation, m, *shape))

    def values(self, position: int) -> list:
        """What occurs at this position of the keys, in ascending order."""
        return sorted({found[position] for found in self.by_key})

    @property
    def formats(self) -> list[str]:
        """Names of the formats."""
        return self.values(0)

    @property
    def m(self) -> list[int]:
        """Numbers of rows of x."""
        return self.values(2)

    def shapes(self, *formats: str) -> list[tuple[int, int]]:
        """(N, K) of what was measured of these formats, the smallest matrix first."""
        shapes = {(found[3], found[4]) for found in self.by_key if found[0] in formats}
        return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def targets(results: Results) -> Iterator[Target]:
    """Every target, measured or not."""
    rows = Rows(results)

    def measured(of, *what) -> tuple[float | None, ...]:
        found = (rows(what[0], activation, *what[1:]) for activation in ACTIVATIONS)
        return tuple(None if row is None else of(row) for row in found)

    for shape, by_m in SPEEDUPS.items():
        for m, (must, aim) in by_m.items():
            what = f"{HEADLINE} {name(shape)} M={m}: speed-up over cuBLAS"
            yield Target(what, must, aim, measured(speedup, HEADLINE, m, shape))
    for shape, goals in A16_SPEEDUPS.items():
        for m, (must, aim) in zip(MANY, goals, strict=True):
            what = f"{HEADLINE} {name(shape)} M={m}: speed-up over cuBLAS"
            a16, a8 = measured(speedup, HEADLINE, m, shape)
            yield Target(what, must, aim, (a16, ANY))
            if m >= 256:
                yield Target(what, A8_LEAST, None, (ANY, a8))
    for fmt, shape, m in product(rows.formats, SPEEDUPS, OTHERS_M):
        if fmt in (HEADLINE, *KBIT):
            continue
        ours, other = rows(fmt, "a16", m, shape), rows(HEADLINE, "a16", m, shape)
        pair = None if ours is None or other is None or earlier(ours) else (ours, other)
        if m >= 256:
            what, bound = "time", SLOWER
            ratio = pair and pair[0]["us"] / pair[1]["us"]
        else:
            what, bound = "share of memory speed", LESS_SHARE
            ratio = pair and share(pair[0]) / share(pair[1])
        about = f"{fmt} {name(shape)} M={m}: {what} over that of {HEADLINE}"
        yield Target(about, bound, None, (ratio, ANY), at_most=m >= 256)
    for what, times in results.get("sweep", {}).items():
        rise, m = steepest(times)
        yield Target(f"{what} M<={m}: time over that of the M before", CLIFF, None, (rise, ANY), at_most=True)
    for fmt, (must, aim) in SHARES.items():
        for shape in LARGE:
            yield Target(f"{fmt} {name(shape)} M=1: share of memory speed", must, aim, measured(share, fmt, 1, shape))
    for (fmt, *shape), by_m in LLAMA_CPP.items():
        for m, theirs in by_m.items():
            faster = measured(lambda row, theirs=theirs: theirs / row["us"], fmt, m, tuple(shape))
            yield Target(f"{fmt} {name(shape)} M={m}: speed-up over llama.cpp", FASTER, None, faster)
    for shape, by_format in OVER_READING.items():
        for fmt, most in by_format.items():
            for m in (1, 8):
                over = measured(lambda row: 1 / share(row), fmt, m, shape)[0]
                what = f"{fmt} {name(shape)} M={m}: time over reading"
                yield Target(what, most, None, (over, ANY), at_most=True)
    for m, least in KBIT_SPEEDUPS.items():
        for fmt in KBIT:
            what = f"{fmt} {name(LARGE[0])} M={m}: speed-up over cuBLAS"
            yield Target(what, least, None, (measured(speedup, fmt, m, LARGE[0])[0], ANY))
    for row in results.get("planes", []):
        what = f"{row['format']} {row['kernel']} of {row['dtype']}: share of reading as many bytes"
        yield Target(what, PLANES[row["kernel"]], None, (row["share"], ANY))
    host = tuple(results["host_us"].get(activation) for activation in ACTIVATIONS)
    yield Target("us of the host for a call", MOST_HOST_US, None, host, at_most=True)


def targets_table(results: Results) -> str:
    """All targets, and how many are missed or not measured."""
    rows, verdicts = [("target", "must", "aim", *(cell for a in ACTIVATIONS for cell in (a, "")))], []
    for target in targets(results):
        found = [target.verdict(value) for value in target.measured]
        cells = (
            cell
            for value, verdict in zip(target.measured, found, strict=True)
            for cell in (f"{value:.2f}" if verdict.isalpha() else "", verdict)
        )
        rows.append((target.what, f"{target.must:.2f}", "" if target.aim is None else f"{target.aim:.2f}", *cells))
        verdicts += filter(None, found)
    counts = ", ".join(f"{verdicts.count(word)} {what}" for word, what in COUNTED.items())
    return f"{columns('<>>' + '><' * len(ACTIVATIONS), rows)}\n\n{counts}"


COUNTED = {"aim": "reach the aim", "must": "what they must", "MISS": "are missed", "-": "are not measured"}


def speed_table(path: Path = RESULTS) -> str:
    """README's section between the markers `speed`: where it was measured, the plots, two tables."""
    if not path.exists():
        return "Not measured yet: `tools/bench.py --out tools/results`, then `tools/bench.py --report`."
    results = load(path)
    rows = Rows(results)
    clocks = results["clocks"]
    where = (
        f"{results['device']} ({clocks['sm_mhz']} MHz, memory {clocks['mem_mhz']} MHz), driver {results['driver']}, "
        f"CUDA {results['cuda']}, {results['date']}; x and y float16, weights read from memory, median of graph "
        f"replays, between which the GPU rests."
    )
    folder = Path(os.path.relpath(path.parent, ROOT)).as_posix()
    plots = [f"![{alt}]({folder}/{path.stem}_{plot}.svg)" for plot, alt in PLOTS.items()]
    return "\n\n".join([
        where,
        *plots,
        f"Times as fast as cuBLAS in float16, {HEADLINE.upper()}, `a16` / `a8`:",
        speedups_table(rows),
        *others(rows),
        *dequantized(rows),
        *sustained(results),
        *without_wgmma(results),
        "Share of the speed of memory at M = 1 (time of only reading the packed bytes / ours), `a16` / `a8`:",
        shares_table(rows),
        *before(rows),
        " ".join([on_host(results), *packing(results)]),
    ])  # fmt: skip


def others(rows: Rows) -> Iterator[str]:
    """The table of formats at one shape, if they were measured there: one row a format, one column an M."""
    shape, counts = LARGE[0], (1, *OTHERS_M)
    formats = [fmt for fmt in rows.formats if fmt not in KBIT and all(rows(fmt, "a16", m, shape) for m in counts)]
    if formats:
        lines = [[fmt.upper(), *(f"{speedup(rows(fmt, 'a16', m, shape)):.2f}" for m in counts)] for fmt in formats]
        yield f"Times as fast as cuBLAS in float16 by format and M, `a16`, {name(shape)}:"
        yield markdown(["format", *map(str, counts)], lines)


def on_host(results: Results) -> str:
    """The sentence on what a call costs the host."""
    fastest, slowest = (
        ", ".join(f"{us} us for `{activation}`" for activation, us in results.get(name, {}).items())
        for name in ("host_us", "host_slowest_us")
    )
    where = f" on its fastest CPU, {slowest} on its slowest" if slowest else ""
    return f"A call of `qgemm.matmul` on prepared tensors costs the host {fastest}{where}."


def dequantized(rows: Rows) -> Iterator[str]:
    """The sentence on decoding the whole matrix for each product, if that was measured."""
    found = [row for row in rows.by_key.values() if row["format"] == HEADLINE and "dequantize_us" in row]
    if found:
        longer = [row["dequantize_us"] / row["us"] for row in found]
        m = sorted({row["M"] for row in found})
        yield (
            f"Decoding the matrix to float16 for each product and then cuBLAS take {min(longer):.0f} to "
            f"{max(longer):.0f} times as long, at M = {', '.join(map(str, m))}."
        )


def without_wgmma(results: Results) -> Iterator[str]:
    """The table of the kernels that GPUs without wgmma have, if they were measured."""
    if rows := results.get(MMA):
        yield (
            "The kernels for sm_80 to sm_89, compiled for this GPU, which has others: times as fast as cuBLAS in "
            "float16, `prefill_mma` for `a16` / `prefill_a8` for `a8`:"
        )
        yield speedups_table(Rows({"rows": rows}))


def before(rows: Rows) -> Iterator[str]:
    """The sentence on rows of earlier kernels, if there are any."""
    old = [row for row in rows.by_key.values() if earlier(row)]
    if old:
        formats = ", ".join(sorted({row["format"].upper() for row in old}))
        yield f"Of {formats} some rows, last of {max(row['date'] for row in old)}, were measured with earlier kernels."


def packing(results: Results) -> Iterator[str]:
    """The sentence on packing, if it was measured."""
    if rates := results.get("pack"):
        shares = sorted((100 * rate["share"], fmt.upper()) for fmt, rate in rates.items())
        span = " to ".join(f"{share:.0f}% ({fmt})" for share, fmt in dict.fromkeys((shares[0], shares[-1])))
        yield f"Packing on the GPU runs at {span} of the speed of a device copy."


def sustained(results: Results) -> Iterator[str]:
    """The sentence on a GPU that never rests, if that was measured."""
    rows = Rows(results).by_key
    pairs = [(row, rows[key(row)]) for row in results.get(SUSTAINED, []) if key(row) in rows]
    if pairs:
        longer = ([100 * (busy[of] / rested[of] - 1) for busy, rested in pairs] for of in ("us", "cublas_fp16_us"))
        ours, cublas = (f"{max(found):.0f}%" for found in longer)
        m = sorted({row["M"] for row, _ in pairs})
        yield (
            "Without a rest the GPU soon meets its power limit and lowers its clock: at "
            f"M = {m[0]} to {m[-1]} products then take up to {ours} longer, those of cuBLAS up to {cublas}."
        )


PLOTS = {"speedup": "speed-up over cuBLAS by M", "bandwidth": "bandwidth by shape"}


def speedups_table(rows: Rows) -> str:
    """One row an M, one column a shape."""
    shapes = rows.shapes(HEADLINE)
    lines = [[str(m), *(pair(rows, speedup, "{:.2f}", HEADLINE, m, shape) for shape in shapes)] for m in rows.m]
    return markdown(["M", *map(name, shapes)], lines)


def shares_table(rows: Rows) -> str:
    """One row a format, one column a shape."""
    shapes = rows.shapes(HEADLINE)
    lines = [
        [fmt.upper(), *(pair(rows, lambda row: 100 * share(row), "{:.0f}%", fmt, 1, shape) for shape in shapes)]
        for fmt in rows.formats
        if fmt not in KBIT
    ]
    return markdown(["format", *map(name, shapes)], lines)


def kbit_tables(path: Path = RESULTS) -> str:
    """README's section between the markers `kbit`: speed by K and shape, and that of the kernels for flat planes."""
    results = load(path) if path.exists() else None
    rows = Rows(results) if results else None
    formats = [fmt for fmt in KBIT if rows and rows.shapes(fmt)]
    if results is None or rows is None or not formats:
        return f"Not measured yet: `tools/bench.py --out tools/results --merge --formats {','.join(KBIT)}`."

    def table(cell: Callable[[str, tuple[int, int]], str]) -> str:
        lines = [[name(shape), *(cell(fmt, shape) for fmt in formats)] for shape in rows.shapes(*formats)]
        return markdown(["N x K", *(fmt.upper() for fmt in formats)], lines)

    def decoding(fmt: str, shape: tuple[int, int]) -> str:
        row = rows(fmt, "a16", 1, shape)
        return "–" if row is None else f"{row['us']:.1f} ({1 / share(row):.2f})"

    def speedups(fmt: str, shape: tuple[int, int]) -> str:
        found = (rows(fmt, "a16", m, shape) for m in KBIT_M)
        return " / ".join("–" if row is None else f"{speedup(row):.2f}" for row in found)

    return "\n\n".join([
        "Microseconds at M = 1 (times of only reading the packed bytes):",
        table(decoding),
        f"Times as fast as cuBLAS in float16, at M = {' / '.join(map(str, KBIT_M))}:",
        table(speedups),
        *plane_rates(results),
    ])  # fmt: skip


def plane_rates(results: Results) -> Iterator[str]:
    """The sentence on quantizing and decoding planes, if that was measured."""
    shares = {kernel: [100 * row["share"] for row in results.get("planes", []) if row["kernel"] == kernel]
              for kernel in PLANES}  # fmt: skip
    if all(shares.values()):
        of = (f"{min(found):.0f}% to {max(found):.0f}%" for found in shares.values())
        yield f"Quantizing on the GPU takes {next(of)} of the speed of reading as many bytes, decoding {next(of)}."


def pair(rows: Rows, of, style: str, *what) -> str:
    """A cell: the number of each activation, or a dash."""
    found = (rows(what[0], activation, *what[1:]) for activation in ACTIVATIONS)
    return " / ".join("–" if row is None else style.format(of(row)) for row in found)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table whose first column is on the left."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def name(shape) -> str:
    """(4096, 14336) -> 4096x14336, N x K."""
    return "x".join(map(str, shape))


def plots(results: Results) -> dict[str, str]:
    """The SVG text of each of PLOTS."""
    rows = Rows(results)

    def value(of, *what) -> float | None:
        row = rows(*what)
        return None if row is None else of(row)

    shapes = rows.shapes(HEADLINE)
    panels = [
        svg.Panel(
            f"{HEADLINE.upper()} {activation}: times as fast as cuBLAS fp16, by M",
            [str(m) for m in rows.m],
            [
                svg.Series(name(shape), [value(speedup, HEADLINE, activation, m, shape) for m in rows.m])
                for shape in shapes
            ],
        )
        for activation in ACTIVATIONS
    ]
    memory = [
        svg.Series(
            fmt.upper(),
            [value(lambda row: row["gbs"], fmt, "a16", 1, shape) for shape in shapes],
            [value(lambda row: row["gbs"] / share(row), fmt, "a16", 1, shape) for shape in shapes],
        )
        for fmt in rows.formats
    ]
    title = "a16, M = 1: packed bytes a second by shape N x K; outlines: only reading them"
    return {
        "speedup": svg.lines(panels, "cuBLAS time / ours", mark=1),
        "bandwidth": svg.bars(svg.Panel(title, [name(shape) for shape in shapes], memory), "GB/s"),
    }


def main(path: Path) -> int:
    """Print the targets and draw the plots; 1 if a target is missed."""
    results = load(path)
    for plot, drawing in plots(results).items():
        (path.parent / f"{path.stem}_{plot}.svg").write_text(drawing)
    table = targets_table(results)
    print(table)
    return 1 if "MISS" in table else 0
