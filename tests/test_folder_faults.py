"""Outputs of several files are all old, all new or refused, after faults and for readers meanwhile."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
from files import model
from helpers import left_over, normal
from replaced import HEAD, NEW, OLD, contents, one_error, put, put_files

import qgemm
from qgemm.errors import GGUFAccessError, GGUFError, QgemmError
from qgemm.files import folders, journal
from qgemm.files.folders import replacing_folder
from qgemm.files.gguf import reader
from qgemm.system import posix, system

pytest_plugins = ["replaced_folders"]  # its fixtures old and writers


# ---------------------------------------------------------------- kills and errors of the disk


NAMES = [
    "new awq", "new compressed-tensors", "gptq over gptq", "gptq in place", "new split", "split over split",
    "file over file",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fault_leaves_old_or_new_output(name, writers, tmp_path):
    """A share of the campaign of tools/faults.py."""
    assert list(writers) == NAMES
    bench = faults.Bench(writers[name], tmp_path)
    results = list(faults.campaign(bench, stride=29, random=2, seed=NAMES.index(name)))
    assert [result for result in results if result[2]] == []
    assert {verdict for _, verdict, _ in results} <= {"old", "new", "refused"}


@pytest.mark.parametrize("kind", ["fsync", "rename_with_flags"])
@pytest.mark.parametrize("name", ["gptq over gptq", "split over split"])
def test_error_of_one_call_leaves_one_output_and_nothing_else(kind, name, writers, tmp_path, monkeypatch):
    """Each fsync, and each rename."""
    bench = faults.Bench(writers[name], tmp_path)
    outcomes = []
    for number in range(100):
        bench.reset()
        with monkeypatch.context() as patched:
            one_error(patched, os if kind == "fsync" else system, kind, number)
            try:
                bench.writer.new(bench.place)
                break
            except QgemmError as error:
                outcomes.append((str(error), bench.verdict()))
        assert left_over(bench.place) == []
    assert bench.verdict() == "new"
    assert len(outcomes) >= 1
    for message, verdict in outcomes:
        assert "Input/output error" in message
        assert verdict == ("new" if "was replaced" in message else "old")


@pytest.mark.parametrize("name", ["gptq over gptq", "split over split"])
def test_full_disk(name, writers, tmp_path):
    bench = faults.Bench(writers[name], tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(map(len, bench.new.values()))
    for limit in [*range(0, largest, largest // 7), largest - 1]:
        bench.reset()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(GGUFAccessError, match=r"cannot be written: File too large") as caught:
                bench.writer.new(bench.place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ".qgemm-" not in str(caught.value)
        assert bench.verdict() == "old"
        assert left_over(bench.place) == []


# ---------------------------------------------------------------- the order of steps


def test_files_then_folder_then_name_then_parent(old, tmp_path, monkeypatch):
    """Each is on the disk before the next depends on it."""
    calls = []
    fsync, exchange = os.fsync, folders.exchange

    def synced(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append("new folder" if name.startswith(".qgemm-") else name)
        fsync(fd)

    def exchanged(*arguments) -> None:
        calls.append("exchange")
        exchange(*arguments)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(folders, "exchange", exchanged)
    put(old, NEW)
    assert calls[:2] == ["model.bin", "config.json"]
    assert calls[-3:] == ["new folder", "exchange", tmp_path.name]


def test_journal_is_on_the_disk_before_the_first_move(tmp_path, monkeypatch):
    """The head goes first and comes last: no program opens the other files without it."""
    put_files(tmp_path, OLD)
    calls = []
    fsync, move, unlink = os.fsync, journal.move, os.unlink

    def synced(fd: int) -> None:
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def moved(name, source, target, new_name="", fd=None) -> None:
        calls.append(("move", new_name or name))
        move(name, source, target, new_name, fd)

    def unlinked(name, **named) -> None:
        calls.append(("unlink", name))
        unlink(name, **named)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(journal, "move", moved)
    monkeypatch.setattr(os, "unlink", unlinked)
    put_files(tmp_path, {name: b"new" for name in OLD})
    start = calls.index(("move", journal.NAME))
    here = ("sync", tmp_path.name)
    assert calls[start + 1] == here
    moves = [name for call, name in calls[start + 2 :] if call == "move"]
    assert moves[0] == moves[-1] == HEAD
    end = calls.index(("unlink", journal.NAME))
    assert calls[end - 1] == here
    assert calls[end + 1] == here
    assert all(call != "unlink" for call, _ in calls[:end])
    assert set(contents(tmp_path).values()) == {b"new"}
    assert left_over(tmp_path) == []


# ---------------------------------------------------------------- readers meanwhile


def reading(tmp_path: Path, write: Callable[[int], object], read: Callable[[], object], times: int) -> list[object]:
    """The results of `read` while another process writes; GGUFError is no result."""

    def work() -> None:
        for number in range(1 << 30):
            write(number % 2)

    child = faults.forked(work)
    results, refusals = [], []
    try:
        for _ in range(times):
            try:
                results.append(read())
            except QgemmError as error:
                refusals.append(str(error))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [text for text in refusals if not re.search("replaced|cannot be read", text)] == []
    return results


@pytest.mark.parametrize("exchanged", [True, False])
def test_reader_of_a_checkpoint_sees_no_mixture(exchanged, tmp_path, monkeypatch):
    """The config of one and the weights of the other would be read as other weights."""
    if not exchanged:
        monkeypatch.setattr(posix, "_renameat2", lambda: None)
    values = []
    for number, fmt in enumerate(("u4z_g32", "u4_g64")):
        model(tmp_path / "m.gguf", {"a.weight": normal(32, 64)})
        qgemm.convert(tmp_path / "m.gguf", tmp_path / str(number), fmt, layout="gptq")
        with qgemm.load(tmp_path / str(number)) as file:
            values.append(file["a.weight"].dequantize().tobytes())
    files = [contents(tmp_path / str(number)) for number in range(2)]

    def is_own(name: str) -> bool:
        return name in files[0]

    def write(number: int) -> None:
        with replacing_folder(str(tmp_path / "out"), HEAD, is_own) as create:
            for name, data in files[number].items():
                with create(str(tmp_path / "out" / name)) as fd:
                    os.write(fd, data)

    def read() -> bytes:
        with qgemm.load(tmp_path / "out") as file:
            return file["a.weight"].dequantize().tobytes()

    write(0)
    results = reading(tmp_path, write, read, 200)
    assert set(results) <= set(values)


def test_reader_of_shards_sees_no_mixture(writers, tmp_path):
    outputs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (writers["split over split"].old, writers["split over split"].new)[number](folder)
        outputs.append(contents(folder))

    def read() -> set[str]:
        with qgemm.open(tmp_path / "x-00001-of-00003.gguf") as file:
            return {str(tensor.format) for tensor in file.values()}

    put_files(tmp_path, outputs[0])
    results = reading(tmp_path, lambda number: put_files(tmp_path, outputs[number]), read, 300)
    assert all(result in ({"Q8_0"}, {"Q4_0"}) for result in results)


def test_shards_that_are_replaced_while_they_are_opened(writers, tmp_path, monkeypatch):
    """The first shard is the old one, the others would be new."""
    writer = writers["split over split"]
    writer.old(tmp_path)
    shard, opened = reader.Shard, []

    def late(path, **named):
        opened.append(path)
        if len(opened) == 2:
            writer.new(tmp_path)
        return shard(path, **named)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "Shard", late)
        with pytest.raises(GGUFError, match=r"x-00001-of-00003\.gguf: was replaced while it was opened: open it again"):
            qgemm.open(tmp_path / "x-00001-of-00003.gguf")
    writer.read(tmp_path)
