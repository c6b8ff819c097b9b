"""Tables of a results file for the documents: README.md's one, docs/performance.md's and docs/kbit.md's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from benchmarks import stale
from benchmarks.results import (
    CALLS,
    MMA,
    STEPS,
    SUSTAINED,
    X_TYPES,
    Results,
    Row,
    dense_us,
    earlier,
    key,
    load,
    share,
    speedup,
    x_of,
)
from qgemm.arguments import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "results" / "h200.json"  # the one that the documents show
BASELINES = RESULTS.with_name("baselines.json")  # other libraries on the same kind of GPU, in runs of their own
HEADLINE = "q4_0"  # the format of README's table and of the plot of speed-ups
LARGE = ((8192, 8192), (28672, 8192))  # shapes at which every format is measured at M = 1
KBIT = ("kbit2", "kbit3", "kbit4", "kbit5")
KBIT_M = (1, 8, 64, 1024)  # in the tables of docs/kbit.md
PLANE_KERNELS = ("quantize_codebook", "dequantize_codebook")
TYPES_OF_CELLS = "x and y float16 / bfloat16"  # the legend of cells with two texts
OTHERS_M = (16, 32, 64, 256, 512, 1024, 4096)  # formats are compared with HEADLINE at these M


class Rows:
    """The rows of a results file by their keys."""

    def __init__(self, results: Results) -> None:
        self.by_key = {key(row): row for row in results["rows"]}

    def __call__(self, fmt: str, activation: str, m: int, shape: tuple[int, int], x: str = X_TYPES[0]) -> Row | None:
        return self.by_key.get((fmt, activation, m, *shape, x))

    def both(self, fmt: str, activation: str, m: int, shape: tuple[int, int], cell: Callable[[Row], str]) -> str:
        """A cell: the text of the row by x of each type, or a dash."""
        return both((self(fmt, activation, m, shape, x) for x in X_TYPES), cell)

    @property
    def types(self) -> list[str]:
        """The types of x that were measured, float16 first."""
        return [x for x in X_TYPES if any(identity[-1] == x for identity in self.by_key)]

    def values(self, position: int) -> list:
        """The values at this position of the keys, in ascending order."""
        return sorted({identity[position] for identity in self.by_key})

    @property
    def formats(self) -> list[str]:
        """Names of the formats."""
        return self.values(0)

    @property
    def m(self) -> list[int]:
        """Numbers of rows of x."""
        return self.values(2)

    def shapes(self, *formats: str) -> list[tuple[int, int]]:
        """The measured shapes (N, K) of these formats, the smallest matrix first."""
        shapes = {(identity[3], identity[4]) for identity in self.by_key if identity[0] in formats}
        return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def both(rows: Iterable[Row | None], cell: Callable[[Row], str]) -> str:
    """A cell with the texts of rows by x of each type; dashes stand for missing rows.

    >>> both([{"us": 1.0}, None], lambda row: f"{row['us']:.1f}")
    '1.0 / –'
    """
    return " / ".join("–" if row is None else cell(row) for row in rows)


def times_faster(row: Row) -> str:
    """A cell: the speed-up over cuBLAS in the type of x."""
    return f"{speedup(row):.2f}"


def baselines(path: Path = BASELINES) -> Results:
    """Other libraries: rows with library, format, M, N, K, us, and cublas_fp16_us of the library's own run."""
    results: Results = json.loads(path.read_text())
    return results


def baseline_rows(library: str, fmt: str, shape: tuple[int, int]) -> dict[int, Row]:
    """The rows of a library in a format on one shape (N, K), by M."""
    rows = (row for row in baselines()["rows"] if (row["library"], row["format"]) == (library, fmt))
    return {row["M"]: row for row in rows if (row["N"], row["K"]) == shape}


