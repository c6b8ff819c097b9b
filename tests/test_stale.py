"""Rows of results know the kernels that they ran; those of changed or unknown kernels are counted."""

from __future__ import annotations

import json

import pytest
from measured import made_up, plane_row, row

from benchmarks import stale
from benchmarks.report import tables
from benchmarks.results import X_TYPES
from qgemm.cuda.jit import sources


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A function that replaces the text of files of kernels/ for this test."""

    def clear():
        for cached in (sources._text, sources._included, stale.unit_digest, stale._code):
            cached.cache_clear()

    texts, original = {}, sources._text.__wrapped__

    def text(folder, name):
        content = original(folder, name)
        return texts[name](content) if name in texts else content

    monkeypatch.setattr(sources, "_text", text)
    clear_now = [stale.unit_digest.cache_clear, stale._code.cache_clear]

    def edit(name, change):
        texts[name] = change
        for function in clear_now:
            function()

    yield edit
    monkeypatch.undo()
    clear()


def every_list():
    step = {"model": "llama-3-8b", "types": "q4_k_m", "M": 1, "us": 1.0, "read_us": 1.0}
    experts = {"model": "qwen3-30b-a3b", "types": "q4_0", "M": 1, "skew": 0, "us": 1.0}
    rows = [row("q4_0", "a16", 1), row("q4_0", "a8", 1), row("q4_0", "a16", 1024), row("q4_k", "a8_g256", 4096)]
    return made_up(rows=rows, planes=[plane_row("kbit4")], mma=[row("q4_0", "a8", 64)], steps=[step], experts=[experts])


def changed(results):
    return {name: count.changed for name, count in stale.counts(results).items() if count.changed}


def test_measured_rows_get_a_digest_of_their_own_kernels():
    """Rows that run one kernel share a digest; a row that has one keeps it."""
    results = stale.stamped(every_list())
    digests = [r["kernels"] for r in results["rows"]]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == stale.DIGITS for digest in digests)
    assert not changed(results)
    same = stale.stamped(made_up(rows=[row(m=1, shape=(4096, 4096)), row(m=1, shape=(4096, 4096))]))["rows"]
    assert same[0]["kernels"] == same[1]["kernels"]
    assert stale.stamped(made_up(rows=[row(kernels="of old")]))["rows"][0]["kernels"] == "of old"


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("gemm/decode.cu", {"rows": 2, "steps": 1, "experts": 1}),
        ("gemm/sm90/mainloop.cuh", {"rows": 1, "experts": 1}),
        ("moe/moe_sort.cu", {"experts": 1}),
        ("quantize/quantize_codebook.cu", {"planes": 1}),
        ("gemm/prefill_sm80_a8.cu", {"mma": 1}),
        ("types.cuh", {"rows": 4, "planes": 1, "mma": 1, "steps": 1, "experts": 1}),
    ],
)
def test_rows_of_an_edited_source_are_stale(name, lists, edited):
    results = stale.stamped(every_list())
    edited(name, lambda text: text + "\nint edited;\n")
    assert changed(results) == lists


def test_comments_and_line_breaks_change_no_row(edited):
    results = stale.stamped(every_list())
    edited("gemm/decode.cu", lambda text: "// a new comment\n\n" + text.replace(";\n", ";\n\n"))
    assert not changed(results)


@pytest.mark.parametrize("name", ["rows", "mma", "steps", "experts"])
def test_types_of_x_run_kernels_of_their_own(name):
    """Rows of "a8" aside, whose kernels read x in eight bits."""
    rows = [*every_list()[name], row("q4_0", "a16", 64)] if name == "mma" else every_list()[name]
    rows = [measured for measured in rows if measured.get("activation") != "a8"]
    digests = [{stale.digest_of(name, {**measured, "x": x}, made_up()) for measured in rows} for x in X_TYPES]
    assert len(digests[0]) == len(digests[1]) == len(rows)
    assert not digests[0] & digests[1]
    assert digests[0] == {stale.digest_of(name, measured, made_up()) for measured in rows}


def test_rows_without_digest_or_kernel_are_of_unknown_sources():
    results = made_up(rows=[row(), row("q4_0", "a8_g128", kernels=""), row(kernels="000000000000", m=8)])
    assert stale.counts(results)["rows"] == stale.Count(3, 1, 2)
    assert stale.sentence(results) == "All rows were measured with other kernels than the present ones."
    assert stale.sentence(stale.stamped(made_up(rows=[row()]))) == ""
    fresh = stale.stamped(made_up(rows=[row(m=1)]))["rows"]
    assert stale.sentence(made_up(rows=[*fresh, row(m=2)])).startswith("1 of 2 rows")


def test_table_of_files(tmp_path):
    """One row for each list with stale rows; files of other results have none."""
    (tmp_path / "h200.json").write_text(json.dumps(made_up(rows=[row(), row(kernels="000000000000", m=8)])))
    (tmp_path / "fresh.json").write_text(json.dumps(stale.stamped(made_up(rows=[row()]))))
    (tmp_path / "others.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": [row(library="llama.cpp")]}))
    (tmp_path / "list.json").write_text("[1]")
    text = stale.table(sorted(tmp_path.glob("*.json")))
    assert [line.split() for line in text.splitlines()[1:]] == [["h200.json", "rows", "2", "1", "1"]]
    assert stale.table([tmp_path / "fresh.json"]) == "no row is stale"


def test_documents_say_how_many_rows_are_stale():
    assert stale.sentence(made_up()) in list(tables.stale_rows(made_up()))
    assert not list(tables.stale_rows(stale.stamped(made_up())))
