"""Shared by the adapters: reversible changes, and errors that name the missing package."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from torch_layers import torch

from qgemm.torch.patching import Patched, needs

ADAPTERS = {"transformers": "5.17", "diffusers": "0.38", "peft": "0.21", "accelerate": "1.1"}


class Owner:
    def forward(self):
        return "theirs"


def test_changes_are_undone_in_turn():
    table, patched = {"gguf": 1}, Patched()
    patched.replace(Owner, "forward", lambda self: "first")
    patched.replace(Owner, "forward", lambda self: "second")
    patched.replace(table, "gguf", 2)
    assert (Owner().forward(), table) == ("second", {"gguf": 2})
    patched.undo()
    assert (Owner().forward(), table) == ("theirs", {"gguf": 1})
    patched.undo()


def test_a_with_block_undoes_also_after_an_error():
    def fail():
        with Patched() as patched:
            patched.replace(Owner, "forward", lambda self: "ours")
            assert Owner().forward() == "ours"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert Owner().forward() == "theirs"


@pytest.mark.parametrize("package", ADAPTERS)
def test_a_package_that_is_missing_is_named(package):
    """And what to install. Of the adapter alone: qgemm.torch is there without."""
    program = f"""
import sys, importlib.metadata as metadata
def version(name):
    raise metadata.PackageNotFoundError(name)
sys.modules["{package}"], metadata.version = None, version
import qgemm.torch
try:
    import qgemm.torch.{package}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    oldest = ADAPTERS[package]
    want = f"qgemm.torch.{package} needs {package} {oldest} or later, which is not installed: pip install '{package}>="
    extra = {"accelerate": "transformers"}.get(package, package)
    assert done.stdout == f"{want}{oldest}', or this project with its extra [{extra}]\n", done.stderr


def test_a_package_of_another_version_is_named(monkeypatch):
    monkeypatch.setattr("qgemm.torch.patching.version", lambda name: "4.57.6")
    error = needs("qgemm.torch.transformers", "transformers", "5.17", ImportError("No module named 'x'"))
    assert isinstance(error, ImportError)
    start = "qgemm.torch.transformers needs transformers 5.17 or later and what it needs, this is 4.57.6"
    assert str(error).startswith(f"{start} (No module named 'x'): pip install 'transformers>=5.17', or")
    assert metadata.version("torch") == torch.__version__
