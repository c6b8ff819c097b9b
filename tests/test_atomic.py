"""Replacing a file: by its descriptor alone, on file systems that lack something, beside others who mean harm."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from files import model, ones, written
from helpers import converted, left_over

from qgemm import Tensor
from qgemm.errors import GGUFAccessError, GGUFError
from qgemm.files import atomic
from qgemm.files.atomic import replacing, write_file
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.gguf.writer import write
from qgemm.formats import GGML_TYPES


@pytest.fixture
def old(tmp_path) -> Path:
    """A file that is to be replaced."""
    return written(tmp_path / "model.gguf", ones(1))


def failing(error: int, only=lambda *_: True, real=None):
    """A call of the system that fails."""

    def call(*words: object, **named: object) -> object:
        if not only(*words):
            return real(*words, **named)
        raise OSError(error, os.strerror(error))

    return call


def temporary(folder: Path) -> Path:
    """The one unfinished file in a folder."""
    (name,) = left_over(folder)
    return folder / name


def first_value(path: Path) -> float:
    with open_gguf(path) as file:
        return float(file["w"].blocks[0, 0])


# ---------------------------------------------------------------- systems that lack something


@pytest.mark.parametrize("error", [errno.EBADF, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_without_fallocate(error, tmp_path, monkeypatch):
    """As on ramfs, NFS before 4.2, FUSE and exFAT: the C library's own way reads, and may not."""
    source = model(tmp_path / "source.gguf")
    monkeypatch.setattr(os, "posix_fallocate", failing(error))
    write(tmp_path / "x.gguf", ones(2))
    assert first_value(tmp_path / "x.gguf") == 2
    for suffix in ("gguf", "safetensors", "npz"):
        converted(source, tmp_path / f"y.{suffix}", "f16")


def test_the_descriptor_may_be_read(tmp_path):
    """The C library's emulation of fallocate reads the file."""
    with replacing(str(tmp_path / "x")) as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_says_so_before_any_work(error, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(error))
    tensor = Tensor(GGML_TYPES[0], (2, 4), lambda: pytest.fail("asked for blocks"))
    with pytest.raises(GGUFAccessError, match=r"x\.gguf: cannot be written: ") as caught:
        write(tmp_path / "x.gguf", {"w": tensor})
    assert caught.value.errno == error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_modes(error, old, monkeypatch):
    """The new file is private then, never more open than the old one."""
    old.chmod(0o644)
    monkeypatch.setattr(os, "fchmod", failing(error))
    write(old, ones(2))
    assert first_value(old) == 2
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_without_locks(old, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    write(old, ones(2))
    assert first_value(old) == 2
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links(error, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(error))
    with replacing(str(tmp_path / "x"), replace=False) as fd:
        os.write(fd, b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    with pytest.raises(GGUFError, match=r"y: exists; "), replacing(str(tmp_path / "y"), replace=False):
        (tmp_path / "y").write_bytes(b"of another")
    assert (tmp_path / "y").read_bytes() == b"of another"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("limit", [1, 7, 4096])
def test_short_writes(limit, tmp_path, monkeypatch):
    """The system may write less than it is given, as it does before a signal or beyond 2 GiB."""
    source = model(tmp_path / "source.gguf")
    want = written(tmp_path / "whole.gguf", ones(3, (30, 100))).read_bytes()
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:limit], offset))
    assert written(tmp_path / "x.gguf", ones(3, (30, 100))).read_bytes() == want
    if limit > 1:  # as many calls as bytes
        converted(source, tmp_path / "y.gguf", "q4_0")
        converted(source, tmp_path / "y.safetensors", "f16")


# ---------------------------------------------------------------- what reaches the disk, and when


