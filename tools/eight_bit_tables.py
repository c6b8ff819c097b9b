"""Tables of docs/kernels/eight_bits.md: products of eight bits beside cuBLAS, from rows of `qgemm bench`."""

from __future__ import annotations

from pathlib import Path

import tables

from qgemm.bench.results import Row, earlier, load, speedup

RESULTS = tables.RESULTS.with_name("h200_eight_bits.json")
FORMATS = ("q4_0", "q4_k", "mxfp4")  # of all shapes; others of SHAPE
SHAPE = (8192, 8192)
KIND = "a8_g256"
E4M3 = "e4m3_g256"  # of mxfp4 alone
# How many times as fast as cuBLAS float16 is wanted, by the largest side of W and M.
WANTED = {
    8192: {256: 1.2, 512: 1.3, 1024: 1.35, 4096: 1.4},
    14336: {256: 1.15, 512: 1.2, 1024: 1.3, 4096: 1.35},
    4096: {256: 1.0, 512: 1.1, 1024: 1.2, 4096: 1.3},
}
WANTED[28672] = WANTED[8192]
SHARE = 0.92  # of the speed of FORMATS[0] is wanted of other formats


def products_table(path: Path = RESULTS) -> str:
    """One row a shape and M: times as fast as cuBLAS float16 in FORMATS. Bold: missed; a star: an earlier run."""
    rows = tables.Rows(load(path))
    lines = []
    for shape in rows.shapes(*FORMATS):
        for m in counts(rows, FORMATS[0], shape):
            row, wanted = measured(rows, FORMATS[0], KIND, m, shape), WANTED[max(shape)][m]
            lines.append([
                tables.name(shape), str(m), f"{row['cublas_fp16_us']:.1f}",
                f"{row['cublas_fp16_us'] / row['fp8_us']:.2f}", str(wanted),
                *(speedups(rows, fmt, m, shape, wanted) for fmt in FORMATS),
            ])  # fmt: skip
    return tables.markdown(["W", "M", "cuBLAS fp16, us", "cuBLAS FP8", "wanted", *FORMATS], lines)


def speedups(rows: tables.Rows, fmt: str, m: int, shape: tuple[int, int], wanted: float) -> str:
    """A cell: the speed-up of KIND, then that of a16."""
    row, a16 = measured(rows, fmt, KIND, m, shape), rows(fmt, "a16", m, shape)
    a16_cell = "-" if a16 is None else f"{speedup(a16):.2f}{'*' * earlier(a16)}"
    return f"{bold(f'{speedup(row):.2f}' + '*' * earlier(row), speedup(row) < wanted)} / {a16_cell}"


def missed_table(path: Path = RESULTS) -> str:
    """One row a shape, one column an M: by how much FORMATS miss what is wanted; empty where none does."""
    rows = tables.Rows(load(path))
    shapes = rows.shapes(*FORMATS)
    every_m = sorted({m for shape in shapes for m in counts(rows, FORMATS[0], shape)})
    lines = [[tables.name(shape), *(missed(rows, m, shape) for m in every_m)] for shape in shapes]
    return tables.markdown(["missed by", *(f"M = {m}" for m in every_m)], lines)


def missed(rows: tables.Rows, m: int, shape: tuple[int, int]) -> str:
    """A cell: a number for each of FORMATS, a dash where it has what is wanted."""
    by = [WANTED[max(shape)][m] - speedup(measured(rows, fmt, KIND, m, shape)) for fmt in FORMATS]
    return " / ".join(f"{less:.2f}" if less > 0 else "-" for less in by) if max(by) > 0 else ""


def others_table(path: Path = RESULTS) -> str:
    """One row a format that is not in FORMATS, one column an M: times as fast as cuBLAS float16 (as FORMATS[0])."""
    rows = tables.Rows(load(path))
    every_m = counts(rows, FORMATS[0], SHAPE)
    others = [fmt for fmt in rows.formats if fmt not in FORMATS]
    lines = [[fmt, *(share(rows, fmt, m) for m in every_m)] for fmt in others]
    return tables.markdown([tables.name(SHAPE), *(f"M = {m}" for m in every_m)], lines)


def share(rows: tables.Rows, fmt: str, m: int) -> str:
    """A cell, bold where a format has less than SHARE of the speed of FORMATS[0]."""
    row, first = (measured(rows, of, KIND, m, SHAPE) for of in (fmt, FORMATS[0]))
    of_first = first["us"] / row["us"]
    return bold(f"{speedup(row):.2f} ({of_first:.2f}){'*' * earlier(row)}", of_first < SHARE)


def e4m3_table(path: Path = RESULTS) -> str:
    """One row a shape and M: us, and in brackets times as fast as cuBLAS float16, by what multiplies mxfp4."""
    rows, kinds = tables.Rows(load(path)), ("a16", KIND, E4M3)
    lines = []
    for shape in rows.shapes("mxfp4"):
        for m in counts(rows, "mxfp4", shape):
            found = [measured(rows, "mxfp4", kind, m, shape) for kind in kinds]
            cublas, fp8 = found[-1]["cublas_fp16_us"], {**found[-1], "us": found[-1]["fp8_us"]}
            lines.append([tables.name(shape), str(m), f"{cublas:.1f}", *map(timed, [fp8, *found])])
    return tables.markdown(["W", "M", "cuBLAS fp16, us", "cuBLAS FP8", *kinds], lines)


def timed(row: Row) -> str:
    """A cell."""
    return f"{row['us']:.1f} ({speedup(row):.2f}){'*' * earlier(row)}"


def counts(rows: tables.Rows, fmt: str, shape: tuple[int, int]) -> list[int]:
    """The numbers of rows of x that were measured."""
    return [m for m in rows.m if rows(fmt, KIND, m, shape)]


def measured(rows: tables.Rows, fmt: str, kind: str, m: int, shape: tuple[int, int]) -> Row:
    """A row that is there."""
    row = rows(fmt, kind, m, shape)
    if row is None:
        raise KeyError(f"{fmt} by {kind} of {shape[0]}x{shape[1]} with M = {m} was not measured")
    return row


def bold(text: str, yes: bool) -> str:
    """The text as it is, or bold."""
    return f"**{text}**" if yes else text
