"""The first half second: `import qgemm` imports nothing, and Ctrl-C while the command starts prints no traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qgemm
from qgemm import api

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def entry() -> str:
    """The script that pip generates for the entry point in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.search(r'^qgemm = "([\w.]+):(\w+)"$', text, re.MULTILINE).groups()
    return f"import sys\nfrom {module} import {function}\nsys.exit({function}())"


DOORS = {"script": ["-c", entry()], "module": ["-m", "qgemm"]}

# Python runs the module `sitecustomize` at start. It sends the signal just before the module $SENT_BEFORE is imported,
# within code that treats every exception as a failed import, as C extension modules do.
SITE = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SENT_BEFORE"]:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):  # Python looks for signals in loops
                    pass
            except BaseException as error:
                raise ImportError(f"{name} failed to import") from error
        return None

sys.meta_path.insert(0, Sender())
"""


@pytest.fixture
def interrupted(tmp_path):
    """Runs the command by one of its entry points, interrupted before a module is imported -> the process."""
    (tmp_path / "sitecustomize.py").write_text(SITE)

    def interrupted(door: str, module: str, *before: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
        here = {**ENVIRONMENT, "PYTHONPATH": path, "SENT_BEFORE": module}
        command = [*before, sys.executable, *DOORS[door], "routes", "--help"]
        return subprocess.run(command, env=here, capture_output=True, text=True)

    return interrupted


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("module", ["qgemm.cli.main", "argparse", "numpy", "numpy.linalg", "gguf", "qgemm.cli.routes"])
def test_interrupted_while_it_is_imported(door, module, interrupted):
    """The signal handler ends the process, because an exception could be taken for a failed import."""
    done = interrupted(door, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "qgemm: interrupted\n")


@pytest.mark.parametrize("door", DOORS)
def test_started_in_the_background(door, interrupted):
    """A job that a shell starts with & ignores Ctrl-C, and still does."""
    done = interrupted(door, "numpy", "sh", "-c", 'trap "" INT; exec "$0" "$@"')
    assert (done.returncode, done.stderr) == (0, "")


def test_the_handler_is_back_when_a_command_runs():
    """An interrupt of the work is an exception, so that unfinished files are removed."""
    program = """
import signal, sys
import qgemm.cli.main as main
from qgemm.cli.start import main as start
main.main = lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler
sys.exit(start())
"""
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True)


def test_interrupted_when_the_work_is_done():
    """The signal ends the process, because an exception would be printed by what Python does at its end."""
    program = """
import atexit, os, signal, sys
import qgemm.cli.main as main
from qgemm.cli.start import main as start
main.main = lambda: 0
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.exit(start())
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_importing_imports_nothing():
    code = "import sys, qgemm.cli.start; assert {'numpy', 'gguf', 'argparse', 'qgemm.api'}.isdisjoint(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_info_of_a_gguf_file_imports_no_converter(tmp_path):
    """Nor progress bars: imports are most of the time of a short command."""
    qgemm.write(str(tmp_path / "w.gguf"), {"w": np.zeros((2, 32), np.float32)})
    code = f"""
import sys
from qgemm.cli.main import main
assert main(["info", {str(tmp_path / "w.gguf")!r}]) == 0
assert {{"tqdm", "qgemm.converter", "qgemm.evaluation"}}.isdisjoint(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_names_come_when_they_are_used():
    code = """
import qgemm
assert "matmul" not in vars(qgemm)
assert set(qgemm.__all__) <= set(dir(qgemm))
from qgemm import *
assert open is qgemm.open and matmul is qgemm.api.matmul
assert qgemm.tensor.Tensor is Tensor
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    assert set(qgemm.__all__) == {*api.__all__, "DeviceExperts", "DeviceTensor", "Planes"}


@pytest.mark.parametrize("name", ["matmul", "DeviceTensor"])
def test_a_name_that_a_program_replaces_stays_replaced(name):
    """Whatever names come at their first use after it."""
    code = f"""
import qgemm
qgemm.{name} = "mine"
assert qgemm.quantize and qgemm.Planes and qgemm.__all__
assert qgemm.{name} == "mine"
del qgemm.{name}
assert qgemm.{name}.__name__ == "{name}"
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_classes_of_a_device_come_when_they_are_used():
    """Without CuPy, and without the CUDA backend before."""
    code = """
import sys, qgemm
qgemm.matmul
assert "qgemm.cuda" not in sys.modules
assert qgemm.DeviceTensor.__name__ == "DeviceTensor" and qgemm.Planes and qgemm.DeviceExperts
assert "qgemm.cuda" in sys.modules and "cupy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    with pytest.raises(AttributeError, match="module 'qgemm' has no attribute 'matmull'"):
        _ = qgemm.matmull
