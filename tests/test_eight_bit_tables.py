"""The tables of docs/kernels/eight_bits.md, of made-up numbers."""

from __future__ import annotations

import pytest
from measured import made_up, row

from benchmarks import results
from benchmarks.report import eight_bit_tables

SHAPE = eight_bit_tables.SHAPE


@pytest.fixture
def path(tmp_path):
    """q4_0 1.5 times as fast as cuBLAS, q4_k 1.25, mxfp4 1.2 by all three kinds, q8_0 1.25, q6_k 1.5."""
    times = {("q4_0", "a8_g256"): 80, ("q4_k", "a8_g256"): 96, ("q6_k", "a8_g256"): 80, ("q8_0", "a8_g256"): 96}
    times.update({("mxfp4", kind): 100 for kind in ("a16", "a8_g256", "e4m3_g256")})
    rows = [row(*case, 512, SHAPE, us=us, cublas_fp16_us=120, fp8_us=60) for case, us in times.items()]
    stamp = {"kernels_sha256": "def", "date": "2026-01-30"}
    old = row("q4_0", "a16", 512, SHAPE, us=100, cublas_fp16_us=120, **stamp)
    by_bfloat16 = [row(fmt, "a8_g256", 512, SHAPE, us=48, fp8_us=12, x="bfloat16") for fmt in ("q4_0", "mxfp4", "q6_k")]
    path = tmp_path / "h200.json"
    results.write(path, made_up(rows=[*rows, old, *by_bfloat16]))
    return path


def test_products_show_both_activations(path):
    """A star marks rows that were measured with earlier kernels."""
    text = eight_bit_tables.products_table(path)
    assert text.splitlines()[2:] == [
        "| 8192x8192 | 512 | fp16 | 120.0 | 2.00 | 1.50 / 1.20* | 1.25 / – | 1.20 / 1.20 |",
        "| 8192x8192 | 512 | bf16 | 24.0 | 2.00 | 0.50 / – | – / – | 0.50 / – |",
    ]


def test_other_formats_are_relative_to_q4_0(path):
    text = eight_bit_tables.others_table(path)
    assert text.splitlines()[2:] == ["| q6_k | 1.50 (1.00) / 0.50 (1.00) |", "| q8_0 | 1.25 (0.83) / – |"]


def test_e4m3(path):
    text = eight_bit_tables.e4m3_table(path)
    assert text.splitlines()[2:] == [
        "| 8192x8192 | 512 | fp16 | 120.0 | 60.0 (2.00) | 100.0 (1.20) | 100.0 (1.20) | 100.0 (1.20) |",
        "| 8192x8192 | 512 | bf16 | 24.0 | 12.0 (2.00) | – | 48.0 (0.50) | – |",
    ]


def test_missing_measurement_is_named(path):
    rows = eight_bit_tables.tables.Rows(results.load(path))
    with pytest.raises(KeyError, match="q4_k by a8_g256 of 8192x8192 with M = 512 and x of bfloat16 was not measured"):
        eight_bit_tables.measured(rows, "q4_k", "a8_g256", 512, SHAPE, "bfloat16")
