"""Tests with other versions of Python: which versions, and how their interpreters are found."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import other_python

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_versions_of_python_are_those_of_the_package():
    """Each version that the package names is tested: in .venv, or by turns of weeks."""
    classifiers = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT))
    assert classifiers == {*other_python.VERSIONS, "3.11"}
    oldest = re.search(r'requires-python = ">=(.*)"', PYPROJECT)[1]
    assert other_python.VERSIONS[oldest] == "lowest-direct"


def test_an_interpreter_of_another_version_is_passed_over(tmp_path, monkeypatch):
    """As is a command that only prints an error, like those of pyenv for versions that are not selected."""
    here = "{}.{}".format(*sys.version_info)
    for name, command in (("bin/broken", "exit 127"), ("bin/here", f'exec {sys.executable} "$@"')):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    broken, working = str(tmp_path / "bin/broken"), str(tmp_path / "bin/here")
    monkeypatch.setattr(other_python, "candidates", lambda version: iter([broken, working]))
    assert other_python.interpreter(here) == working
    assert other_python.interpreter("3.9") is None
