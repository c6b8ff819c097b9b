"""Marks and fixtures: tests/gpu/ skips without a GPU."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import gpus

if os.environ.get("QGEMM_WITHOUT_CUPY") == "1":  # as on a machine that has torch alone
    sys.modules["cupy"] = None  # type: ignore[assignment]  which makes `import cupy` fail
if "PYTEST_XDIST_WORKER" in os.environ:  # NumPy and CUDA read these variables when they are loaded
    for library in ("OPENBLAS", "OMP", "MKL"):  # the last two are PyTorch's
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")  # workers share the cores
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.of_worker(os.environ["PYTEST_XDIST_WORKER"])

import harness
import pytest
from hypothesis import HealthCheck, settings

import qgemm
from qgemm.cli import main as cli
from qgemm.codec.format import Format
from qgemm.cpu import native
from qgemm.cuda.jit import cache, nvrtc
from qgemm.formats.groups import members

WEEKS = 24  # until each format of a family has had its turn
GPU_TESTS = Path(__file__).parent / "gpu"

# Tests interrupt processes that they start. A shell starts background jobs with SIGINT ignored, and child processes
# inherit that, so the default handler is restored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("qgemm", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("qgemm"), max_examples=5)  # for `make check`
settings.load_profile("qgemm")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = f"also the tests of a whole family, for the formats of this week; after {WEEKS} weeks all have had theirs"
    parser.addoption("--family", type=int, metavar="WEEK", help=help)
    parser.addoption("--one-in", type=int, metavar="N", default=1, help="one in N cases of each test, for `make check`")


def share_of_week(week: int) -> list[Format]:
    """The group formats whose turn it is in a week."""
    return members()[week % WEEKS :: WEEKS]


def share_of_cases(items: list[pytest.Item], n: int) -> Iterator[pytest.Item]:
    """The first case of each test, and one in n of those after it."""
    cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if cases[test] % n == 0:
            yield item
        cases[test] += 1


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test is marked gpu by its folder: one of tests/gpu/ needs an NVIDIA GPU, any other must run without.

    Those of a whole family of formats run with -m family, or for the share of a week with --family.
    """
    if "family" not in (config.option.markexpr or ""):
        week = config.getoption("family")
        share = () if week is None else share_of_week(week)
        items[:] = [item for item in items if "family" not in item.keywords or item.callspec.params["fmt"] in share]
    items[:] = share_of_cases(items, config.getoption("one_in"))
    cuda = qgemm.backends()["cuda"]
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not cuda.available:
                item.add_marker(pytest.mark.skip(reason=cuda.detail))


@pytest.fixture(autouse=True)
def numpy_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products on the CPU are NumPy's, the reference of all others, unless a test asks for an `engine`."""
    if "engine" in request.fixturenames and request.getfixturevalue("engine") == "compiled":
        monkeypatch.delenv("QGEMM_CPU", raising=False)
    else:
        monkeypatch.setenv("QGEMM_CPU", "numpy")


COMPILED = pytest.mark.skipif(bool(native.reason()), reason=f"no compiled code: {native.reason()}")


@pytest.fixture(scope="module", params=["numpy", pytest.param("compiled", marks=[pytest.mark.compiles, COMPILED])])
def engine(request: pytest.FixtureRequest) -> str:
    """What multiplies on the CPU: a test that uses this fixture holds NumPy and compiled code alike."""
    return request.param


@pytest.fixture(autouse=True)
def no_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the quick tier quick: a test that compiles kernels is marked so."""
    if not {"compiles", "gpu"} & set(request.keywords):

        def refuse(*unit: object) -> None:
            pytest.fail("a test that compiles a kernel is marked with pytest.mark.compiles")

        monkeypatch.setattr(cache, "compile_cubin", refuse)
        monkeypatch.setattr(nvrtc, "compile_cubin", refuse)
        monkeypatch.setattr(nvrtc, "check", refuse)
        monkeypatch.setattr(harness, "library", refuse)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs one qgemm command in this process -> (exit code, stdout, stderr), which are printable."""

    def run(*words: object) -> tuple[int, str, str]:
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as stop:  # --help, --version
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        assert all(line.isprintable() for line in (out + err).replace("\t", "\n").split("\n"))
        return status, out, err

    return run


@pytest.fixture
def refused(run):
    """Runs a command that fails -> its one line on stderr."""

    def refused(*words: object, status: int = 1) -> str:
        got, out, err = run(*words)
        assert (got, out) == (status, "")
        assert re.fullmatch(r"qgemm: error: [^\n]+\n", err)
        return err

    return refused


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", file=sys.stderr, flush=True)
