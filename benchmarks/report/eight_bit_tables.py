"""Tables of docs/kernels/eight_bits.md: products of eight bits beside cuBLAS, from rows of `python -m benchmarks`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.report import tables
from benchmarks.results import Row, dense_us, earlier, load, speedup, x_of

RESULTS = tables.RESULTS.with_name("h200_eight_bits.json")
FORMATS = ("q4_0", "q4_k", "mxfp4")  # measured at all shapes; other formats at SHAPE only
SHAPE = (8192, 8192)
KIND = "a8_g256"
E4M3 = "e4m3_g256"  # mxfp4 only
SHORT = {"float16": "fp16", "bfloat16": "bf16"}  # in the column of the type of x


def products_table(path: Path = RESULTS) -> str:
    """A row for each shape, M and type of x: speed-up over cuBLAS in that type for FORMATS, by KIND / by a16."""
    rows = tables.Rows(load(path))
    lines = []
    for shape, m, x in cases(rows, FORMATS[0]):
        row = measured(rows, FORMATS[0], KIND, m, shape, x)
        fp8 = f"{dense_us(row) / row['fp8_us']:.2f}" if "fp8_us" in row else "–"
        start = [tables.name(shape), str(m), SHORT[x], f"{dense_us(row):.1f}", fp8]
        lines.append([*start, *(speedups(rows, fmt, m, shape, x) for fmt in FORMATS)])
    return tables.markdown(["W", "M", "x", "cuBLAS, us", "cuBLAS FP8", *FORMATS], lines)


def speedups(rows: tables.Rows, fmt: str, m: int, shape: tuple[int, int], x: str) -> str:
    """A cell: by KIND / by a16; a star marks a row of earlier kernels, a dash one that was not measured."""
    return tables.both((rows(fmt, kind, m, shape, x) for kind in (KIND, "a16")), starred)


def starred(row: Row) -> str:
    """The speed-up of a row, with a star if it was measured with earlier kernels."""
    return f"{speedup(row):.2f}{'*' * earlier(row)}"


def others_table(path: Path = RESULTS) -> str:
    """A row for each other format, a column for each M: speed-up over cuBLAS (speed relative to FORMATS[0]), by x."""
    rows = tables.Rows(load(path))
    every_m = sorted({m for shape, m, _ in cases(rows, FORMATS[0]) if shape == SHAPE})
    others = [fmt for fmt in rows.formats if fmt not in FORMATS]
    lines = [[fmt, *(share(rows, fmt, m) for m in every_m)] for fmt in others]
    return tables.markdown([tables.name(SHAPE), *(f"M = {m}" for m in every_m)], lines)


def share(rows: tables.Rows, fmt: str, m: int) -> str:
    """A cell: the speed-up of a format and its speed relative to FORMATS[0], by x of each type."""

    def cell(row: Row) -> str:
        first = measured(rows, FORMATS[0], KIND, m, SHAPE, x_of(row))
        return f"{speedup(row):.2f} ({first['us'] / row['us']:.2f}){'*' * earlier(row)}"

    return rows.both(fmt, KIND, m, SHAPE, cell)


def e4m3_table(path: Path = RESULTS) -> str:
    """A row for each shape, M and type of x of mxfp4: us (speed-up over cuBLAS in that type) for each activation."""
    rows, kinds = tables.Rows(load(path)), ("a16", KIND, E4M3)
    lines = []
    for shape, m, x in cases(rows, "mxfp4"):
        products = (rows("mxfp4", kind, m, shape, x) for kind in kinds)
        row = measured(rows, "mxfp4", KIND, m, shape, x)
        fp8 = {**row, "us": row["fp8_us"]} if "fp8_us" in row else None
        start = [tables.name(shape), str(m), SHORT[x], f"{dense_us(row):.1f}"]
        lines.append(
            [*start, *("–" if product_row is None else timed(product_row) for product_row in (fp8, *products))]
        )
    return tables.markdown(["W", "M", "x", "cuBLAS, us", "cuBLAS FP8", *kinds], lines)


def timed(row: Row) -> str:
    """A cell."""
    return f"{row['us']:.1f} ({speedup(row):.2f}){'*' * earlier(row)}"


def cases(rows: tables.Rows, fmt: str) -> Iterator[tuple[tuple[int, int], int, str]]:
    """Shape, M and type of x of the products by KIND that were measured with a format."""
    for shape, m, x in product(rows.shapes(fmt), rows.m, rows.types):
        if rows(fmt, KIND, m, shape, x):
            yield shape, m, x


def measured(rows: tables.Rows, fmt: str, kind: str, m: int, shape: tuple[int, int], x: str = "float16") -> Row:
    """The row of a product; KeyError if it was not measured."""
    row = rows(fmt, kind, m, shape, x)
    if row is None:
        raise KeyError(f"{fmt} by {kind} of {shape[0]}x{shape[1]} with M = {m} and x of {x} was not measured")
    return row