def headline_table(path: Path = RESULTS) -> str:
    """Section `products` of docs/performance.md: microseconds of HEADLINE on one shape beside cuBLAS and llama.cpp."""
    results, shape = load(path), LARGE[0]
    rows, theirs = Rows(results), baseline_rows("llama.cpp", HEADLINE, shape)
    lines, apart = [], 0.0

    def us(row: Row) -> str:
        return f"{row['us']:.1f}"

    for m, llama in theirs.items():
        a16 = rows(HEADLINE, "a16", m, shape)
        if a16 is None:
            continue
        apart = max(apart, abs(llama["cublas_fp16_us"] / dense_us(a16) - 1))
        cells = [rows.both(HEADLINE, activation, m, shape, us) for activation in ACTIVATIONS]
        cells.append(rows.both(HEADLINE, "a16", m, shape, lambda row: f"{dense_us(row):.1f}"))
        over_cublas = rows.both(HEADLINE, "a16", m, shape, times_faster)
        lines.append([str(m), *cells, us(llama), over_cublas, f"{llama['us'] / a16['us']:.2f}"])
    head = ["M", "qgemm `a16`", "qgemm `a8`", "cuBLAS", "llama.cpp", "over cuBLAS", "over llama.cpp"]
    return "\n\n".join([
        f"{results['device']}, {HEADLINE.upper()}, N x K = {name(shape)}, {TYPES_OF_CELLS}, microseconds a product:",
        markdown(head, lines),
        "The last two columns are of `a16`. cuBLAS multiplies weights of the type of x in the same run; llama.cpp ran "
        "on an H200 by the same protocol in another run, in which cuBLAS in float16 took the same time within "
        f"{100 * apart:.0f}%.",
    ])  # fmt: skip


def baselines_table() -> str:
    """Section `baselines` of docs/performance.md: a table for each shape, with rows by library and columns by M."""
    results = baselines()
    parts = [results["source"]]
    for shape in dict.fromkeys((row["N"], row["K"]) for row in results["rows"]):
        rows = [row for row in results["rows"] if (row["N"], row["K"]) == shape]
        counts = sorted({row["M"] for row in rows})
        lines = []
        for library, fmt in dict.fromkeys((row["library"], row["format"]) for row in rows):
            by_m = baseline_rows(library, fmt, shape)
            cells = (f"{by_m[m]['us']:g} ({speedup(by_m[m]):.2f})" if m in by_m else "–" for m in counts)
            lines.append([f"{library} {fmt}", *cells])
        parts.append(f"{name(shape)}, us (speed-up over cuBLAS in float16), by M:")
        parts.append(markdown(["library, weights", *map(str, counts)], lines))
    return "\n\n".join(parts)


def speed_table(path: Path = RESULTS) -> str:
    """Section `speed` of docs/performance.md: the machine, and all tables."""
    if not path.exists():
        return "Not measured yet: `python -m benchmarks --out tools/results`, then `python -m benchmarks --report`."
    results = load(path)
    rows = Rows(results)
    clocks = results["clocks"]
    where = (
        f"{results['device']} ({clocks['sm_mhz']} MHz, memory {clocks['mem_mhz']} MHz), driver {results['driver']}, "
        f"CUDA {results['cuda']}, {results['date']}; {TYPES_OF_CELLS}, weights read from memory, median of graph "
        f"replays, between which the GPU rests."
    )
    return "\n\n".join([
        where,
        *speedups_tables(rows, f"Speed-up over cuBLAS, {HEADLINE.upper()}, `{{}}`, by M and N x K:"),
        *others(rows),
        *dequantized(rows),
        *sustained(results),
        *without_wgmma(results),
        *shares_tables(rows),
        *before(rows),
        *stale_rows(results),
        *steps(results),
        *calls(results),
        " ".join([on_host(results), *packing(results)]),
    ])  # fmt: skip


def others(rows: Rows) -> Iterator[str]:
    """The table of formats at one shape, if it was measured: a row for each format, a column for each M."""
    shape, counts = LARGE[0], (1, *OTHERS_M)
    formats = [fmt for fmt in rows.formats if fmt not in KBIT and all(rows(fmt, "a16", m, shape) for m in counts)]
    if formats:
        lines = [[fmt.upper(), *(rows.both(fmt, "a16", m, shape, times_faster) for m in counts)] for fmt in formats]
        yield f"Speed-up over cuBLAS by format and M, `a16`, {name(shape)}:"
        yield markdown(["format", *map(str, counts)], lines)


