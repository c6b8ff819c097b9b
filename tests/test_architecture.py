"""The places of things: rules about files that a reader relies on and no compiler checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
TEST_MODULES = sorted(TESTS.rglob("*.py"))
MAX_LINES = {".cu": 300}  # by the suffix of a file; others have 400
UPWARD: set[tuple[str, str]] = set()  # imports against the order: may only become fewer
ENTRY_POINTS = "qgemm", "qgemm.api", "qgemm.__main__"
LAZY = {
    ("qgemm", "qgemm.api"), ("qgemm.cli.start", "qgemm.cli.main"),  # a start can be interrupted
    ("qgemm.cli.main", "qgemm.cli.info"), ("qgemm.cli.info", "qgemm.cli.gpu_abilities"),  # starts are shorter
    *((f"qgemm.cli.{name}", "qgemm.converter.source_readers") for name in ("info", "common")),  # so are these
    ("qgemm", "qgemm.cuda"), ("qgemm.converter.job", "qgemm.converter.device"),  # starts without a GPU are shorter
    ("qgemm.vllm", "qgemm.vllm.plugin"), ("qgemm.sglang", "qgemm.sglang.hooks"),  # an engine is there when it calls
}  # fmt: skip
# Below the layers of docs/architecture.md: those of qgemm/cuda/, in their order.
CUDA = (
    "devices toolkit times problem configs",
    "layout",
    "jit",
    "driver libraries timing",
    "kernels",
    "upload rows tensor activations encode copies cards",
    "planes call prepare",
    "tuner clock tuning",
)


def module_name(path: Path) -> str:
    """qgemm/codec/format.py -> qgemm.codec.format; a package is named without its __init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class Import(NamedTuple):
    """One import: the name, and whether a function imports it when it is called."""

    name: str
    lazy: bool


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file by absolute names, `from package import name` as package.name.

    Imports for types alone (if TYPE_CHECKING:) are among them: a reader follows them as well.
    """
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = [*parents, *(node.module or "").split(".")] if node.module else parents
            yield from (Import(".".join([*base, alias.name]), lazy) for alias in node.names)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse(path.read_text()), False)


MODULES = {module_name(path): path for path in sorted((ROOT / "qgemm").rglob("*.py"))}


def imported_by(module: str) -> set[tuple[str, bool]]:
    """The modules of qgemm that a module imports, and whether lazily."""
    imported = set()
    for name, lazy in imports_of(MODULES[module]):
        while name and name not in MODULES:  # a name in a module
            name = name.rpartition(".")[0]
        if name:
            imported.add((name, lazy))
    return imported


GRAPH = {module: imported_by(module) for module in MODULES}


def layers() -> list[tuple[str, ...]]:
    """The layers of qgemm/ in the order of the table in docs/architecture.md, each with the names of its modules."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers of qgemm/")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`qgemm/.*?) \|", table, re.MULTILINE)
    names = [re.findall(r"`(qgemm/[\w/]+)", row) for row in rows]
    return [tuple(name.rstrip("/").replace("/", ".") for name in row) for row in names]


def within(module: str, layers: tuple[str, ...]) -> bool:
    return any(module == layer or module.startswith(f"{layer}.") for layer in layers)


def level(module: str) -> int:
    """The number of a module's layer, which imports from lower numbers and its own. Entry points are above all."""
    if module in ENTRY_POINTS:
        return len(layers())
    (number,) = [n for n, layer in enumerate(layers()) if within(module, layer)]
    return number


def cuda_level(module: str) -> int:
    """The number of a module's layer among those of qgemm/cuda/; its __init__, the backend, is above them."""
    if module == "qgemm.cuda":
        return len(CUDA)
    (number,) = [
        n for n, layer in enumerate(CUDA) if within(module, tuple(f"qgemm.cuda.{name}" for name in layer.split()))
    ]
    return number


def test_imports_do_not_run_in_a_circle():
    graph = {module: {name for name, _ in imports} for module, imports in GRAPH.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' <- '.join(error.args[1])}")


def test_a_module_imports_only_from_layers_below():
    """Every module has a layer in docs/architecture.md, or is one of the entry points."""
    upward = set()
    for module, imports in GRAPH.items():
        for name, _ in imports:
            if level(name) > level(module):
                upward.add((module, name))
            if (
                module.startswith("qgemm.cuda")
                and name.startswith("qgemm.cuda")
                and cuda_level(name) > cuda_level(module)
            ):
                upward.add((module, name))
    assert upward == UPWARD


