"""The name under which qgemm is installed, and the packages that its extras install."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from qgemm.version import DISTRIBUTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


# ---- the name of the distribution


def test_the_distribution_is_named_once():
    assert PROJECT["name"] == DISTRIBUTION


# A command that installs `qgemm`, or an extra of it, from the package index.
FOREIGN_INSTALL = re.compile(r"qgemm\[|(install|add|download|uninstall)\b[^\n]*[ '\"]qgemm(?![\w/.-])")
TEXTS = (".py", ".md", ".toml", ".json", ".cu", ".cuh")


@pytest.mark.parametrize(
    "text", ["pip install qgemm", "pip install -U 'qgemm[cuda13]'", "uv add qgemm", 'f"{x}: pip install qgemm=={v}"']
)
def test_a_foreign_install_is_recognized(text):
    assert FOREIGN_INSTALL.search(text)


def test_no_text_installs_the_foreign_package():
    """`qgemm` on the package index is another project's code."""
    folders = ("qgemm", "kernels", "docs", "tests", "tools", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    paths += [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run")
    ]
    assert len(paths) > 100
    texts = ((path, path.read_text(errors="replace")) for path in paths if path != Path(__file__))
    assert not [f"{path}: {match[0]}" for path, text in texts if (match := FOREIGN_INSTALL.search(text))]


def test_messages_name_extras_that_there_are():
    sources = "".join(path.read_text() for path in (ROOT / "qgemm").rglob("*.py"))
    named = set(re.findall(r"pip_install\(['\"](\w+)['\"]\)", sources))
    assert {"cuda13", "convert"} <= named <= set(EXTRAS)


# ---- the extras for CUDA


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_extras_of_one_cuda_version(cuda):
    """Extras install the CUDA libraries that qgemm loads: cuBLAS for panels, NVRTC, the runtime with its headers."""
    requirements = {r.name: r for r in map(Requirement, EXTRAS[f"cuda{cuda}"])}
    assert set(requirements) == {f"cupy-cuda{cuda}x", "cuda-toolkit"}
    assert requirements["cuda-toolkit"].extras == {"cublas", "cudart", "nvjitlink", "nvrtc"}
    assert requirements[f"cupy-cuda{cuda}x"].extras == set()  # [ctk] is cuFFT, cuRAND, cuSOLVER and cuSPARSE as well
    versions = requirements["cuda-toolkit"].specifier
    assert versions.contains(f"{cuda}.9")
    assert not versions.contains(f"{int(cuda) - 1}.9")
    assert not versions.contains(f"{int(cuda) + 1}.0")


LEFT_OUT = re.compile(r"\b(cp|cupy)(\(\))?\.(random|fft|linalg)\b|\bcupyx\b")  # parts of CuPy that load other libraries


@pytest.mark.parametrize("folder", ["qgemm", "tools", "tests/gpu"])
def test_no_use_of_cupy_loads_other_libraries(folder):
    uses = {path: LEFT_OUT.search(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert uses
    assert not [f"{path}: {use[0]}" for path, use in uses.items() if use]
