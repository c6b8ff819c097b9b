"""Reference pages of docs/api/: a directive of mkdocstrings for each public name, found in the sources by `ast`.

Nothing is imported, so that names of `qgemm.torch` get their pages where torch is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOORS = {"qgemm": ROOT / "qgemm" / "api.py", "qgemm.torch": ROOT / "qgemm" / "torch" / "__init__.py"}
FUNCTIONS, CLASSES, ERRORS, DATA = "functions", "classes", "errors", "data"
PAGES = (FUNCTIONS, CLASSES, ERRORS, DATA)
SUMMARIES = {"FORMATS": "All formats by name, a read-only mapping", "__version__": "The version of the package"}  # data


class Name(NamedTuple):
    """A public name: the package that exports it, its kind, and the first sentence of its docstring."""

    package: str
    name: str
    kind: str
    summary: str

    @property
    def path(self) -> str:
        """The dotted path by which users import the name."""
        return f"{self.package}.{self.name}"

    @property
    def page(self) -> str:
        """The reference page of the name, in docs/api/."""
        return "torch.md" if self.package == "qgemm.torch" else f"{self.kind}.md"


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


def module_path(package: Path, statement: ast.ImportFrom) -> Path:
    """The file of the module that a statement in `package` imports from."""
    parts = statement.module.split(".") if statement.module else []
    folder = ROOT
    if statement.level:
        folder = package
        for _ in range(statement.level - 1):
            folder = folder.parent
    path = folder.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definition(path: Path, name: str) -> ast.AST | None:
    """The statement that defines a name, through imports; None where it is not a statement of the package."""
    tree = parsed(path)
    for node in reversed(tree.body):  # the implementation follows its overloads
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = module_path(path.parent, node)
                    return definition(source, alias.name) if source.exists() else None
    return None


def kind_of(name: str, node: ast.AST | None) -> str:
    """The page of a definition: functions, classes, errors or data."""
    if isinstance(node, ast.ClassDef):
        return ERRORS if name.endswith("Error") else CLASSES
    return FUNCTIONS if isinstance(node, ast.FunctionDef) else DATA


def summary_of(name: str, node: ast.AST | None) -> str:
    """The first paragraph of a docstring, without the point at its end; KeyError for data without a summary."""
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return SUMMARIES[name]
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".").replace("|", "\\|")


@cache
def names() -> tuple[Name, ...]:
    """Every public name: of `__all__`, then of the classes of qgemm/cuda/ that qgemm imports at their first use."""
    public = [(package, name, door) for package, door in DOORS.items() for name in listed(door, "__all__")]
    on_device = listed(ROOT / "qgemm" / "__init__.py", "_ON_DEVICE")
    public += [("qgemm", name, ROOT / "qgemm" / "cuda" / "__init__.py") for name in on_device]
    nodes = [definition(door, name) for _, name, door in public]
    return tuple(
        Name(package, name, kind_of(name, node), summary_of(name, node))
        for (package, name, _), node in zip(public, nodes, strict=True)
    )


def listed(path: Path, variable: str) -> Sequence[str]:
    """The names in a list or tuple of a module."""
    (value,) = (
        node.value
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable
    )
    names: Sequence[str] = ast.literal_eval(value)
    return names


def index() -> str:
    """The section of docs/api/index.md: a table of all names, each a link to its place on a page."""
    rows = ["| name | summary |", "|---|---|"]
    rows += [f"| [`{name.path}`]({name.page}#{name.path}) | {name.summary} |" for name in names()]
    return "\n".join(rows)


def page(file: str) -> str:
    """The section of a reference page: a directive for each of its names."""
    return "\n\n".join(f"::: {name.path}" for name in names() if name.page == file)
