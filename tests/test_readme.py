"""README.md and docs/ match the code: generated sections, examples, names of files and kernels, links."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import other_python
import pytest
import readme

import qgemm
from benchmarks.report import tables
from qgemm.cli.main import COMMANDS, main
from qgemm.cuda.kernels.routes import source_of

ROOT = tables.ROOT
API = ROOT / "docs" / "api"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
DOCUMENTS = [*map(Path, PAGES), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))]
README_LINES, README_COLUMNS = 130, 120
README_PROGRAM = 8  # lines of the first example
FOLDERS = ("qgemm", "kernels", "tools", "tests", "docs", ".ci")  # the first folder of a path
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")  # `COMMIT:PATH`, a file of an earlier commit, does not count as a path
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Documents whose Python blocks are whole programs. Those of FRAGMENTS continue a reader's program, and those of
# WITH_TORCH are run by tests/with_torch/.
RUN = ["docs/experts.md", "docs/groups.md", "docs/kbit.md", "docs/life-of-a-block.md", "docs/python-api.md"]
FRAGMENTS = ["README.md", "docs/checkpoints.md", "docs/converting.md"]
WITH_TORCH = ["docs/recipes.md", "docs/several-gpus.md", "docs/torch.md"]

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=str)


def text_of(document) -> str:
    return (ROOT / document).read_text()


def paths(text: str) -> list[str]:
    """Code spans that begin like a path of this repository; NAME stands for a format, KERNEL for a kernel."""
    words = (word for span in SPAN.findall(FENCE.sub("", text)) for word in span.split())
    candidates = (word for word in words if re.match(rf"({'|'.join(map(re.escape, FOLDERS))})/", word))
    return [path.replace("NAME", "q4_0").replace("KERNEL", "decode") for path in candidates]


def anchors(text: str) -> set[str]:
    """The anchors of headings on the repository's host, and of names on a reference page of the site."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | {*names}


def broken_links(document: Path, text: str) -> list[str]:
    """Links to files or headings that are not there; addresses of the web are not followed."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            broken.append(link)
    return broken


def unknown_names(text: str) -> list[str]:
    """Dotted names of the package, written as code, that cannot be imported or looked up."""
    names = (name for span in SPAN.findall(text) for name in re.findall(r"^qgemm(?:\.[a-zA-Z_]\w*)+", span))
    return [name for name in names if not resolves(name)]


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or lies in one; names in modules that cannot be imported here count."""
    module, attribute, names = qgemm, None, name.split(".")[1:]
    for part in names:
        owner = module if attribute is None else attribute
        if not hasattr(owner, part):
            try:
                importlib.import_module(f"{owner.__name__}.{part}")
            except (ImportError, AttributeError) as error:
                return isinstance(error, ImportError) and find_spec(f"{owner.__name__}.{part}") is not None
        attribute = getattr(owner, part)
    return True


@cache
def sources() -> str:
    """The text of the package, the kernels and the tools, and of the settings of tests."""
    files = [path for folder in ("qgemm", "kernels", "tools") for path in (ROOT / folder).rglob("*")]
    files.append(ROOT / "tests" / "conftest.py")
    return "\n".join(path.read_text() for path in files if path.suffix in (".py", ".cu", ".cuh", ".c", ".h"))


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[pytest.mark.slow] if path == "docs/kbit.md" else []) for path in readme.DOCUMENTS],
)
def test_generated_sections_are_current(document):
    text = text_of(document)
    assert readme.generated(document, text) == text, "run tools/readme.py"


def test_a_document_without_its_markers_is_refused():
    with pytest.raises(ValueError, match=r"README.md needs one pair of markers <!-- headline -->"):
        readme.generated("README.md", text_of("README.md").replace("<!-- headline -->", ""))


def test_every_public_name_is_explained():
    """In the text of a page besides the API pages, which have docstrings alone."""
    torch_names = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text_of("qgemm/torch/__init__.py"), re.DOTALL)[1])
    pages = [path for path in DOCUMENTS if API not in (ROOT / path).parents and path.name != "CHANGELOG.md"]
    spans = " ".join(span for path in pages for span in SPAN.findall(FENCE.sub("", text_of(path))))
    assert [name for name in [*qgemm.__all__, *torch_names] if not re.search(rf"(?<!\w){name}\b", spans)] == []


def test_no_count_of_tests_or_kernels_is_typed():
    """It would be false after the next change; tests/gpu_ledger.json has the number that passed on a GPU."""
    count = re.compile(r"(\b\d,\d{3}|\b\d{4}) (tests|kernels|cubins)\b")
    assert {str(path): counts for path in DOCUMENTS if (counts := count.findall(text_of(path)))} == {}


def test_every_public_name_has_an_api_page():
    """A public name is on exactly one page of docs/api/, and in its index."""
    directives = re.findall(
        r"^::: (\S+)$", "\n".join(path.read_text() for path in sorted(API.glob("*.md"))), re.MULTILINE
    )
    torch_names = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text_of("qgemm/torch/__init__.py"), re.DOTALL)[1])
    public = [f"qgemm.{name}" for name in qgemm.__all__] + [f"qgemm.torch.{name}" for name in torch_names]
    assert sorted(directives) == sorted(public)
    assert not [name for name in public if f"[`{name}`]" not in text_of("docs/api/index.md")]


