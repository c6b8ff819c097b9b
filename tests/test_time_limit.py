"""The time limit of a test: one that hangs, in Python or in C, fails and does not stop the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import CHILD_SECONDS, forked

CONFIG = Path(__file__).parents[1] / "pyproject.toml"
HANGS = {
    "python": "import threading\ndef test_hangs():\n    threading.Event().wait()\n",
    "C": "import ctypes\ndef test_hangs():\n    ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))\n",
}


def test_each_test_has_a_limit(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert CHILD_SECONDS < float(pytestconfig.getini("timeout")) <= 600
    assert float(pytestconfig.getini("faulthandler_timeout")) > float(pytestconfig.getini("timeout"))
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_a_test_that_hangs_fails(kind, tmp_path):
    """With the project's configuration, but shorter limits."""
    path = tmp_path / "test_hang.py"
    path.write_text(HANGS[kind])
    limits = ["-o", "timeout=1", "-o", "faulthandler_timeout=4", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-c", str(CONFIG), "--rootdir", str(tmp_path), *limits, str(path)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "test_hang.py" in done.stdout + done.stderr


def test_a_forked_child_has_a_limit(monkeypatch):
    monkeypatch.setattr("helpers.CHILD_SECONDS", 1)
    status = os.waitpid(forked(signal.pause), 0)[1]
    assert os.WTERMSIG(status) == signal.SIGALRM
