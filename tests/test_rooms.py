"""Rooms of qgemm/: imports run from the rooms of docs/architecture.md to those above them, and never in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENTRIES = ("__init__", "__main__")  # of the package: they import from any room, and no module imports them
BY_NAME = {"qgemm.backend", "qgemm.formats"}  # import modules by computed names: the registries


def rooms() -> list[str]:
    """The rooms of qgemm/ as the document has them, lowest first: one or several in a line of its first table."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms of qgemm/")[1].split("## ")[0]
    lines = (line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    return [room for line in lines for room in re.findall(r"`qgemm/(\w+)(?:\.py|/)`", line)]


@cache
def modules() -> dict[str, Path]:
    """Dotted names of all modules of the package, and their files."""
    found = {}
    for path in sorted((ROOT / "qgemm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """qgemm.cuda.jit.load -> cuda."""
    return (*module.split("."), "__init__")[1]


def statements(module: str, tree: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a tree: those in functions if `lazy`, else the others; none that are for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef):
            if lazy:
                yield from statements(module, ast.Module(node.body, []), False)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            if not lazy:
                yield node
        else:
            yield from statements(module, node, lazy)


def imports(module: str, lazy: bool = False) -> set[str]:
    """The modules of the package that a module imports when it is imported or, if `lazy`, when it is called."""
    path, found = modules()[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(module, ast.parse(path.read_text()), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = package.rsplit(".", node.level - 1)[0] if node.level else ""
        name = ".".join(filter(None, (base, node.module)))
        found |= {f"{name}.{alias.name}" if f"{name}.{alias.name}" in modules() else name for alias in node.names}
    return found & set(modules())


def inner(module: str) -> bool:
    """Whether a module is in a room."""
    return room_of(module) not in ENTRIES


def test_every_room_is_in_the_document():
    assert sorted(rooms()) == sorted({room_of(module) for module in modules()} - set(ENTRIES))


@pytest.mark.parametrize("module", [module for module in modules() if inner(module)])
def test_imports_run_to_rooms_above(module):
    order = rooms()
    reached = {room_of(other) for other in imports(module) | imports(module, lazy=True)}
    assert not reached & set(ENTRIES)
    assert all(order.index(room) <= order.index(room_of(module)) for room in reached)


def test_no_imports_in_a_circle():
    """Of modules; a package's own file counts as one of them."""
    try:
        TopologicalSorter({module: imports(module) for module in modules()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", list(modules()))
def test_imports_are_where_a_reader_looks(module):
    """At the top of a file; by a name that is computed only in the registries, of backends at first use."""
    assert not imports(module, lazy=True)
    assert module in BY_NAME or not re.search(r'import_module\((?!"(?!qgemm))', modules()[module].read_text())


def test_what_the_tests_above_see(tmp_path, monkeypatch):
    """Imports of a made-up module: relative, of names and of modules, in a function, for types alone."""
    source = """
from __future__ import annotations
import numpy
import qgemm.text
from typing import TYPE_CHECKING
from .jit import load as loaded
from .problem import Problem
from ..codec.format import Format
if TYPE_CHECKING:
    from qgemm.ops import matmul
class Late:
    def method(self):
        from qgemm import cli
"""
    path = tmp_path / "made_up.py"
    path.write_text(source)
    monkeypatch.setitem(modules(), "qgemm.cuda.made_up", path)
    at_once = {"qgemm.text", "qgemm.cuda.jit.load", "qgemm.cuda.problem", "qgemm.codec.format"}
    assert imports("qgemm.cuda.made_up") == at_once
    assert imports("qgemm.cuda.made_up", lazy=True) == {"qgemm.cli"}
