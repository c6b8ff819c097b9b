"""The fuzz tool: a short run has no escapes, its seeds are valid files, and it detects each kind of escape."""

from __future__ import annotations

import warnings
from random import Random

import fuzz
import numpy as np
import pytest
from fuzzing import folders, inputs
from fuzzing.inputs import KINDS
from fuzzing.reference import Unsure

from qgemm.errors import CheckpointError


@pytest.fixture
def bench(tmp_path):
    return fuzz.Bench(str(tmp_path))


@pytest.mark.parametrize("name", KINDS)
def test_short_run_has_no_escapes(name, bench, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 60)  # tests do not time
    seen = {case: fuzz.execute(bench, 0, name, case) for case in range(150)}
    assert {case: wrong for case, (_, wrong) in seen.items() if wrong} == {}
    assert {verdict for verdict, _ in seen.values()} == {fuzz.VALID, fuzz.REFUSED}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "recorded"])
def test_seeds_are_valid(name, bench, monkeypatch):
    """Unchanged seeds are read, and the reference accepts them too."""
    monkeypatch.setattr(inputs, "CHANGES", (0,))
    monkeypatch.setattr(inputs, "JUNK", 0)
    valid = 0
    for case in range(40):
        files, main = KINDS[name].draw(Random(case))
        try:
            KINDS[name].valid(files, main)
        except (fuzz.Invalid, Unsure):  # a shard or a field that was left out
            continue
        assert bench.run(KINDS[name], files, main) == (fuzz.VALID, "")
        valid += 1
    assert valid > 10


def test_an_execution_is_told_by_three_numbers():
    for name, kind in KINDS.items():
        assert kind.draw(Random(f"7 {name} 4711")) == kind.draw(Random(f"7 {name} 4711"))


def escape(bench, monkeypatch, reader, kind="npy") -> str:
    monkeypatch.setitem(fuzz.READERS, "source", reader)
    return bench.run(KINDS[kind], {"m.npy": inputs.npy_seeds()[0].raw(Random(1))}, "m.npy")[1]


def test_escapes_are_detected(bench, monkeypatch):
    """Another error, a warning, a message, a verdict, time and memory are detected."""

    def raising(error):
        def reader(path):
            raise error(path) if isinstance(error, type) else error

        return reader

    def warning(path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.warn("hm", RuntimeWarning, stacklevel=1)

    blocks = []

    def greedy(path):
        blocks.append(np.ones(64 << 20, np.uint8))
        blocks.clear()
        return {}

    assert escape(bench, monkeypatch, raising(OverflowError)).startswith("raises OverflowError")
    assert escape(bench, monkeypatch, warning) == "warns RuntimeWarning('hm')"
    assert escape(bench, monkeypatch, raising(CheckpointError("\xe9"))).startswith("message")
    assert escape(bench, monkeypatch, raising(CheckpointError)) == "is refused, but valid"
    assert escape(bench, monkeypatch, greedy) == "takes 64 MiB"
    times = iter(range(100))
    monkeypatch.setattr(fuzz.time, "thread_time", lambda: next(times))
    assert escape(bench, monkeypatch, lambda path: {}) == "takes 1.000 s"


def test_a_wrong_verdict_is_seen(bench, monkeypatch):
    monkeypatch.setitem(fuzz.READERS, "source", lambda path: {})
    assert bench.run(KINDS["npy"], {"m.npy": b"\x93NUMPY"}, "m.npy") == (fuzz.VALID, "is read, but: magic")


def test_other_weights_are_seen(bench, monkeypatch):
    real = fuzz.READERS["source"]
    monkeypatch.setattr(inputs, "CHANGES", (0,))
    monkeypatch.setattr(inputs, "JUNK", 0)
    drawn = (KINDS["packed"].draw(Random(case)) for case in range(99))
    files, main = next(draw for draw in drawn if b'"awq"' in draw[0].get("config.json", b""))
    assert bench.run(KINDS["packed"], files, main) == (fuzz.VALID, "")
    monkeypatch.setitem(
        fuzz.READERS, "source", lambda path: {name: (shape, values if values is None else values + 1)
                                              for name, (shape, values) in real(path).items()}
    )  # fmt: skip
    assert bench.run(KINDS["packed"], files, main)[1].endswith("has other values")


def test_the_command(capsys, tmp_path, monkeypatch):
    """A whole run with its table; one execution, whose files are saved."""
    monkeypatch.setattr(fuzz.sys, "argv", ["fuzz.py", "--count", "500", "--kind", "npy", "--jobs", "1"])
    monkeypatch.setattr(fuzz, "SECONDS", 60)
    assert fuzz.main() == 0
    assert "npy                500 executions" in capsys.readouterr().out
    argv = ["fuzz.py", "--kind", "split", "--case", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(fuzz.sys, "argv", argv)
    assert fuzz.main() == 0
    assert (tmp_path / "split-0-3" / "escape.txt").exists()
    assert len(list((tmp_path / "split-0-3").glob("*.gguf"))) >= 2


@pytest.mark.slow
def test_folders_have_no_escapes(capsys, monkeypatch):
    """Each of some hundred folders, of every architecture and method, in a process whose memory is limited."""
    monkeypatch.setattr(fuzz.sys, "argv", ["fuzz.py", "--folders", "--every", "251", "--jobs", "1"])
    monkeypatch.setattr(fuzz, "SECONDS", 60)
    assert fuzz.main() == 0, capsys.readouterr().err
    assert "0 escapes" in capsys.readouterr().out


def test_escapes_of_folders_are_detected(tmp_path, monkeypatch):
    """Another error, a warning, an exhausted memory and a message without a name are detected."""
    case = folders.Case("LlamaForCausalLM", "config.json", ("rope_theta",), "1e308")
    assert folders.execute(case, tmp_path, 60) == (False, "")

    def convert(error):
        def raising(path, output, kind, **options):
            raise error(str(path))

        return raising

    for error in (ZeroDivisionError, RuntimeWarning, MemoryError):
        monkeypatch.setattr(folders.qgemm, "convert", convert(error))
        assert folders.execute(case, tmp_path, 60)[1].startswith(f"raises {error.__name__}")
    monkeypatch.setattr(folders.qgemm, "convert", convert(CheckpointError))
    assert folders.execute(case, tmp_path, 60)[1].startswith("message")
