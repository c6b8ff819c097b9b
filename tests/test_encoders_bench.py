"""The benchmark of encoders beside ggml: cases, documents, tables, and bytes if there is a build of ggml."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from measured import refused_benchmarks, run_benchmarks

from benchmarks import encoders, goals
from benchmarks.encoders import Case, Row
from benchmarks.ggml import Ggml
from benchmarks.report import cpu_tables
from qgemm.formats import FORMATS

BUILD = os.environ.get("QGEMM_GGML")


def test_every_encoder_of_ggml_is_a_case():
    """With an importance matrix if the bytes depend on it, without if the format does not require it."""
    cases = encoders.cases(encoders.NAMES)
    assert {case.format for case in cases} == set(encoders.NAMES)
    assert (Case("iq2_xs", True) in cases, Case("iq2_xs", False) in cases) == (True, False)
    assert (Case("q8_0", True) in cases, Case("q8_0", False) in cases) == (False, True)
    assert {case.format for case in cases if case.goal() == goals.ENCODE_OVER_GGML_GRIDS} == {
        name for name, fmt in FORMATS.items() if fmt.tile.grid is not None
    }
    for case in cases:
        assert case.x().shape[1] % case.fmt.weights == 0
        assert (case.importance() is not None) == case.imatrix


def test_documents(tmp_path, monkeypatch, capsys):
    """Written documents are read again and shown in tables; missed goals are counted."""
    rows = [Row(case, {"qgemm": 1.0, "ggml": ms}, 10_000) for case, ms in (
        (Case("q4_k", False), 4.0), (Case("q4_k", True), 0.5), (Case("iq1_s", True), 0.5), (Case("q8_0", False), 0.1)
    )]  # fmt: skip
    results = {"cpu": "a CPU", "threads": 2, "ggml": "0.1", "rows": [row.document() for row in rows]}
    assert json.loads(encoders.document(results)) == results
    assert encoders.rows_of(results) == rows
    monkeypatch.setattr(encoders, "run", lambda *arguments: results)
    status, out, err = run_benchmarks(capsys, "--encode", "--ggml", tmp_path, "--out", tmp_path, "--goals")
    assert (status, err) == (1, "1 goals missed\n")
    assert ["q4_k", "imatrix", "10.0", "20.0", "0.25", "0.5!"] in [line.split() for line in out.splitlines()]
    path = tmp_path / "encode_cpu.json"
    assert json.loads(path.read_text()) == results
    assert "| Q4_K | 10.0 / 2.5 (2.00) | 10.0 / 20.0 (0.25) |" in cpu_tables.encode_table(path)
    assert "| IQ1_S |  | 10.0 / 20.0 (0.25) |" in cpu_tables.encode_table(path)


@pytest.mark.parametrize("words", ["--ggml x --m 1", "--ggml x --formats q8_1", "--ggml x --step"])
def test_unknown_comparisons_are_refused(words, capsys):
    refused_benchmarks(capsys, "--encode", *words.split())


@pytest.mark.skipif(not BUILD, reason="QGEMM_GGML names no build of ggml")
@pytest.mark.parametrize("case", encoders.cases(encoders.NAMES), ids=str)
def test_bytes_are_those_of_ggml(case):
    x = case.x()[:4]
    blocks = Ggml(Path(BUILD or ""), 1).encoder(case.fmt, x, case.importance())()
    calls = encoders.ours()(case)
    calls.calls[encoders.OURS][0]()
    assert calls.result(encoders.OURS)[: blocks.nbytes] == blocks.tobytes()
