"""Fixtures of the tests that replace folders: a pytest plugin, which those modules name."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
from replaced import OLD, put


@pytest.fixture
def old(tmp_path) -> Path:
    """A folder that is to be replaced."""
    put(tmp_path / "out", OLD)
    return tmp_path / "out"


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """The writers of outputs of several files, by name, with their sources."""
    return faults.writers(tmp_path_factory.mktemp("sources"))
