"""The benchmark beside ggml: alternating processes, goals, tables; ggml itself if $QGEMM_GGML names a build."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from measured import refused_benchmarks, run_benchmarks

from benchmarks import command, contest, goals, turns
from benchmarks.contest import Case, Row
from benchmarks.ggml import Ggml, IkLlama
from benchmarks.report import cpu_tables
from qgemm.errors import QgemmError
from qgemm.formats import FORMATS

BUILDS = {Ggml: os.environ.get("QGEMM_GGML"), IkLlama: os.environ.get("QGEMM_IK")}


def doubled(variable):
    """A library for a worker: its result is twice the case, and the value of an environment variable."""

    def prepare(case):
        results = []
        return turns.Calls(
            {"twice": [lambda: results.append(2 * case)], "fails": [results.copy]},
            lambda name: (results[-1], os.environ.get(variable)) if name == "twice" else 1 / 0,
            results.clear,
        )

    return prepare


@pytest.mark.slow
def test_workers_alternate(monkeypatch):
    """Each worker runs in its own process and environment; its errors are raised here."""
    monkeypatch.delenv("QGEMM_TURN", raising=False)
    workers = {name: turns.Worker(doubled, ("QGEMM_TURN",), {"QGEMM_TURN": name}) for name in ("a", "b")}
    assert "QGEMM_TURN" not in os.environ
    seconds_by_call = turns.least(workers, 21, 2)
    assert set(seconds_by_call) == {("a", "twice"), ("a", "fails"), ("b", "twice"), ("b", "fails")}
    assert all(seconds > 0 for seconds in seconds_by_call.values())
    assert [worker.ask("result", "twice") for worker in workers.values()] == [(42, "a"), (42, "b")]
    with pytest.raises(ZeroDivisionError):
        workers["a"].ask("result", "fails")
    for worker in workers.values():
        worker.close()
        assert worker.process.exitcode == 0


def test_a_burst_calls_in_turn_and_ends_its_priority():
    called = []
    assert turns.burst([lambda: called.append("a"), lambda: called.append("b")]) > 0
    assert called == ["a", "b"] * (turns.MAX_CALLS // 2)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_goals():
    ms = {"a8": 0.2, "a16": 0.35, "ggml file": 0.4, "ggml repack": 0.22}
    (_, ratio, must, aim), (_, exact, least, _) = Row(Case("q4_0", 4096, 4096, 1), ms).goals()
    assert (ratio, must, aim, least) == (pytest.approx(1.1), 1.2, 1.4, 1 / goals.A16_OVER_A8)
    assert exact == pytest.approx(0.2 / 0.35)
    (elsewhere, *_), *_ = Row(Case("q4_0", 14336, 4096, 1), ms).goals(), ()
    assert elsewhere == ("ggml / a8", pytest.approx(1.1), 0, 0)  # goals are of one shape
    rows = list(Row(Case("q4_0", 4096, 4096, 16), {"a8": 1.0, "a16": 2.0, "ggml file": 1.5, "NumPy": 3.0}).goals())
    assert rows == [("ggml / a8", 1.5, 1.4, 1.7), ("NumPy / a16", 1.5, 1.7, 2.4)]
    assert list(Row(Case("q4_k", 4096, 4096, 128, isa="AVX2"), {"a8": 2.0, "ggml file": 1.0}).goals()) == [
        ("ggml / a8", 0.5, 1.0, 1.0)
    ]


def test_goals_beside_ik_llama():
    ms = {"a8": 1.0, "ggml repack": 2.0, "ik file": 3.0, "ik repack": 1.5}
    goals_by_name = {name: numbers for name, *numbers in Row(Case("iq3_s", 4096, 4096, 16), ms).goals()}
    assert goals_by_name == {"ggml / a8": [2.0, 0, 0], "ik / a8": [1.5, 0.85, 1.0]}
    (_, must, aim), *_ = (numbers for name, *numbers in Row(Case("q4_0", 4096, 4096, 512), ms).goals() if "ik" in name)
    assert (must, aim) == (1.1, 1.4)


def test_the_faster_of_our_layouts_counts():
    """Packed weights beside theirs in other layouts; a8 and a16 of one row of x are compared by the same layout."""
    ms = {"a8": 1.0, "a8 packed": 0.5, "a16": 1.5, "ggml file": 1.0, "ggml repack": 0.75}
    case = Case("q4_0", 4096, 4096, 1)
    assert [ratio for _, ratio, *_ in Row(case, ms).goals()] == [1.5, 1 / 1.5]
    assert contest.time_of({"a8": 1.0, "a8 packed": 2.0}, "a8") == 1.0
    calls = contest.ours(("a8",))(Case("q4_0", 48, 256, 1)).calls
    assert [*calls] == ["a8", "a8 packed"]
    assert [len(copies) for copies in calls.values()] == [1, 1]
    np.testing.assert_allclose(*(copies[0]() for copies in calls.values()), rtol=1e-3, atol=1e-2)


def test_a_product_that_is_not_ggmls_is_no_result():
    y = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    contest.check(Case("q4_0", 8, 32, 1), y + np.float32(0.9 * 0.03), y, 0.03)
    for wrong in (y + 0.1, y * np.nan):
        with pytest.raises(QgemmError, match="differs from ggml"):
            contest.check(Case("q4_0", 8, 32, 1), wrong, y, 0.03)


def made_up() -> dict[str, object]:
    """A document of every row of one format."""
    ms = {"a8": 1.0, "a16": 2.0, "ggml file": 1.25, "NumPy": 5.0}
    cases = [Case(name, *contest.SHAPES[0], *row) for name in cpu_tables.SHORT for row in contest.ROWS]
    cases.append(Case("q4_0", *contest.SHAPES[0], 1, isa="AVX2"))
    facts = {"cpu": "a CPU", "isa": "AVX2", "threads": 2, "ggml": "0.1", "host_us_a8": 14.0, "host_us_a16": 16.0}
    return {**facts, "first_s": 1.0, "warm_ms": 31.0, "rows": [Row(case, ms).document() for case in cases]}


def test_documents(tmp_path, monkeypatch, capsys):
    """Written documents are read again and shown in tables; missed goals are counted."""
    results = made_up()
    assert json.loads(contest.file_text([results])) == {"runs": [results]}
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(contest, "run", lambda options: results)
    words = ["--cpu", "--ggml", tmp_path, "--out", tmp_path, "--goals"]
    status, out, err = run_benchmarks(capsys, *words)
    assert contest.runs(path) == [results]
    assert "a CPU, AVX2, 2 threads, ggml 0.1" in out
    assert "q4_0    4096x4096   16  hot" in out
    missed = contest.missed(results)
    assert (status, err) == (1, f"{missed} goals missed\n")
    results["host_us_a16"], results["warm_ms"] = 15.0, 30.0
    assert contest.missed(results) == missed - 2
    assert "| Q4_K | 1 / 1.25 | 1 / 1.25 | 1 / 1.25 | 2 / 5 | 2 / 5 |" in cpu_tables.short_table(path)
    long = cpu_tables.long_table(path)
    assert "| q4_k | 4096x4096 | 1.25 (1) | 1.25 (1) | 1.25 (1) | 1.25 (1) |" in long
    assert "| q4_k | 4096x4096 | 2.00 | 2.50 | 2.50 |" in long
    assert "q4_0 M = 1: 1.25" in long


def test_a_file_has_a_run_for_each_cpu(tmp_path):
    """Rows that were not measured again stay. README shows the last run with the same instructions, notes show all."""
    path, first = tmp_path / "cpu.json", made_up()
    assert contest.merged(path, first) == [first]
    path.write_text(contest.file_text([first]))
    rows = [{**row, "ms": {**row["ms"], "ik repack": 0.5}} for row in first["rows"]]
    second = {**first, "cpu": "another", "ik": "123abc", "rows": rows}
    path.write_text(contest.text_with(path, second))
    assert contest.runs(path) == [first, second]
    short, long = cpu_tables.short_table(path), cpu_tables.long_table(path)
    assert "another, AVX2, 2 threads, ggml 0.1, ik_llama.cpp 123abc," in short
    assert "a CPU," not in short
    assert "a CPU," in long
    assert "| Q4_K | 1 / 1.25, 0.5 | 1 / 1.25, 0.5 | 1 / 1.25, 0.5 | 2 / 5 | 2 / 5 |" in short
    assert "| q4_k | 4096x4096 | 1.25, 0.50 (1) |" in long
    faster = {**rows[0], "ms": {**rows[0]["ms"], "a8": 0.25}}
    merged = contest.merged(path, {**second, "rows": [faster], "threads": 1})
    assert merged == [first, {**second, "rows": [faster, *rows[1:]], "threads": 1}]


def test_the_commit_of_a_build(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    (tmp_path / "CMakeCache.txt").write_text(f"A:BOOL=ON\nCMAKE_HOME_DIRECTORY:INTERNAL={tmp_path}\n")
    head = (tmp_path / ".git" / "refs" / "heads").iterdir()
    assert next(head).read_text().startswith(contest.built_from(tmp_path))


@pytest.mark.parametrize("words", ["--ggml x --m 1", "--ggml x --activations a8", "--ggml x --formats f16"])
def test_unknown_comparisons_are_refused(words, capsys):
    refused_benchmarks(capsys, "--cpu", *words.split())
    assert "--avx2 needs --ggml" in refused_benchmarks(capsys, "--cpu", "--avx2")
    assert "--ik needs --ggml" in refused_benchmarks(capsys, "--cpu", "--ik", "x")
    assert "holds no libggml-base.so" in refused_benchmarks(
        capsys, "--cpu", "--ggml", "/dev", "--shapes", "64x256", status=1
    )


def test_folders_are_options():
    args = command.parser().parse_args(["--cpu", "--ggml", "a", "b", "--avx2", "--ik", "d"])
    assert (args.ggml, args.avx2, args.ik) == ([Path("a"), Path("b")], True, Path("d"))
    assert command.GGML_OPTIONS == ("ggml", "ik", "avx2")


@pytest.mark.parametrize("kind", [Ggml, IkLlama])
@pytest.mark.parametrize("name", contest.NAMES)
def test_products_of_ggml(name, kind):
    """In both layouts, close to the product with decoded weights; its encoder writes our blocks."""
    if not BUILDS[kind]:
        pytest.skip(f"no variable names a build of {kind.name}")
    library, fmt = kind(Path(BUILDS[kind] or ""), 2), FORMATS[name]
    case = Case(name, 64, 512, 3)
    want = case.x() @ fmt.dequantize(case.blocks()).T
    products = {layout: library.product(fmt, case.blocks(), case.x(), layout) for layout in ("file", "repack")}
    assert products["file"] is not None or (kind, name) == (IkLlama, "nvfp4")
    for product in filter(None, products.values()):
        product()
        assert np.abs(product.y() - want).max() <= contest.DISAGREEMENT[kind.name] * np.abs(want).max()
        product.free()
    if kind is IkLlama or fmt.encode is None or fmt.encoding.needs_importance:
        return
    values = np.random.default_rng(3).standard_normal((8, 512), np.float32)
    assert library.encoder(fmt, values, None)().tobytes() == fmt.quantize(values).tobytes()