def steps(results: Results) -> Iterator[str]:
    """The table of decode steps, if they were measured: a row for each mixture, a column for each number of tokens."""
    by_key = {(row["types"], row["M"], x_of(row)): row for row in results.get(STEPS, [])}
    counts = sorted({m for _, m, _ in by_key})
    if by_key:

        def cell(row: Row) -> str:
            return f"{row['us']:.0f} ({row['us'] / row['read_us']:.2f})"

        lines = [
            [types.upper(), *(both((by_key.get((types, m, x)) for x in X_TYPES), cell) for m in counts)]
            for types in dict.fromkeys(types for types, *_ in by_key)
        ]
        yield (
            "All linear layers and the head of a Llama-3-8B in one CUDA graph, us by number of tokens, and in "
            "parentheses over the time of reading the same bytes in one piece:"
        )
        yield markdown(["types", *map(str, counts)], lines)


def calls(results: Results) -> Iterator[str]:
    """The table of host times of calls, if they were measured: a row for each call, a column for each library."""
    by_key = {(row["library"], row["call"]): row for row in results.get(CALLS, [])}
    libraries = sorted({library for library, _ in by_key})
    if by_key:
        lines = []
        for call in dict.fromkeys(call for _, call in by_key):
            call_rows = [by_key.get((library, call)) for library in libraries]
            (beside,) = {row["beside"] for row in call_rows if row}
            cells = [f"{row['us']:.1f} ({row['us'] / row['beside_us']:.2f})" if row else "–" for row in call_rows]
            lines.append([call, *cells, beside])
        yield "Time of the host for a call in us, Q4_0 1024x1024, and in parentheses over that of the last column:"
        yield markdown(["call", *libraries, "beside"], lines)


def on_host(results: Results) -> str:
    """The sentence on the host time of a call."""
    fastest, slowest = (
        ", ".join(f"{us} us for `{activation}`" for activation, us in results.get(name, {}).items())
        for name in ("host_us", "host_slowest_us")
    )
    where = f" on its fastest CPU, {slowest} on its slowest" if slowest else ""
    return f"A call of `qgemm.matmul` on prepared tensors costs the host {fastest}{where}."


def dequantized(rows: Rows) -> Iterator[str]:
    """The sentence on decoding the whole matrix for each product, if that was measured."""
    measured = [row for row in rows.by_key.values() if row["format"] == HEADLINE and "dequantize_us" in row]
    if measured:
        longer = [row["dequantize_us"] / row["us"] for row in measured]
        m = sorted({row["M"] for row in measured})
        yield (
            f"Dequantizing W to float16 for each product, then multiplying by cuBLAS, costs {min(longer):.0f} to "
            f"{max(longer):.0f} times as much time, at M = {', '.join(map(str, m))}."
        )


def without_wgmma(results: Results) -> Iterator[str]:
    """The table of the kernels for GPUs without wgmma, if they were measured."""
    if rows := results.get(MMA):
        title = "The kernels for GPUs without wgmma (sm_80 to sm_89), measured on this one: speed-up over cuBLAS, `{}`:"
        yield from speedups_tables(Rows({"rows": rows}), title)


def before(rows: Rows) -> Iterator[str]:
    """The sentence on rows of earlier kernels, if there are any."""
    old = [row for row in rows.by_key.values() if earlier(row)]
    if old:
        formats = ", ".join(sorted({row["format"].upper() for row in old}))
        last = max(row["date"] for row in old)
        yield f"Some rows of {formats}, the last of {last}, were measured with earlier kernels."


def stale_rows(results: Results) -> Iterator[str]:
    """The sentence on rows whose kernels have changed since, if there are any."""
    if text := stale.sentence(results):
        yield text


def packing(results: Results) -> Iterator[str]:
    """The sentence on packing, if it was measured."""
    if rates := results.get("pack"):
        shares = sorted((100 * rate["share"], fmt.upper()) for fmt, rate in rates.items())
        span = " to ".join(f"{share:.0f}% ({fmt})" for share, fmt in dict.fromkeys((shares[0], shares[-1])))
        yield f"Packing on the GPU runs at {span} of the speed of a device copy."


