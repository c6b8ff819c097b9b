"""The files on which the GPU tests and their kernels depend, and one digest of them, which the GPU ledger stores.

Python files are the import closure of tests/gpu and qgemm.cuda, computed from their text; a comment, a docstring or a
line break does not change the digest. The CUDA files of kernels/ and the data files that these modules name belong to
it as well.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "tools", "tests")  # where imports are looked up, as in pyproject.toml (pythonpath)
ROOTS = ("qgemm/cuda/**/*.py", "tests/gpu/**/*.py", "tests/conftest.py", "tools/gpu_tests.py")
DATA = ("tests/data", "qgemm")  # folders of data files
IGNORED = (
    "ctx",
    "kind",
    "type_comment",
    "type_ignores",
    "type_params",
)  # fields of a syntax tree without a meaning here


class Sources:
    """The Python files of a repository, and the import closure of ROOTS."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.trees: dict[Path, ast.Module] = {}
        self.nodes: dict[Path, list[ast.AST]] = {}
        self.files: dict[str, list[Path]] = {}

    def tree(self, path: Path) -> ast.Module:
        """The syntax tree of a file, parsed once."""
        if path not in self.trees:
            self.trees[path] = ast.parse(path.read_bytes())
        return self.trees[path]

    def walk(self, path: Path) -> list[ast.AST]:
        """The nodes of a file's syntax tree that name modules or files."""
        if path not in self.nodes:
            kinds = ast.Import, ast.ImportFrom, ast.Constant, ast.Name
            self.nodes[path] = [node for node in ast.walk(self.tree(path)) if isinstance(node, kinds)]
        return self.nodes[path]

    def modules(self) -> list[Path]:
        """The import closure, sorted."""
        todo = [path for pattern in ROOTS for path in self.root.glob(pattern)]
        closure: set[Path] = set()
        while todo:
            path = todo.pop()
            if path not in closure:
                closure.add(path)
                todo += self.imported_by(path)
        return sorted(closure)

    def imported_by(self, path: Path) -> Iterator[Path]:
        """The files that a file imports, at any depth of its functions, and those of modules that a string names.

        A package, or its main.py, that calls import_module may import any of the package's modules.
        """
        package = path.parent.relative_to(self.root).parts
        for node in self.walk(path):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.files_of(alias.name)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else ()
                name = ".".join([*above, *([node.module] if node.module else [])])
                yield from self.files_of(name)
                for alias in node.names:
                    yield from self.files_of(f"{name}.{alias.name}" if name else alias.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isascii():
                if "." in node.value and node.value.replace(".", "").isidentifier():
                    yield from self.files_of(node.value)
            elif isinstance(node, ast.Name) and node.id == "import_module" and path.stem in ("__init__", "main"):
                yield from path.parent.glob("*.py")

    def files_of(self, name: str) -> list[Path]:
        """The files of a module of this repository, and of the packages around it; none for other modules."""
        if name not in self.files:
            parts = name.split(".")
            paths = [self.root.joinpath(folder, *parts[: i + 1]) for folder in FOLDERS for i in range(len(parts))]
            candidates = [candidate for path in paths for candidate in (path.with_suffix(".py"), path / "__init__.py")]
            self.files[name] = [candidate for candidate in candidates if candidate.is_file()]
        return self.files[name]

    def data(self, modules: list[Path]) -> list[Path]:
        """CUDA files, and the data files that a string of a module names."""
        texts = {
            node.value
            for path in modules
            for node in self.walk(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        names = {text.rsplit("/", 1)[-1] for text in texts}
        files = (path for folder in DATA for path in (self.root / folder).rglob("*"))
        named = {path for path in files if path.name in names or (path.suffix == ".json" and "cuda" in path.parts)}
        kernels = set((self.root / "kernels").rglob("*.cu*"))
        return sorted(path for path in named | kernels if path.is_file() and path.suffix not in (".py", ".pyc"))

    def sha256(self) -> str:
        """The digest of the closure and its data; Python files count by their syntax."""
        modules, digest = self.modules(), hashlib.sha256()
        for path in [*modules, *self.data(modules)]:
            content = repr(meaning(self.tree(path))).encode() if path.suffix == ".py" else path.read_bytes()
            digest.update(path.relative_to(self.root).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()


def meaning(node: Any) -> Any:
    """A syntax tree as nested tuples without docstrings and places, equal in all versions of Python."""
    if isinstance(node, list):
        return tuple(map(meaning, node))
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list) and value and is_docstring(value[0]):
            value = value[1:]
        if name not in IGNORED and value is not None and value != []:
            fields.append((name, meaning(value)))
    return type(node).__name__, tuple(fields)


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sources = Sources()
    modules = sources.modules()
    for source in [*modules, *sources.data(modules)]:
        print(source.relative_to(sources.root))
    print(sources.sha256())
