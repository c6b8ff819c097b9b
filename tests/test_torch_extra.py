"""qgemm.torch without PyTorch, or with an old one: an error that names the missing package; qgemm without it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    """The output of a Python program."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (
            "None",
            "needs PyTorch 2.4 or later, which is not installed: pip install 'torch>=2.4', or .*extra [torch]",
        ),
        ("old", "needs PyTorch 2.4 or later, this is 2.3.1+cu121: pip install -U torch"),
    ],
)
def test_what_is_missing_is_named(torch, message):
    program = f"""
import sys, types
old = types.ModuleType("torch")
old.__version__ = "2.3.1+cu121"
sys.modules["torch"] = {torch}
try:
    import qgemm.torch
except ImportError as error:
    print(error)
"""
    start, _, end = message.partition(".*")
    printed = run(program).strip()
    assert printed.startswith(f"qgemm.torch {start}")
    assert printed.endswith(end)


def test_qgemm_alone_imports_no_torch():
    packages = "[name for name in sys.modules if 'torch' in name.split('.')[:2]]"  # torch and qgemm.torch
    assert run(f"import sys, qgemm, qgemm.cli.main; qgemm.matmul; print({packages})") == "[]\n"
