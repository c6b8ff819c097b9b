"""Table of docs/kernels/eight_bits.md: products of eight bits beside cuBLAS, from rows of `qgemm bench`."""

from __future__ import annotations

from pathlib import Path

import tables

from qgemm.bench.results import Row, earlier, load, speedup

RESULTS = tables.RESULTS.with_name("h200_eight_bits.json")
FORMATS = ("q4_0", "q4_k", "mxfp4")  # of all shapes; others follow below
KIND = "a8_g256"
# How many times as fast as cuBLAS float16 is wanted, by the largest side of W and M.
WANTED = {
    8192: {256: 1.2, 512: 1.3, 1024: 1.35, 4096: 1.4},
    14336: {256: 1.15, 512: 1.2, 1024: 1.3, 4096: 1.35},
    4096: {256: 1.0, 512: 1.1, 1024: 1.2, 4096: 1.3},
}
WANTED[28672] = WANTED[8192]


def table(path: Path = RESULTS) -> str:
    """All shapes in a few formats, then all others; a dash: not measured. What is wanted and missed is bold.

    A star: of an earlier run. Of other kinds than KIND, which stand beside it, some are, without a star.
    """
    results = load(path)
    rows = tables.Rows(results)
    main = [
        cells(rows, shape, m) for shape in rows.shapes(*FORMATS) for m in rows.m if rows(FORMATS[0], KIND, m, shape)
    ]
    head = ["W", "M", "cuBLAS fp16, us", "cuBLAS FP8", "wanted", *FORMATS]
    others = [other for other in rows.formats if other not in FORMATS]
    rest = [
        [f"{fmt}, {n}x{k}{'*' * earlier(measured(rows, fmt, KIND, m, (n, k)))}", str(m), ratios(rows, fmt, m, (n, k))]
        for fmt in others for n, k in rows.shapes(fmt) for m in rows.m if rows(fmt, KIND, m, (n, k))
    ]  # fmt: skip
    return f"{tables.markdown(head, main)}\n\n{tables.markdown(['other formats', 'M', 'as above'], rest)}"


def cells(rows: tables.Rows, shape: tuple[int, int], m: int) -> list[str]:
    """One row: a shape and M."""
    wanted = WANTED[max(shape)][m]
    found = measured(rows, FORMATS[0], KIND, m, shape)
    missed = any(speedup(measured(rows, fmt, KIND, m, shape)) < wanted for fmt in FORMATS)
    return [
        f"{shape[0]}x{shape[1]}{'*' * earlier(found)}", str(m), f"{found['cublas_fp16_us']:.1f}",
        f"{found['cublas_fp16_us'] / found['fp8_us']:.2f}", f"**{wanted}**" if missed else str(wanted),
        *(ratios(rows, fmt, m, shape) for fmt in FORMATS),
    ]  # fmt: skip


def ratios(rows: tables.Rows, fmt: str, m: int, shape: tuple[int, int]) -> str:
    """Times as fast as cuBLAS float16: in groups of 256, of 128, by a16."""
    found = (rows(fmt, kind, m, shape) for kind in (KIND, "a8_g128", "a16"))
    return " / ".join("-" if row is None else f"{speedup(row):.2f}" for row in found)


def measured(rows: tables.Rows, fmt: str, kind: str, m: int, shape: tuple[int, int]) -> Row:
    """A row that is there."""
    row = rows(fmt, kind, m, shape)
    if row is None:
        raise KeyError(f"{fmt} by {kind} of {shape[0]}x{shape[1]} with M = {m} was not measured")
    return row
