"""The tables of docs/kernels/eight_bits.md, of made-up numbers."""

from __future__ import annotations

import eight_bit_tables
import pytest
from measured import made_up, row

from qgemm.bench import results

SHAPE = eight_bit_tables.SHAPE  # at which M = 512 wants 1.3


@pytest.fixture
def path(tmp_path):
    """q4_0 1.5 times as fast as cuBLAS, q4_k 1.25, mxfp4 1.2 by all three kinds, q8_0 1.25, q6_k 1.5."""
    times = {("q4_0", "a8_g256"): 80, ("q4_k", "a8_g256"): 96, ("q6_k", "a8_g256"): 80, ("q8_0", "a8_g256"): 96}
    times.update({("mxfp4", kind): 100 for kind in ("a16", "a8_g256", "e4m3_g256")})
    rows = [row(*of, 512, SHAPE, us=us, cublas_fp16_us=120, fp8_us=60) for of, us in times.items()]
    of_old = {"kernels_sha256": "def", "date": "2026-01-30"}
    old = row("q4_0", "a16", 512, SHAPE, us=100, cublas_fp16_us=120, **of_old)
    found = tmp_path / "h200.json"
    results.write(found, made_up(rows=[*rows, old]))
    return found


def test_products(path):
    """What misses is bold, what is of an earlier run has a star."""
    text = eight_bit_tables.products_table(path)
    line = "| 8192x8192 | 512 | 120.0 | 2.00 | 1.3 | 1.50 / 1.20* | **1.25** / - | **1.20** / 1.20 |"
    assert text.splitlines()[2:] == [line]


def test_missed(path):
    text = eight_bit_tables.missed_table(path)
    assert text.splitlines()[::2] == ["| missed by | M = 512 |", "| 8192x8192 | - / 0.05 / 0.10 |"]


def test_others(path):
    """In brackets of q4_0's speed, bold below 0.92 of it."""
    text = eight_bit_tables.others_table(path)
    assert text.splitlines()[2:] == ["| q6_k | 1.50 (1.00) |", "| q8_0 | **1.25 (0.83)** |"]


def test_e4m3(path):
    text = eight_bit_tables.e4m3_table(path)
    line = "| 8192x8192 | 512 | 120.0 | 60.0 (2.00) | 100.0 (1.20) | 100.0 (1.20) | 100.0 (1.20) |"
    assert text.splitlines()[2:] == [line]


def test_what_was_not_measured_is_named(path):
    found = results.load(path)
    results.write(path, {**found, "rows": [of for of in found["rows"] if of["format"] != "q4_k"]})
    with pytest.raises(KeyError, match="q4_k by a8_g256 of 8192x8192 with M = 512 was not measured"):
        eight_bit_tables.products_table(path)
