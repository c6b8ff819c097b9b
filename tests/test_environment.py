"""Environment variables with values that mean nothing: an error that names the variable, never silence."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import normal

import qgemm
from qgemm import parallel


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not called `qgemm.threads`."""
    monkeypatch.setattr(parallel, "_chosen", None)


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5", "00", "2 3", "0x4", "٣", "1e3", str(10**12)])
def test_threads_that_are_no_number(value, run, monkeypatch, tmp_path):
    monkeypatch.setenv("QGEMM_THREADS", value)
    with pytest.raises(ValueError, match=r"QGEMM_THREADS is .*must be a whole number from 1 to 4096"):
        qgemm.threads()
    qgemm.write(tmp_path / "x.gguf", {"w.weight": normal(4, 64)})
    status, _, err = run("convert", tmp_path / "x.gguf", tmp_path / "y.gguf", "q4_0")
    assert (status, err.startswith("qgemm: error: QGEMM_THREADS is ")) == (1, True)


@pytest.mark.parametrize(("value", "threads"), [("1", 1), ("07", 7), ("4096", 4096), ("", parallel.cores())])
def test_threads_that_are_a_number(value, threads, monkeypatch):
    monkeypatch.setenv("QGEMM_THREADS", value)
    assert qgemm.threads() == threads


@pytest.mark.parametrize("number", [0, -1, 4097, 10**12])
def test_threads_that_are_set_to_no_number(number):
    with pytest.raises(ValueError, match=f"got {number}"):
        qgemm.threads(number)


@pytest.mark.parametrize("number", [1.5, "4", [2]])
def test_threads_that_are_no_whole_number(number):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        qgemm.threads(number)


@pytest.mark.parametrize("value", ["nump", "c", "1", "block"])
def test_another_engine_of_the_cpu(value, monkeypatch):
    monkeypatch.setenv("QGEMM_CPU", value)
    with pytest.raises(ValueError, match=f"QGEMM_CPU is '{value}', and must be numpy, blocks or not be set"):
        qgemm.matmul(np.ones((1, 32), np.float32), qgemm.quantize(np.ones((1, 32), np.float32), "q4_0"))