def test_the_workflow_has_a_job_for_each_step():
    """The steps are those of .ci/run, in its order; the script has the commands."""
    steps = subprocess.run([ROOT / ".ci" / "run", "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert steps == re.findall(r"^step ([\w-]+) ", text_of(".ci/run"), re.MULTILINE)
    workflow = text_of(".github/workflows/ci.yml")
    matrix = re.search(r"step: \[(.*)\]", workflow)[1].split(", ")
    assert matrix == [name for name in steps if name != "pythons"]  # has a job for each version
    assert json.loads(re.search(r"python: (\[.*\])", workflow)[1]) == list(other_python.VERSIONS)


def test_an_unknown_step_is_refused():
    run = subprocess.run([ROOT / ".ci" / "run", "lint", "tets"], capture_output=True, text=True)
    assert (run.returncode, run.stderr.split(":")[0]) == (2, "tets is not a step")


def test_every_marker_is_generated():
    """A section that nothing writes would go stale unseen."""
    for document in DOCUMENTS:
        marked = set(re.findall(r"<!-- (\w+) -->", text_of(document)))
        assert marked == set(readme.DOCUMENTS.get(document.as_posix(), ())), document


@each_document
def test_paths_exist(document):
    missing = [path for path in paths(text_of(document)) if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


@each_document
def test_links_lead_somewhere(document):
    assert not broken_links(document, text_of(document))


@each_document
def test_names_of_the_package_exist(document):
    assert not unknown_names(text_of(document))


def test_stale_names_are_found():
    """The three checks above on a text where each has something to find."""
    text = (
        "See `qgemm/nowhere.py`, `tools/readme.py`, `0788474:qgemm/tilings.py`, [a](docs/nowhere.md), `qgemm.nowhere`."
    )
    assert [path for path in paths(text) if not list(ROOT.glob(path))] == ["qgemm/nowhere.py"]
    assert broken_links(Path("README.md"), text + " [b](#nowhere) [c](docs/kernels/decode.md)") == [
        "docs/nowhere.md",
        "#nowhere",
    ]
    assert unknown_names(text + " `qgemm.matmul` `qgemm.codec.format.Format.quantize`") == ["qgemm.nowhere"]


def test_kernel_notes_name_kernels():
    """The second column of the index names every kernel of the GPU, and the first links every page."""
    index = text_of("docs/kernels/README.md")
    rows = [line.split("|")[1:3] for line in index.splitlines() if line.startswith("| [")]
    named = {name for _, kernels in rows for name in SPAN.findall(kernels)}
    named_files = {source_of(name) for name in named}
    assert not {name for name in named_files if not any((ROOT / "kernels").rglob(f"{name}.c*"))}
    assert {path.stem for path in (ROOT / "kernels").rglob("*.cu")} <= named
    listed = {target for pages, _ in rows for target in LINK.findall(pages)}
    assert listed == {path.name for path in (ROOT / "docs" / "kernels").glob("*.md")} - {"README.md"}


@each_document
def test_constants_exist(document):
    """Names like WG_SPLIT_K, in code or in prose."""
    named = set(re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)+\b", FENCE.sub("", text_of(document))))
    assert not {name for name in named if not re.search(rf"\b{name}\b", sources())}


def test_readme_is_short():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= README_LINES
    assert not [line for line in lines if len(line) > README_COLUMNS and not line.startswith("|")]


def commands(text: str) -> list[list[str]]:
    """The arguments of each indented line that begins with a command, without what two spaces separate from it."""
    lines = re.findall(rf"^    qgemm ((?:{'|'.join(COMMANDS)}) .*)$", text, re.MULTILINE)
    return [shlex.split(line.partition("  ")[0]) for line in lines]


def test_command_lines_are_complete(tmp_path, monkeypatch, capsys):
    """Each fails because its files are missing, and not because of its arguments, unless it needs no file."""
    monkeypatch.chdir(tmp_path)
    lines = [words for path in DOCUMENTS for words in commands(text_of(path)) if "SRC" not in words]
    assert len(lines) > 20
    for words in lines:
        assert main(words) == (0 if "--problem" in words else 1), (words, capsys.readouterr().err)


def test_a_program_numbers_and_a_plot_come_before_the_first_section():
    opening = text_of("README.md").partition("\n## ")[0]
    assert FENCE.search(opening).group(1) == "python"
    assert re.search(r"^\| float16, us \(over cuBLAS\) \| \d+\.\d \(\d\.\dx\) \|", opening, re.MULTILINE)
    assert len(re.findall(r"^- \*\*.*\d\.\dx", opening, re.MULTILINE)) == 2
    assert "](tools/results/h200_speedup.svg)" in opening


def test_the_example_runs(tmp_path, monkeypatch):
    """The first Python block, letter by letter, on a model that has its tensor."""
    example = FENCE.search(text_of("README.md")).group(2)
    assert len(example.strip().splitlines()) <= README_PROGRAM
    monkeypatch.chdir(tmp_path)
    w = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    metadata = {"general.architecture": "llama"}
    qgemm.write("model.gguf", {"blk.0.ffn_down.weight": qgemm.quantize(w, "q4_0")}, metadata)
    scope = {}
    exec(example, scope)
    assert scope["y"].shape == (8, 64)
    scope["model"].close()
    with qgemm.open("copy.gguf") as copy:
        assert str(copy["w"].format) == "Q8_0"
        assert copy.metadata["general.architecture"] == "llama"


def programs(document) -> list[str]:
    """The Python blocks of a document."""
    return [code for language, code in FENCE.findall(text_of(document)) if language == "python"]


def test_all_python_of_documents_is_run():
    """Or, as a fragment, at least valid."""
    assert sorted(str(path) for path in DOCUMENTS if programs(path)) == sorted([*RUN, *FRAGMENTS, *WITH_TORCH])
    for document in FRAGMENTS:
        for program in programs(document):
            compile(program, document, "exec")


@pytest.mark.parametrize("document", RUN)
def test_programs_of_documents_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert programs(document)
    for program in programs(document):
        exec(program, {})
