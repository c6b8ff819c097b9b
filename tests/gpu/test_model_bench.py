"""`qgemm bench --model` on a GPU, with a tiny model; needs transformers."""

from __future__ import annotations

import json

import pytest

from qgemm.cli import bench_model, model_bench
from qgemm.cli.random_models import Sizes

TINY = Sizes("llama", 256, 512, 8, 4, 2, 64, 512, 1e4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_rows_of_a_tiny_model(run, monkeypatch):
    pytest.importorskip(model_bench.ADAPTER, exc_type=ImportError)  # its message names the version that it needs
    monkeypatch.setattr(bench_model, "MODELS", {"tiny": TINY})
    words = "--model tiny --layers 2 --prompts 16 --batches 1,2 --variants a16,a8_g256,eager,graph --minutes 9 --json"
    status, out, _ = run("bench", "--gpu", *words.split())
    rows = json.loads(out)["rows"]
    assert status == 0
    assert [row for row in rows if "skipped" in row] == []
    for row in rows[:2]:
        assert row["load_s"] > 0
        assert row["peak_bytes"] >= row["weights_bytes"] >= 0
    assert len(rows) == 2 + 2 * 2 * 4 * 2  # dtypes, batches, variants, models
    assert all(row["tokens_s"] > 0 and row["peak_bytes"] > 0 for row in rows[2:])
    assert {row["road"] for row in rows} == {model_bench.PACKED, model_bench.DENSE}