def test_the_file_then_its_name_then_the_folder(old, tmp_path, monkeypatch):
    """Each is on the disk before the next depends on it."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        status = os.fstat(fd)
        calls.append("folder" if (status.st_dev, status.st_ino) == inode(tmp_path) else "file")
        fsync(fd)

    def replaced(*words: object, **named: object) -> None:
        calls.append("name")
        replace(*words, **named)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write(old, ones(2))
    assert calls == ["file", "name", "folder"]


def inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def test_a_folder_that_cannot_be_synced(old, monkeypatch):
    """The message says which file is there; a file system that syncs no folders is no failure."""
    real = os.fsync
    for error in (errno.EIO, errno.ENOSPC):
        monkeypatch.setattr(os, "fsync", failing(error, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), real))
        with pytest.raises(GGUFAccessError) as caught:
            write(old, ones(error))
        why = os.strerror(error)
        assert str(caught.value) == f"{old}: was replaced, but its folder cannot be synced to the disk: {why}"
        assert caught.value.errno == error
        assert first_value(old) == error
    for error in (errno.EINVAL, errno.EOPNOTSUPP):
        monkeypatch.setattr(os, "fsync", failing(error, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), real))
        write(old, ones(error))
        assert first_value(old) == error


@pytest.mark.parametrize("call", ["fsync", "replace", "pwrite", "posix_fallocate", "ftruncate", "open"])
def test_errors_name_what_is_written(call, old, tmp_path, monkeypatch):
    """Not the temporary file, which is gone when the message is read."""
    failed = OSError(errno.EIO, "Input/output error", f"{tmp_path}/.qgemm-0.tmp")

    def fail(*words: object, **named: object) -> None:
        raise failed

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(GGUFAccessError) as caught:
            write(old, ones(2))
    assert str(caught.value) == f"{old}: cannot be written: Input/output error"


# ---------------------------------------------------------------- whoever else may write to the folder


def during(body) -> dict[str, Tensor]:
    """Tensors for `write`, which does something else while the temporary file is there."""

    def blocks() -> np.ndarray:
        body()
        return np.full((2, 8), 2, np.float32)

    return {"w": Tensor(GGML_TYPES[0], (2, 8), blocks)}


@pytest.mark.parametrize("swapped", ["link", "file", "nothing", "folder"])
def test_temporary_file_is_swapped(swapped, old, tmp_path):
    """The owner of the folder can hinder the write. He cannot have another file written to, published or put in its
    place, nor removed."""
    secret = tmp_path / "elsewhere" / "secret"
    secret.parent.mkdir()
    secret.write_bytes(b"secret")
    secret.chmod(0o600)
    before = old.read_bytes()
    names = []

    def swap() -> None:
        name = temporary(tmp_path)
        names.append(name)
        name.unlink()
        if swapped == "link":
            name.symlink_to(secret)
        elif swapped == "file":
            name.write_bytes(b"of the owner")
        elif swapped == "folder":
            name.mkdir()

    with pytest.raises(GGUFError, match=r"model\.gguf: cannot be written: someone removed or replaced"):
        write(old, during(swap))
    assert (secret.read_bytes(), stat.S_IMODE(secret.stat().st_mode)) == (b"secret", 0o600)
    assert old.read_bytes() == before
    assert os.path.lexists(names[0]) == (swapped != "nothing")


def test_folder_is_swapped(tmp_path):
    """The file goes to the folder that was opened first, not to the one that has its name by then."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "x.gguf").write_bytes(b"mine")

    def swap() -> None:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(other)

    write(folder / "x.gguf", during(swap))
    assert first_value(tmp_path / "moved" / "x.gguf") == 2
    assert os.listdir(other) == ["x.gguf"]
    assert (other / "x.gguf").read_bytes() == b"mine"


@pytest.fixture
def locked_first(monkeypatch):
    """A process that locks the first `count` unfinished files of others -> the descriptors of these."""
    real_open, real_lock = os.open, fcntl.flock
    locks: list[int] = []

    def with_count(count: int) -> list[int]:
        def open_and_lock(path, flags, *rest, **named):
            fd = real_open(path, flags, *rest, **named)
            if flags & os.O_CREAT and len(locks) < count:
                other = real_open(path, os.O_RDONLY, **named)
                real_lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks.append(other)
            return fd

        def flock(fd: int, how: int) -> None:
            assert how & fcntl.LOCK_NB, "a lock that waits can wait forever"
            real_lock(fd, how)

        monkeypatch.setattr(os, "open", open_and_lock)
        monkeypatch.setattr(fcntl, "flock", flock)
        return locks

    yield with_count
    for fd in locks:
        os.close(fd)