def sustained(results: Results) -> Iterator[str]:
    """The sentence on a GPU without pauses, if that was measured."""
    rows = Rows(results).by_key
    pairs = [(row, rows[key(row)]) for row in results.get(SUSTAINED, []) if key(row) in rows]
    if pairs:
        longer = ([100 * (us(busy) / us(rested) - 1) for busy, rested in pairs] for us in (itemgetter("us"), dense_us))
        ours, cublas = (f"{max(percents):.0f}%" for percents in longer)
        m = sorted({row["M"] for row, _ in pairs})
        yield (
            "Back-to-back replays reach the GPU's power limit, which lowers its clock: at "
            f"M = {m[0]} to {m[-1]} products then take up to {ours} longer, those of cuBLAS up to {cublas}."
        )


def speedups_tables(rows: Rows, title: str) -> Iterator[str]:
    """For each activation the title, which names it, and a table: a row for each M, a column for each shape."""
    shapes = rows.shapes(HEADLINE)
    for activation in ACTIVATIONS:
        lines = [
            [str(m), *(rows.both(HEADLINE, activation, m, shape, times_faster) for shape in shapes)] for m in rows.m
        ]
        yield title.format(activation)
        yield markdown(["M", *map(name, shapes)], lines)


def shares_tables(rows: Rows) -> Iterator[str]:
    """For each activation a heading and a table: a row for each format, a column for each shape."""
    shapes = rows.shapes(HEADLINE)
    for activation in ACTIVATIONS:
        lines = [
            [fmt.upper(), *(rows.both(fmt, activation, 1, shape, lambda row: f"{share(row):.0%}") for shape in shapes)]
            for fmt in rows.formats
            if fmt not in KBIT
        ]
        yield (
            "Share of memory speed at M = 1 (time of a kernel that only reads the packed bytes / ours), "
            f"`{activation}`:"
        )
        yield markdown(["format", *map(name, shapes)], lines)


def kbit_tables(path: Path = RESULTS) -> str:
    """Section `kbit` of docs/kbit.md: speed by format and shape, and the speed of the kernels for flat planes."""
    results = load(path) if path.exists() else None
    rows = Rows(results) if results else None
    formats = [fmt for fmt in KBIT if rows and rows.shapes(fmt)]
    if results is None or rows is None or not formats:
        return f"Not measured yet: `python -m benchmarks --out tools/results --merge --formats {','.join(KBIT)}`."

    def table(cell: Callable[[str, tuple[int, int]], str]) -> str:
        lines = [[name(shape), *(cell(fmt, shape) for fmt in formats)] for shape in rows.shapes(*formats)]
        return markdown(["N x K", *(fmt.upper() for fmt in formats)], lines)

    def decoding(fmt: str, shape: tuple[int, int]) -> str:
        return rows.both(fmt, "a16", 1, shape, lambda row: f"{row['us']:.1f} ({1 / share(row):.2f})")

    def speedups(x: str) -> Callable[[str, tuple[int, int]], str]:
        return lambda fmt, shape: both((rows(fmt, "a16", m, shape, x) for m in KBIT_M), times_faster)

    parts = [f"Microseconds at M = 1 (over the time of a kernel that only reads the packed bytes), {TYPES_OF_CELLS}:"]
    parts.append(table(decoding))
    for x in rows.types:
        parts += [f"Speed-up over cuBLAS in {x} at M = {' / '.join(map(str, KBIT_M))}:", table(speedups(x))]
    return "\n\n".join([*parts, *plane_rates(results)])


def plane_rates(results: Results) -> Iterator[str]:
    """The sentence on quantizing and decoding planes, if that was measured."""
    shares = {kernel: [100 * row["share"] for row in results.get("planes", []) if row["kernel"] == kernel]
              for kernel in PLANE_KERNELS}  # fmt: skip
    if all(shares.values()):
        quantize, dequantize = (f"{min(percents):.0f}% to {max(percents):.0f}%" for percents in shares.values())
        yield f"Quantizing on the GPU reaches {quantize} of the speed of reading the same bytes, decoding {dequantize}."


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table whose first column is aligned left."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def name(shape) -> str:
    """(4096, 14336) -> 4096x14336, N x K."""
    return "x".join(map(str, shape))
