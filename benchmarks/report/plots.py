"""The two plots of README.md, from a results file and the baselines beside it."""

from __future__ import annotations

from benchmarks.report import svg
from benchmarks.report.eight_bit_tables import SHORT
from benchmarks.report.tables import HEADLINE, LARGE, Rows, baseline_rows, name
from benchmarks.results import Results, share, speedup
from qgemm import FORMATS
from qgemm.arguments import ACTIVATIONS

PLOTS = ("speedup", "bandwidth")
LLAMA_CPP = ("q4_0", "q8_0")  # formats in which llama.cpp was measured


def plots(results: Results) -> dict[str, str]:
    """The SVG text of each of PLOTS."""
    rows = Rows(results)
    return {
        "speedup": svg.lines([speedups(rows, *panel) for panel in panels(rows)], "cuBLAS time / ours", mark=1),
        "bandwidth": svg.bars(bandwidths(rows), "GB/s"),
    }


def panels(rows: Rows) -> list[tuple[str, str]]:
    """Activation and type of x of each panel of speed-ups: both activations of float16, "a16" of bfloat16."""
    return [*((activation, "float16") for activation in ACTIVATIONS), *(("a16", x) for x in rows.types[1:])]


def speedups(rows: Rows, activation: str, x: str) -> svg.Panel:
    """Speed-up over cuBLAS by M, with a line for each shape; llama.cpp on one shape, dashed."""

    def line(shape: tuple[int, int]) -> svg.Series:
        shape_rows = (rows(HEADLINE, activation, m, shape, x) for m in rows.m)
        return svg.Series(name(shape), [None if row is None else speedup(row) for row in shape_rows])

    theirs = baseline_rows("llama.cpp", HEADLINE, LARGE[0])
    llama = [speedup(theirs[m]) if m in theirs else None for m in rows.m]
    return svg.Panel(
        f"{HEADLINE.upper()} {activation}: times as fast as cuBLAS {SHORT[x]}, by M",
        [str(m) for m in rows.m],
        [*map(line, rows.shapes(HEADLINE)), svg.Series(f"llama.cpp, {name(LARGE[0])}", llama, dashed=True)],
    )


def bandwidths(rows: Rows) -> svg.Panel:
    """Bytes of weights a second at M = 1, with a group of bars for each format and a colour for each shape."""

    def bars(shape: tuple[int, int]) -> svg.Series:
        ours = [rows(fmt, "a16", 1, shape) for fmt in rows.formats]
        theirs = [llama_gbs(fmt, shape) for fmt in LLAMA_CPP]
        cublas = rows(HEADLINE, "a16", 1, shape)
        return svg.Series(
            name(shape),
            [
                *(None if row is None else row["gbs"] for row in ours),
                *theirs,
                None if cublas is None else gbs(2 * shape[0] * shape[1], cublas["cublas_fp16_us"]),
            ],
            [*(None if row is None else row["gbs"] / share(row) for row in ours), *[None] * (len(theirs) + 1)],
        )

    places = [*map(str.upper, rows.formats), *(f"llama.cpp\n{fmt.upper()}" for fmt in LLAMA_CPP), "cuBLAS\nF16"]
    title = "a16, M = 1: bytes of weights a second by format; outlines: only reading them"
    return svg.Panel(title, places, [bars(shape) for shape in LARGE])


def llama_gbs(fmt: str, shape: tuple[int, int]) -> float | None:
    """Packed bytes that llama.cpp multiplies a second at M = 1, in 1e9; None if it was not measured."""
    row = baseline_rows("llama.cpp", fmt, shape).get(1)
    return None if row is None else gbs(shape[0] * shape[1] * FORMATS[fmt].bpw / 8, row["us"])


def gbs(nbytes: float, us: float) -> float:
    """Bytes a second, in 1e9."""
    return nbytes / us / 1e3