def test_locked_by_another(locked_first, tmp_path):
    """The writer does not wait: it takes another name, and after many of them gives up."""
    locks = locked_first(3)
    write(tmp_path / "x.gguf", ones(2))
    assert len(locks) == 3
    assert os.listdir(tmp_path) == ["x.gguf"]
    locked_first(1000)
    with pytest.raises(GGUFAccessError, match="others take its unfinished files away"):
        write(tmp_path / "y.gguf", ones(2))
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_unfinished_files_that_are_none(tmp_path):
    """What only has the name of a killed writer's file is not waited for, followed or removed."""
    os.mkfifo(tmp_path / f".qgemm-{'0' * 16}.tmp")
    (tmp_path / f".qgemm-{'1' * 16}.tmp").mkdir()
    (tmp_path / f".qgemm-{'2' * 16}.tmp").symlink_to("kept")
    (tmp_path / "kept").write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    write(tmp_path / "x.gguf", ones())
    assert sorted(os.listdir(tmp_path)) == [*before, "x.gguf"]


# ---------------------------------------------------------------- mode, owner and group


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_group_are_kept(old):
    os.chown(old, 1234, 2345)
    old.chmod(0o640)
    write(old, ones(2))
    status = old.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 2345, 0o640)


@pytest.mark.parametrize(
    ("mode", "left"), [(0o640, 0o600), (0o644, 0o644), (0o660, 0o600), (0o664, 0o644), (0o604, 0o604), (0o666, 0o666)]
)
def test_a_group_that_cannot_be_kept(mode, left, tmp_path, monkeypatch):
    """The writer's own group gets no more than everyone: it need not be the one that was trusted."""
    monkeypatch.setattr(os, "fchown", failing(errno.EPERM))
    with open(tmp_path / "x", "wb") as file:
        status = os.fstat(file.fileno())
        words = list(status)
        words[stat.ST_MODE], words[stat.ST_UID], words[stat.ST_GID] = mode, status.st_uid + 1, status.st_gid + 1
        atomic.inherit(file.fileno(), os.stat_result(words))
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == left


def test_private_from_the_first_byte(old, tmp_path):
    """The unfinished file is never more open than the file it replaces."""
    old.chmod(0o600)
    modes = []
    umask = os.umask(0)
    try:
        write(old, during(lambda: modes.append(stat.S_IMODE(temporary(tmp_path).stat().st_mode))))
    finally:
        os.umask(umask)
    assert modes == [0o600]
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_programs_stay_programs_but_gain_nothing(old):
    """Set-uid bits were meant for the old bytes."""
    old.chmod(0o4755)
    write_file(old, b"new")
    assert stat.S_IMODE(old.stat().st_mode) == 0o755


# ---------------------------------------------------------------- not replacing


@pytest.mark.parametrize("when", ["before", "during"])
def test_what_is_there_stays(when, tmp_path):
    """Also what comes while the new file is written."""
    path = tmp_path / "x"

    def another() -> None:
        path.write_bytes(b"of another")

    def new() -> None:
        with replacing(str(path), replace=False):
            assert when == "during"
            another()

    if when == "before":
        another()
    with pytest.raises(GGUFError) as caught:
        new()
    assert str(caught.value) == f"{path}: exists; it is replaced only by force (--force, force=True)"
    assert path.read_bytes() == b"of another"
    assert os.listdir(tmp_path) == ["x"]


def test_new_file_where_nothing_was(tmp_path):
    with replacing(str(tmp_path / "x"), replace=False) as fd:
        os.write(fd, b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").stat().st_nlink == 1
