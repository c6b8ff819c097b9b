"""The benchmark of serving engines: its processes and folders by a program that stands for vLLM, and its table."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

import qgemm
from benchmarks import engines
from benchmarks.engines import Case
from benchmarks.report import engines as report
from qgemm.cli.random_models import Sizes

CASES = [Case("small", "q4_k_m", "qgemm"), Case("small", "awq", "awq_marlin")]
PROGRAM = """
import json, sys
case = sys.argv[sys.argv.index("--serve") + 1].split(":")
if case[2] == "bf16":
    sys.exit("no engine")
print(json.dumps({"ready_s": 1.5, "versions": "vLLM 9"}), flush=True)
for line in sys.stdin:
    streams, prompt, output = map(int, line.split())
    print(json.dumps({"tokens_s": streams * 100.0 + output}), flush=True)
"""


@pytest.fixture
def small(monkeypatch):
    sizes = {
        "small": Sizes("llama", 256, 512, 2, 4, 2, 64, 256, 1e4),
        "experts": Sizes("qwen3moe", 256, 256, 2, 4, 2, 64, 256, 1e6, 4, 2),
    }
    monkeypatch.setattr(engines, "MODELS", sizes)
    monkeypatch.setattr(engines, "PROGRAM", (sys.executable, "-c", PROGRAM))


@pytest.mark.parametrize("case", ["llama-3-8b", "llama-3-8b:q4_0", "other:q4_0:qgemm", "llama-3-8b:q4_0:fast", "::"])
def test_a_case_that_does_not_exist_is_refused(case, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["engines", case])
    with pytest.raises(SystemExit):
        engines.main()
    assert "expected MODEL:TYPES:ROAD; models: llama-3-8b" in capsys.readouterr().err
    assert list(map(":".join, map(Case.parse, engines.CASES))) == list(engines.CASES)


def test_rows_of_engines_in_turns(small, tmp_path):
    rows = list(engines.measure([*CASES, Case("small", "bf16", "bf16")], [1, 2], tmp_path, tmp_path))
    starts, speeds = rows[:3], rows[3:]
    assert [row.get("ready_s") for row in starts] == [1.5, 1.5, None]
    assert "did not start" in starts[2]["error"]
    assert (tmp_path / "small-bf16-bf16.log").read_text() == "no engine\n"
    assert starts[0]["file_bytes"] == (tmp_path / "small-q4_k_m" / "model.gguf").stat().st_size > 0
    assert [(row["road"], row["streams"], row["prompt"], row["tokens_s"]) for row in speeds] == [
        ("qgemm", 8, 4096, 801.0), ("awq_marlin", 8, 4096, 801.0), ("qgemm", 1, 128, 356.0),
        ("awq_marlin", 1, 128, 356.0), ("qgemm", 2, 128, 456.0), ("awq_marlin", 2, 128, 456.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("output", "tokens_s"), [(256, 1024.0), (1, 64.0)])
def test_tokens_that_count(monkeypatch, output, tokens_s):
    """Those of the output, or of the prompts where one token follows: four streams, the faster of two runs 1 s."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    clock = iter([0.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr(engines.time, "perf_counter", lambda: next(clock))
    calls = []
    engine = SimpleNamespace(generate=lambda prompts, sampling, use_tqdm: calls.append((prompts, sampling.max_tokens)))
    assert engines.tokens_a_second(engine, 4, 16, output) == {"tokens_s": tokens_s, "seconds": [2.0, 1.0]}
    assert [(len(prompts), limit) for prompts, limit in calls] == [(4, output)] * 2
    assert {len(prompt["prompt_token_ids"]) for prompts, _ in calls for prompt in prompts} == {16}


def test_an_engine_that_ends_has_no_more_rows(small, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "PROGRAM", (sys.executable, "-c", PROGRAM.replace("streams *", "1 / (streams - 2) *")))
    rows = list(engines.measure(CASES[:1], [1, 2], tmp_path, tmp_path))
    assert [row["streams"] for row in rows] == [0]  # the warm-up of two sequences ended it


def test_folders_of_models(small, tmp_path):
    folder = engines.folder_of(Case("experts", "q4_k_m", "qgemm"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_experts"], config["head_dim"]) == ("qwen3_moe", 4, 64)
    with qgemm.open(folder / "model.gguf") as file:
        assert file["blk.0.ffn_down_exps.weight"].shape == (4, 256, 256)
    assert engines.folder_of(Case("experts", "q4_k_m", "plugin"), tmp_path) == folder
    folder = engines.folder_of(CASES[1], tmp_path)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["bits"] == 4
    assert not (folder / "model.gguf").exists()


def test_the_table(small, tmp_path):
    rows = list(engines.measure(CASES, [1, 2], tmp_path, tmp_path))
    for row in rows[:2]:
        row["gpu_bytes"] = row["kv_bytes"] + 7_000_000_000
    path = tmp_path / "engines.json"
    path.write_text(json.dumps({"device": "GPU", "rows": rows[:-1]}))
    heading, *_, packed, marlin = report.table(path).splitlines()
    assert heading.startswith("GPU, vLLM 9;")
    assert packed == "| small | q4_k_m | `qgemm.vllm` | 356 | 456 | 801 | 7.0 |"
    assert marlin == "| small | awq | AWQ, by Marlin | 356 | - | 801 | 7.0 |"
