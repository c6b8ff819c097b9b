"""Writing over a file: links, modes, errors of the disk, kills, two writers."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from files import ones, written
from helpers import forked, views_of_streams

from qgemm import Tensor
from qgemm.errors import GGUFAccessError, GGUFError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.gguf.writer import write
from qgemm.formats import GGML_TYPES


def left_over(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".qgemm-")]


# ---------------------------------------------------------------- replacing a file, or leaving it alone


@pytest.fixture
def old(tmp_path) -> Path:
    """A file that is to be replaced."""
    return written(tmp_path / "model.gguf", ones(1))


def test_link_stays_a_link(old, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(old.name)
    write(link, ones(2))
    assert link.is_symlink()
    with open_gguf(old) as file:
        assert file["w"].blocks[0, 0] == 2
    dangling = tmp_path / "dangling.gguf"
    dangling.symlink_to("new.gguf")
    write(dangling, ones(3))
    assert (tmp_path / "new.gguf").is_file()


@pytest.mark.parametrize("how", ["path", "symbolic link", "hard link"])
def test_onto_its_own_input(how, old, tmp_path):
    """The open input keeps its bytes; a hard link to it keeps the old file."""
    target = old if how == "path" else tmp_path / "other.gguf"
    if how == "symbolic link":
        target.symlink_to(old)
    elif how == "hard link":
        target.hardlink_to(old)
    with open_gguf(old) as file:
        held = file["w"].blocks
        write(target, {**file, "more": np.zeros((1, 8), np.float32)}, file.metadata)
        assert (held == 1).all()
        assert (file["w"].blocks == 1).all()
    with open_gguf(target) as file:
        assert list(file) == ["w", "more"]
        assert (file["w"].blocks == 1).all()
    with open_gguf(old) as file:
        assert len(file) == (1 if how == "hard link" else 2)
    assert left_over(tmp_path) == []


def test_modes(old, tmp_path):
    """Permissions are those of the replaced file, else the default by the umask."""
    old.chmod(0o640)
    umask = os.umask(0o027)
    try:
        write(old, ones(2))
        write(tmp_path / "new.gguf", ones(2))
    finally:
        os.umask(umask)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "new.gguf").stat().st_mode) == 0o640
    old.chmod(0o604)
    write(old, ones(3))
    assert stat.S_IMODE(old.stat().st_mode) == 0o604


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_input_output_error(call, old, tmp_path, monkeypatch):
    before = old.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(GGUFAccessError, match=r"model\.gguf: cannot be written: Input/output error") as caught:
            write(old, ones(2))
    assert caught.value.errno == errno.EIO
    assert isinstance(caught.value, GGUFError)
    assert old.read_bytes() == before
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, GGUFError("other.gguf: changed")], ids=repr)
def test_interrupted_by_its_input(error, old, tmp_path):
    before = old.read_bytes()

    def blocks() -> np.ndarray:
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        write(old, {**ones(2), "last": Tensor(GGML_TYPES[0], (2, 4), blocks)})
    if isinstance(error, GGUFError):
        assert str(caught.value) == f"{old}: tensor 'last': other.gguf: changed"
    assert old.read_bytes() == before
    assert left_over(tmp_path) == []


def test_disk_full(old, tmp_path):
    """At any byte, the header's, the data's or the last padding's, the write fails and the old file stays."""
    before = old.read_bytes()
    tensors = {f"t{i}": np.zeros((16, 63), np.float32) for i in range(5)}
    size = written(tmp_path / "whole.gguf", tensors, {"k": "v" * 1000}).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in [*range(0, size, size // 20), size - 1]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(GGUFAccessError, match=r"model\.gguf: cannot be written: File too large") as caught:
                write(old, tensors, {"k": "v" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert old.read_bytes() == before
        assert left_over(tmp_path) == []
        assert views_of_streams() == []  # the error, which is still alive, holds all frames


def test_targets_that_cannot_be_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for target in (tmp_path, tmp_path / "fifo", "/dev/null"):
        with pytest.raises(GGUFError, match="is not a regular file"):
            write(target, ones())
    for target in (tmp_path / "loop", tmp_path / "none" / "x.gguf", tmp_path / ("n" * 300)):
        with pytest.raises(GGUFAccessError, match="cannot be written: "):
            write(target, ones())
    with pytest.raises(GGUFError, match="no file can have this name"):
        write("a\0b", ones())
    assert left_over(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(old, tmp_path):
    """Before any work: the blocks are not even asked for."""
    tensor = Tensor(GGML_TYPES[0], (2, 4), lambda: pytest.fail("asked for blocks"))
    old.chmod(0o444)
    with pytest.raises(GGUFAccessError, match="cannot be written: Permission denied"):
        write(old, {"w": tensor})
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(GGUFAccessError, match="cannot be written: Permission denied"):
            write(tmp_path / "new.gguf", {"w": tensor})
    finally:
        tmp_path.chmod(0o755)


def test_file_name_of_any_bytes(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\n.gguf"
    write(path, ones(4))
    with open_gguf(path) as file:
        assert file["w"].blocks[0, 0] == 4


def test_killed_while_writing(tmp_path):
    """At any moment there is one of the two complete files."""
    path = tmp_path / "model.gguf"
    whole = [written(path, ones(value, (64, 4096))).read_bytes() for value in (1, 2)]

    def work() -> None:
        while True:
            for value in (1, 2):
                write(path, ones(value, (64, 4096)))

    for delay in np.random.default_rng(0).uniform(0, 0.05, 20):
        child = forked(work)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in whole


def test_two_writers(tmp_path):
    path = tmp_path / "model.gguf"
    whole = [written(path, ones(value, (64, 4096))).read_bytes() for value in (1, 2)]
    for _ in range(10):
        children = [forked(lambda v=value: write(path, ones(v, (64, 4096)))) for value in (1, 2)]
        for child in children:
            os.waitpid(child, 0)
        assert path.read_bytes() in whole
    assert left_over(tmp_path) == []
