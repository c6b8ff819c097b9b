"""What lies where: rules about files that a reader relies on and no compiler checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Names of all modules that a file imports, wherever it does, those of `from package import module` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_imports_another(path):
    """What two of them share is in a module of its own, so that each runs, moves and goes alone."""
    others = {other.stem for other in MODULES if other.name.startswith("test_")} | {"conftest"}
    assert not {part for name in imported(path) for part in name.split(".")} & others


def test_tests_of_the_gpu_are_marked_by_their_folder_alone():
    """A mark elsewhere would be a test that `pytest tests/gpu` does not run."""
    marked = [
        path
        for path in MODULES
        if "mark.gpu" in path.read_text() and path not in (TESTS / "conftest.py", Path(__file__))
    ]
    assert marked == []
