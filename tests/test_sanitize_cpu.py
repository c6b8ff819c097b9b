"""tools/sanitize_cpu.py: conditions under which a passing run is repeated."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import sanitize_cpu


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout of few files, and counted runs of pytest that end with `status`."""
    for name in ("kernels/cpu/a.c", "qgemm/a.py", "tests/test_a.py", "tools/a.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    runs = SimpleNamespace(folder=tmp_path, count=0, status=0)

    def run(command, **options):
        if command[-1] == "--version":
            return SimpleNamespace(stdout=b"gcc 12")
        runs.count += 1
        return SimpleNamespace(returncode=runs.status)

    monkeypatch.setattr(sanitize_cpu, "ROOT", tmp_path)
    monkeypatch.setattr(sanitize_cpu, "FOLDER", tmp_path / "build" / "sanitized")
    monkeypatch.setattr(sanitize_cpu.shutil, "which", lambda name: "gcc")
    monkeypatch.setattr(sanitize_cpu, "runtimes", lambda compiler: ["libasan.so", "libubsan.so"])
    monkeypatch.setattr(sanitize_cpu.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["sanitize_cpu.py"])
    return runs


def test_a_run_that_passed_is_made_again_when_a_file_changes(tree):
    for name in ("kernels/cpu/a.c", "qgemm/a.py", "tests/test_a.py", "tools/a.py", "pyproject.toml"):
        before = tree.count
        for _ in range(2):
            assert sanitize_cpu.main() == 0
        assert tree.count == before + 1
        (tree.folder / name).write_text("after")
    (tree.folder / "kernels" / "cpu" / "b.h").touch()
    sanitize_cpu.main()
    assert tree.count == 6


def test_a_run_that_failed_or_has_arguments_is_not_remembered(tree, monkeypatch):
    tree.status = 1
    assert [sanitize_cpu.main(), sanitize_cpu.main(), tree.count] == [1, 1, 2]
    tree.status = 0
    monkeypatch.setattr(sys, "argv", ["sanitize_cpu.py", "-k", "q4_0"])
    assert [sanitize_cpu.main(), sanitize_cpu.main(), tree.count] == [0, 0, 4]
    monkeypatch.setattr(sys, "argv", ["sanitize_cpu.py"])
    assert [sanitize_cpu.main(), sanitize_cpu.main(), tree.count] == [0, 0, 5]
