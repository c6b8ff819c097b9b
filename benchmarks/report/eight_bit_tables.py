"""Tables of docs/kernels/eight_bits.md: products of eight bits beside cuBLAS, from rows of `python -m benchmarks`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import tables
from benchmarks.results import Row, earlier, load, speedup

RESULTS = tables.RESULTS.with_name("h200_eight_bits.json")
FORMATS = ("q4_0", "q4_k", "mxfp4")  # measured at all shapes; other formats at SHAPE only
SHAPE = (8192, 8192)
KIND = "a8_g256"
E4M3 = "e4m3_g256"  # mxfp4 only


def products_table(path: Path = RESULTS) -> str:
    """A row for each shape and M: speed-up over cuBLAS float16 for FORMATS, by KIND / by a16."""
    rows = tables.Rows(load(path))
    lines = []
    for shape in rows.shapes(*FORMATS):
        for m in counts(rows, FORMATS[0], shape):
            row = measured(rows, FORMATS[0], KIND, m, shape)
            lines.append([
                tables.name(shape), str(m), f"{row['cublas_fp16_us']:.1f}",
                f"{row['cublas_fp16_us'] / row['fp8_us']:.2f}", *(speedups(rows, fmt, m, shape) for fmt in FORMATS),
            ])  # fmt: skip
    return tables.markdown(["W", "M", "cuBLAS fp16, us", "cuBLAS FP8", *FORMATS], lines)


def speedups(rows: tables.Rows, fmt: str, m: int, shape: tuple[int, int]) -> str:
    """A cell: by KIND / by a16; a star marks a row of earlier kernels."""
    a16 = rows(fmt, "a16", m, shape)
    return f"{starred(measured(rows, fmt, KIND, m, shape))} / {'-' if a16 is None else starred(a16)}"


def starred(row: Row) -> str:
    """The speed-up of a row, with a star if it was measured with earlier kernels."""
    return f"{speedup(row):.2f}{'*' * earlier(row)}"


def others_table(path: Path = RESULTS) -> str:
    """A row for each other format, a column for each M: speed-up over cuBLAS float16 (speed relative to FORMATS[0])."""
    rows = tables.Rows(load(path))
    every_m = counts(rows, FORMATS[0], SHAPE)
    others = [fmt for fmt in rows.formats if fmt not in FORMATS]
    lines = [[fmt, *(share(rows, fmt, m) for m in every_m)] for fmt in others]
    return tables.markdown([tables.name(SHAPE), *(f"M = {m}" for m in every_m)], lines)


def share(rows: tables.Rows, fmt: str, m: int) -> str:
    """A cell: the speed-up of a format, and its speed relative to FORMATS[0]."""
    row, first = (measured(rows, name, KIND, m, SHAPE) for name in (fmt, FORMATS[0]))
    return f"{speedup(row):.2f} ({first['us'] / row['us']:.2f}){'*' * earlier(row)}"


def e4m3_table(path: Path = RESULTS) -> str:
    """A row for each shape and M of mxfp4: us (speed-up over cuBLAS float16) for each activation."""
    rows, kinds = tables.Rows(load(path)), ("a16", KIND, E4M3)
    lines = []
    for shape in rows.shapes("mxfp4"):
        for m in counts(rows, "mxfp4", shape):
            products = [measured(rows, "mxfp4", kind, m, shape) for kind in kinds]
            cublas, fp8 = products[-1]["cublas_fp16_us"], {**products[-1], "us": products[-1]["fp8_us"]}
            lines.append([tables.name(shape), str(m), f"{cublas:.1f}", *map(timed, [fp8, *products])])
    return tables.markdown(["W", "M", "cuBLAS fp16, us", "cuBLAS FP8", *kinds], lines)


def timed(row: Row) -> str:
    """A cell."""
    return f"{row['us']:.1f} ({speedup(row):.2f}){'*' * earlier(row)}"


def counts(rows: tables.Rows, fmt: str, shape: tuple[int, int]) -> list[int]:
    """The values of M that were measured."""
    return [m for m in rows.m if rows(fmt, KIND, m, shape)]


def measured(rows: tables.Rows, fmt: str, kind: str, m: int, shape: tuple[int, int]) -> Row:
    """The row of a product; KeyError if it was not measured."""
    row = rows(fmt, kind, m, shape)
    if row is None:
        raise KeyError(f"{fmt} by {kind} of {shape[0]}x{shape[1]} with M = {m} was not measured")
    return row
