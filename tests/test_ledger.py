"""The GPU ledger: runs that it refuses, and changes that make it stale."""

from __future__ import annotations

import json

import ledger
import pytest
from gpu_sources import ROOT, Sources

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_rows" name="a"/>
<testcase classname="tests.gpu.test_rows" name="b"><skipped message="one GPU"/></testcase>
<testcase classname="tests.gpu.test_views" name="c">{}</testcase>
</testsuite></testsuites>"""
BY_FILE = {"tests/gpu/test_rows.py": 2, "tests/gpu/test_views.py": 1}
SOURCES = "0" * 64


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes the ledger of a run -> its entry."""
    monkeypatch.setattr(ledger.Sources, "sha256", lambda self: SOURCES)

    def run(inside="", by_file=BY_FILE):
        report = tmp_path / "report.xml"
        report.write_text(REPORT.format(inside))
        return json.loads(json.dumps(ledger.entry({"device": "NVIDIA H200"}, by_file, report)))

    return run


def test_a_run_is_counted_by_file(run):
    entry = run()
    assert {name: entry[name] for name in ("collected", "passed", "skipped", "failed")} == {
        "collected": 3, "passed": 2, "skipped": 1, "failed": 0,
    }  # fmt: skip
    assert entry["tests"]["tests/gpu/test_rows.py"] == {"collected": 2, "passed": 1, "skipped": 1, "failed": 0}
    assert ledger.problem(entry, SOURCES, BY_FILE) is None


def test_a_run_that_did_not_pass(run):
    for inside in ("<failure/>", "<error/>", "<skipped/>"):
        assert "did not pass" in ledger.problem(run(inside), SOURCES, BY_FILE)
    for by_file in ({**BY_FILE, "tests/gpu/test_rows.py": 3}, {**BY_FILE, "tests/gpu/test_cli.py": 1}):
        assert "did not pass" in ledger.problem(run(by_file=by_file), SOURCES, by_file)


def test_other_tests_and_sources_make_it_stale(run):
    entry = run()
    assert "other tests" in ledger.problem(entry, SOURCES, {**BY_FILE, "tests/gpu/test_rows.py": 3})
    assert "other tests" in ledger.problem(entry, SOURCES, {**BY_FILE, "tests/gpu/test_cli.py": 1})
    assert "changed" in ledger.problem(entry, "1" * 64, BY_FILE)
    assert ledger.problem({**entry, "reason": "no GPU was available"}, "1" * 64, BY_FILE) is None


@pytest.mark.parametrize("field", ["passed", "failed", "sources_sha256", "device", "tests"])
def test_an_edited_entry_is_refused(run, field):
    assert "edited" in ledger.problem({**run(), field: None}, SOURCES, BY_FILE)


@pytest.fixture(scope="module")
def sources():
    return Sources()


def test_the_digest_covers_all_that_the_tests_depend_on(sources):
    modules = sources.modules()
    names = {path.relative_to(ROOT).as_posix() for path in [*modules, *sources.data(modules)]}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("*.py")} <= names
    for folder in ("qgemm/cuda", "qgemm/formats", "qgemm/codec"):
        assert {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.cu*")} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "qgemm/cuda").rglob("*.json")} <= names
    assert names > {
        "tests/helpers.py", "tests/references.py", "tests/measured_errors.py", "tests/strategies.py",
        "tests/conftest.py", "tests/data/minilm_excerpt.gguf", "qgemm/torch/linear.py", "qgemm/tensor.py",
        "qgemm/cli/matmul.py",
    }  # fmt: skip
    assert "tests/gpu_ledger.json" not in names


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("CODE_EXPONENT = 1", "CODE_EXPONENT = 2", False),
        ("CODE_EXPONENT = 1", "CODE_EXPONENT = (1)  # a comment", True),
        ('def f():\n    """One."""\n    return 1', 'def f():\n    """Other."""\n    return 1', True),
        ('def f():\n    return "a"', 'def f():\n    return "b"', False),
    ],
)
def test_the_digest_follows_what_code_does(tmp_path, before, after, same):
    """A module that a test imports inside a function, through a package; comments and docstrings do not count."""
    for name, text in {
        "tests/gpu/test_x.py": "def test_x():\n    from qgemm import formats\n",
        "qgemm/__init__.py": "",
        "qgemm/formats/__init__.py": "from importlib import import_module\nimport_module\n",
        "kernels/x.cu": "x",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    digests = []
    for text in (before, after):
        (tmp_path / "qgemm/formats/mxfp4.py").write_text(text)
        digests.append(Sources(tmp_path).sha256())
    assert (digests[0] == digests[1]) is same
    (tmp_path / "kernels/x.cu").write_text("y")
    assert Sources(tmp_path).sha256() not in digests