def test_lazy_imports_are_those_of_backends_and_of_the_entry_points():
    """qgemm/backend.py imports a backend by its name at first use, qgemm/codec/compiled.py the table of its encoders;
    every other module but the entry points names its imports at its top."""
    assert {(module, name) for module, imports in GRAPH.items() for name, lazy in imports if lazy} == LAZY
    by_name = {module for module, path in MODULES.items() if "import_module(" in path.read_text()}
    # formats: the registry; some commands import modules that need torch, transformers or peft
    named = {"qgemm.cli.model_bench", "qgemm.cli.model_variants", "qgemm.cli.imatrix"}
    assert by_name <= {"qgemm.backend", "qgemm.codec.compiled", "qgemm.formats", "qgemm.cli.main", *named}


def assigned_attributes(path: Path) -> list[str]:
    """Assignments of a module, when it is imported, to attributes of a name that it imports: `Tensor.product = ...`."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node
                yield from statements([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])

    def root(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    refused = []
    for node in statements(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [part for target in targets if target is not None for part in ast.walk(target)]
        refused += [ast.unparse(part) for part in names if isinstance(part, ast.Attribute) and root(part) in imported]
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "setattr":
            refused.append(ast.unparse(call))
    return refused


def test_no_module_assigns_to_attributes_of_another():
    """Imports say all that a module depends on: no function reaches a class or module from outside."""
    assert {module: refused for module, path in MODULES.items() if (refused := assigned_attributes(path))} == {}


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("from a import B\nB.f = g", ["B.f"]),
        ("import a.b\nif x:\n    a.b.C.f = a.b.C.g = 1", ["a.b.C.f", "a.b", "a.b.C", "a.b.C.g", "a.b", "a.b.C"]),
        ("from a import B\nsetattr(B, 'f', 1)", ["setattr(B, 'f', 1)"]),
        ("from a import B\nclass C(B):\n    f = 1\ndef g():\n    B.f = 1", []),
        ("from a import TABLE\nTABLE[int] = 1", []),
    ],
)
def test_an_assigned_attribute_is_seen(source, refused, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert set(assigned_attributes(path)) <= set(refused)
    assert bool(assigned_attributes(path)) == bool(refused)


LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Timer"}
LOCKS |= {"allocate_lock", "Queue", "LifoQueue", "PriorityQueue", "cached_property"}


def locks_made(path: Path) -> list[str]:
    """Where a module calls, hands on or decorates by a name of the standard library that makes a lock or has one."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "_thread", "queue", "functools")
        for alias in node.names
    }

    def name(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id in ("threading", "_thread", "queue", "functools") else ""
        return imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parts = [part for call in calls for part in (call.func, *call.args, *(keyword.value for keyword in call.keywords))]
    decorators = [decorator for node in ast.walk(tree) for decorator in getattr(node, "decorator_list", ())]
    return [ast.unparse(node) for node in parts + decorators if name(node) in LOCKS]


def test_locks_come_from_the_module_that_frees_them_in_a_forked_child():
    """Or serve a system that does not fork."""
    assert {module for module, path in MODULES.items() if locks_made(path)} == {"qgemm.locks", "qgemm.system.portable"}


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("import threading\nlock = threading.Lock()", ["threading.Lock"]),
        ("from threading import RLock as L\nclass C:\n    def __init__(self):\n        self.lock = L()", ["L"]),
        (
            "import functools\nclass C:\n    @functools.cached_property\n    def x(self): ...",
            ["functools.cached_property"],
        ),
        ("from threading import Lock\nx = field(default_factory=Lock)", ["Lock"]),
        ("import threading\nlocal = threading.local()\ndef f(lock: threading.Lock): ...", []),
        ("from qgemm.locks import cached_property\nclass C:\n    @cached_property\n    def x(self): ...", []),
    ],
)
def test_a_lock_that_is_made_is_seen(source, refused, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert locks_made(path) == refused


@pytest.mark.parametrize("path", TEST_MODULES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_imports_another(path):
    """What two of them share is in a module of its own, so that each runs, moves and goes alone."""
    others = {other.stem for other in TEST_MODULES if other.name.startswith("test_")} | {"conftest"}
    assert not {part for name, _ in imports_of(path) for part in name.split(".")} & others


def test_tests_of_the_gpu_are_marked_by_their_folder_alone():
    """A mark elsewhere would be a test that `pytest tests/gpu` does not run."""
    elsewhere = [path for path in TEST_MODULES if path not in (TESTS / "conftest.py", Path(__file__))]
    assert [path for path in elsewhere if "mark.gpu" in path.read_text()] == []


def test_no_view_of_a_stream_is_handed_out():
    """Python 3.12 crashes when the collector frees io.BytesIO together with a view from its getbuffer()."""
    sources = [path for folder in ("qgemm", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if ".getbuffer" in path.read_text()] == []


def test_files_fit_in_a_head():
    """A kernel is 300 lines at most: its parts are in headers."""
    kinds = (".py", ".cu", ".cuh", ".cpp", ".c", ".h")
    folders = (ROOT / name for name in ("qgemm", "kernels", "tests", "tools", "benchmarks"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES.get(Path(name).suffix, 400)} == {}
