"""Files that are replaced by a journal: killed processes, and systems without the exchange of folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time

import numpy as np
import pytest
from files import model
from helpers import left_over
from replaced import HEAD, NEW, OLD, contents, killed, one_error, put, put_files

import qgemm
from qgemm.errors import GGUFAccessError, GGUFError, QgemmError
from qgemm.files import folders, journal, temporary
from qgemm.system import posix

pytest_plugins = ["replaced_folders"]  # its fixtures old and writers


@pytest.mark.parametrize("moves", range(1, 7))
def test_killed_replacement_is_refused_by_a_sentence_and_finished(moves, writers, tmp_path):
    """By the next process that writes to the folder, whatever it writes."""
    writer = writers["split over split"]
    writer.old(tmp_path)
    before = contents(tmp_path)
    killed(lambda: writer.new(tmp_path), moves)
    for part in (False, True):
        with pytest.raises(GGUFError) as caught:
            qgemm.open(tmp_path / "x-00001-of-00003.gguf", part=part)
        message = "x-00001-of-00003.gguf: is being replaced together with other files; if that process was killed, "
        assert message in str(caught.value)
    with pytest.raises(GGUFError, match="is being replaced"):
        qgemm.load(tmp_path / "x-00001-of-00003.gguf")
    qgemm.write(tmp_path / "another.gguf", {"w": np.ones((2, 8), np.float32)})
    assert left_over(tmp_path) == []
    (tmp_path / "another.gguf").unlink()
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    writer.read(tmp_path)


def test_killed_replacement_of_a_folder_is_refused(tmp_path, monkeypatch):
    model(tmp_path / "m.gguf")
    qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    (tmp_path / "out" / "figures").mkdir()  # replaced in place

    def convert() -> None:
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u8_g32", layout="gptq", force=True)

    killed(convert, 3)
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        with pytest.raises(QgemmError, match=r"config\.json: is being replaced together with other files"):
            qgemm.load(path)
    with pytest.raises(QgemmError, match="exists; it is replaced only by force"):  # finished, and there
        qgemm.convert(tmp_path / "m.gguf", tmp_path / "out", "u4_g32", layout="gptq")
    with qgemm.load(tmp_path / "out") as file:
        assert file["blk.0.attn_q.weight"].format.name == "u8_g32"
    assert left_over(tmp_path / "out") == []


def test_replacement_that_cannot_be_finished_is_undone(tmp_path, monkeypatch):
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    fails = [journal.move]

    def once(*arguments) -> None:
        if fails:
            fails.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        temporary.move(*arguments)

    monkeypatch.setattr(journal, "move", once)
    journal.finish_pending(os.open(tmp_path, os.O_RDONLY), "x")
    assert contents(tmp_path) == OLD
    assert left_over(tmp_path) == []


UNTRUSTED = {
    "text": "it is no journal", "other folders": "it names files of other folders",
    "no folder": "No such file or directory", "another user's": "it belongs to another user",
    "a newer file": ".* was written meanwhile",
}  # fmt: skip


@pytest.mark.parametrize("spoiled", UNTRUSTED)
def test_journal_that_cannot_be_trusted_stays(spoiled, tmp_path):
    """No file moves by it, and the message says what to do."""
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    path = tmp_path / journal.NAME
    fields = json.loads(path.read_text())
    if spoiled == "text":
        path.write_text("{}")
    elif spoiled == "other folders":
        path.write_text(json.dumps({**fields, "names": ["../x"]}))
    elif spoiled == "no folder":
        path.write_text(json.dumps({**fields, "old": "missing"}))
    elif spoiled == "another user's":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, 1234, 1234)
    else:
        (tmp_path / HEAD).write_bytes(b"by the user")
    before = contents(tmp_path)
    why = rf"\.qgemm-journal beside it describes a replacement that cannot be finished \({UNTRUSTED[spoiled]}\)"
    with pytest.raises(GGUFError, match=why):
        put_files(tmp_path, {name: b"newer" for name in OLD})
    assert contents(tmp_path) == before
    path.unlink()
    put_files(tmp_path, {name: b"newer" for name in OLD})
    assert contents(tmp_path) == {name: b"newer" for name in OLD}
    assert left_over(tmp_path) == []


def test_replacement_of_another_process_is_waited_for(tmp_path, monkeypatch):
    """Not forever: anyone who may read the journal can lock it."""
    put_files(tmp_path, OLD)
    killed(lambda: put_files(tmp_path, {name: b"new" for name in OLD}), 5)
    fd = os.open(tmp_path / journal.NAME, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    files = {name: b"newer" for name in OLD}
    with pytest.raises(GGUFAccessError, match=r"another process replaces files of this folder"):
        put_files(tmp_path, files)
    assert len(pauses) == journal.PAUSES
    os.close(fd)
    put_files(tmp_path, files)
    assert contents(tmp_path) == files
    assert left_over(tmp_path) == []


# ---------------------------------------------------------------- systems that lack something


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_without_exchange(error, old, tmp_path, monkeypatch):
    """The files are replaced in place, by a journal."""
    one_error(monkeypatch, folders, "exchange", 0, error)
    (old / "README.md").write_text("mine")
    put(old, NEW)
    assert contents(old) == {**NEW, "README.md": b"mine"}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_renameat2(old, tmp_path, monkeypatch):
    """As on macOS."""
    monkeypatch.setattr(posix, "_renameat2", lambda: None)
    put(old, NEW)
    assert contents(old) == NEW
    put(tmp_path / "new", NEW, replace=False)
    assert contents(tmp_path / "new") == NEW
    put_files(tmp_path, OLD, replace=False)
    with pytest.raises(QgemmError, match="exists; "):
        put_files(tmp_path, NEW, replace=False)
    put_files(tmp_path, NEW)
    assert contents(tmp_path) == {**OLD, **NEW}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_hard_links(old, tmp_path, monkeypatch):
    (old / "README.md").write_text("mine")
    one_error(monkeypatch, os, "link", 0, errno.EPERM)
    put(old, NEW)
    assert contents(old) == {**NEW, "README.md": b"mine"}
    assert left_over(tmp_path) == left_over(old) == []


def test_without_locks(old, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    put(old, NEW)
    put_files(tmp_path, NEW)
    assert contents(old) == contents(tmp_path) == NEW
    assert left_over(tmp_path) == left_over(old) == []
