"""An old file survives whatever happens to the converter: errors of the disk, kills, another converter."""

from __future__ import annotations

import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from files import model
from helpers import converted, forked, left_over, normal, views_of_streams

import qgemm
from qgemm.errors import GGUFAccessError
from qgemm.files.atomic import replacing


@pytest.fixture
def source(tmp_path) -> Path:
    return model(tmp_path / "source.gguf")


# ---------------------------------------------------------------- never lose data


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "npz"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_input_output_error(call, suffix, source, tmp_path, monkeypatch):
    target = tmp_path / f"y.{suffix}"
    target.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(GGUFAccessError, match=rf"y\.{suffix}: cannot be written: Input/output") as caught:
            converted(source, target, "f32")
    assert caught.value.errno == errno.EIO
    assert target.read_bytes() == b"old"
    assert left_over(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "npz"])
def test_disk_full(suffix, source, tmp_path):
    target = tmp_path / f"y.{suffix}"
    converted(source, target, "f16")
    before = target.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in [*range(0, len(before), len(before) // 20), len(before) - 1]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(GGUFAccessError, match=rf"y\.{suffix}: cannot be written: File too large") as caught:
                converted(source, target, "f16")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert target.read_bytes() == before
        assert left_over(tmp_path) == []
        assert views_of_streams() == []  # the error, which is still alive, holds all frames


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(source, tmp_path):
    (tmp_path / "sub").mkdir(0o555)
    with pytest.raises(GGUFAccessError, match="cannot be written: Permission denied"):
        converted(source, tmp_path / "sub" / "y.gguf", "q4_0")


def test_a_disk_that_lies(source, tmp_path, monkeypatch):
    """The bytes on the disk are compared with those that were written."""
    pwrite = os.pwrite

    def lie(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, bytes(data[:-1]) + bytes([data[-1] ^ 1]), offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lie)
        with pytest.raises(qgemm.QgemmError, match=r"'token_embd\.weight': the disk does not hold what was written"):
            converted(source, tmp_path / "y.gguf", "q4_0")
    assert sorted(os.listdir(tmp_path)) == ["source.gguf"]


FORMS = ("q4_0", "q8_0")


def outcomes(source, path) -> list[bytes]:
    """The files that converting into each of FORMS gives; the last is there."""
    results = []
    for fmt in FORMS:
        converted(source, path, fmt)
        results.append(path.read_bytes())
    return results


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """The old file or the new one, and what killed converters leave is gone after the next."""
    source, path = model(tmp_path / "x.gguf", {"x.weight": normal(64, 2048)}), tmp_path / "y.gguf"
    whole = outcomes(source, path)

    def work() -> None:
        while True:
            for fmt in FORMS:
                converted(source, path, fmt)

    for delay in np.random.default_rng(0).uniform(0, 0.03, 200):
        child = forked(work)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in whole
    converted(source, path, "q4_0")
    assert sorted(os.listdir(tmp_path)) == ["x.gguf", "y.gguf"]


@pytest.mark.slow
def test_two_converters_on_one_output(tmp_path):
    source, path = model(tmp_path / "x.gguf", {"x.weight": normal(64, 2048)}), tmp_path / "y.gguf"
    whole = outcomes(source, path)
    for _ in range(50):
        for child in [forked(lambda fmt=fmt: converted(source, path, fmt)) for fmt in FORMS]:
            os.waitpid(child, 0)
        assert path.read_bytes() in whole
    assert left_over(tmp_path) == []


def test_temporary_files_of_the_living_stay(source, tmp_path):
    """Another converter's file is locked; one that nobody holds is removed, whatever else is called alike is not."""
    stale = tmp_path / f".qgemm-{'0' * 16}.tmp"
    for name in (stale, tmp_path / ".qgemm-notes.tmp"):
        name.write_bytes(b"")
    with replacing(str(tmp_path / "other.gguf")) as living:
        assert not stale.exists()
        converted(source, tmp_path / "y.gguf", "q4_0")
        assert os.path.exists(living)
    assert (tmp_path / ".qgemm-notes.tmp").exists()


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """One tensor of 768 MiB: the process needs far less memory."""
    path = tmp_path / "x.gguf"
    model(path, {"x.weight": np.zeros((16, 256), np.float32)})
    data = bytearray(path.read_bytes())
    rows = 768 << 20 >> 10
    offset = data.index(struct.pack("<QQ", 256, 16))  # ne
    data[offset : offset + 16] = struct.pack("<QQ", 256, rows)
    path.write_bytes(data)
    os.truncate(path, len(data) + (rows - 16) * 1024)  # zeros that take no room on the disk
    program = f"""
import resource
from qgemm.converter import Options, open_source
from qgemm.converter.job import convert
from qgemm.formats import format_named
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open_source({str(path)!r}) as source:
    convert(source, {str(tmp_path / "y.gguf")!r}, Options(format_named("q8_0")))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 256 << 10  # KiB
