"""Tables and sentences of whole models, from rows of `qgemm bench --model`."""

from __future__ import annotations

import json

import pytest

from benchmarks.report import models
from qgemm.cli.model_bench import table

FIELDS = {"model": "llama-3-8b", "types": "q4_k_m", "layers": 32, "versions": "torch 9"}


def row(road, variant, speed, dtype="bfloat16", batch=1, prompt=512, **more):
    return {
        **FIELDS,
        "road": road,
        "variant": variant,
        "dtype": dtype,
        "batch": batch,
        "prompt": prompt,
        "tokens_s": speed,
        **more,
    }


ROWS = [
    {**FIELDS, "road": "qgemm", "variant": "load", "dtype": "bfloat16", "batch": 0, "prompt": 0, "load_s": 3.5,
     "first_s": 20.0, "file_bytes": 4_910_000_000, "weights_bytes": 5_000_000_000, "peak_bytes": 5_100_000_000},
    row("qgemm", "a16", 17920.4), row("dense", "a16", 18307.4),
    row("qgemm", "graph", 201.25, peak_bytes=6_000_000_000, first_s=1.5), row("dense", "graph", 124.0),
    row("qgemm", "graph", 210.0, "float16"), row("qgemm", "graph", 2189.0, batch=16),
    {**FIELDS, "road": "qgemm", "variant": "compile", "dtype": "bfloat16", "batch": 1, "prompt": 512,
     "skipped": "no time left"},
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"device": "GPU", "rows": ROWS}))
    return path


def test_table_has_a_line_for_each_case_and_a_column_for_each_variant(path):
    lines = models.table(path).splitlines()
    assert lines[0] == "GPU, torch 9; torch's defaults."
    assert [line for line in lines if line.startswith("| ")] == [
        "| model | types | x | batch | prompt | prompt a16 | CUDA graph of a step |",
        "| llama-3-8b | q4_k_m | bfloat16 | 1 | 512 | 17920 (18307) | 201 (124) |",
        "| llama-3-8b | q4_k_m | float16 | 1 | 512 | - | 210 |",
        "| llama-3-8b | q4_k_m | bfloat16 | 16 | 512 | - | 2189 |",
    ]
    assert lines[-1] == (
        "- llama-3-8b q4_k_m, 32 layers: a file of 4.91 GB loads in 3.5 s "
        "(20.0 s the first time, which compiles kernels), 5.00 GB on the GPU, 5.10 GB at the peak."
    )


def test_sentence_of_a_recipe_has_batch_one_in_each_dtype(path):
    assert models.recipe("graph", path) == (
        "Tokens a second of a llama-3-8b in Q4_K_M, GPU: 201 in bfloat16 after 512 tokens (dense 124), "
        "210 in float16 after 512 tokens."
    )
    assert "no rows" in models.recipe("compile", path)


def test_terminal_table_says_why_a_variant_is_missing():
    lines = [line.split() for line in table(ROWS).splitlines()]
    assert lines[1][7:] == ["3.5", "-", "-", "20.0", "5.10", "(5.00", "stay)", "-"]
    assert lines[3][7:] == ["201.2", "124.0", "1.62", "1.5", "6.00", "-"]
    assert " ".join(lines[-1]).endswith("qgemm: no time left")
