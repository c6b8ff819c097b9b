"""The library as a type checker sees it: overloads by x, `out` and `dtype`, and names as Literals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DATA

ROOT = Path(__file__).parents[1]


@pytest.mark.compiles  # without mypy's cache it reads all of NumPy's stubs: too slow for the quick tier
def test_calls_have_the_types_that_users_expect():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(DATA / "typed_calls.py")]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1][:7]) == (0, "Success"), done.stdout + done.stderr
