"""The name by which qgemm is installed, and what its extras bring."""

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


# ---- the name by which it is installed


def test_the_distribution_is_named_once():
    assert PROJECT["name"] == DISTRIBUTION


# qgemm as an installer takes it.
OF_A_STRANGER = re.compile(r"qgemm\[|(install|add|download|uninstall)\b[^\n]*[ '\"]qgemm(?![\w/.-])")
TEXTS = (".py", ".md", ".toml", ".json", ".cu", ".cuh")


@pytest.mark.parametrize(
    "text", ["pip install qgemm", "pip install -U 'qgemm[cuda13]'", "uv add qgemm", 'f"{x}: pip install qgemm=={v}"']
)
def test_a_strangers_name_is_found(text):
    assert OF_A_STRANGER.search(text)


def test_nobody_is_told_to_install_a_stranger():
    """`qgemm` on the package index is another project's code."""
    folders = ("qgemm", "kernels", "docs", "tests", "tools", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    paths += [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run")
    ]
    assert len(paths) > 100
    texts = ((path, path.read_text(errors="replace")) for path in paths if path != Path(__file__))
    assert not [f"{path}: {found[0]}" for path, text in texts if (found := OF_A_STRANGER.search(text))]


def test_messages_name_extras_that_there_are():
    sources = "".join(path.read_text() for path in (ROOT / "qgemm").rglob("*.py"))
    named = set(re.findall(r"pip_install\(['\"](\w+)['\"]\)", sources))
    assert {"cuda13", "convert"} <= named <= set(EXTRAS)


# ---- what the extras for CUDA bring


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_extras_of_one_cuda_version(cuda):
    """Of CUDA's libraries those that are loaded: cuBLAS for panels, NVRTC, the runtime with its headers."""
    requirements = {r.name: r for r in map(Requirement, EXTRAS[f"cuda{cuda}"])}
    assert set(requirements) == {f"cupy-cuda{cuda}x", "cuda-toolkit", "cuda-bindings"}
    assert requirements["cuda-toolkit"].extras == {"cublas", "cudart", "nvjitlink", "nvrtc"}
    assert requirements[f"cupy-cuda{cuda}x"].extras == set()  # [ctk] is cuFFT, cuRAND, cuSOLVER and cuSPARSE as well
    for name in ("cuda-toolkit", "cuda-bindings"):
        versions = requirements[name].specifier
        assert versions.contains(f"{cuda}.9")
        assert not versions.contains(f"{int(cuda) - 1}.9")
        assert not versions.contains(f"{int(cuda) + 1}.0")


LEFT_OUT = re.compile(r"\b(cp|cupy)(\(\))?\.(random|fft|linalg)\b|\bcupyx\b")  # of CuPy, what loads the other libraries


@pytest.mark.parametrize("folder", ["qgemm", "tools", "tests/gpu"])
def test_of_cupy_nothing_is_used_that_loads_other_libraries(folder):
    found = {path: LEFT_OUT.search(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert found
    assert not [f"{path}: {use[0]}" for path, use in found.items() if use]
