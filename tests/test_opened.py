"""A file while it is read: any change to it is noticed, however small, late or fast."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf_bytes import ARRAY, BOOL, array, file_of, key, refused, saved

from qgemm.errors import GGUFError
from qgemm.files.paths import RegularFile


@pytest.fixture
def path(tmp_path) -> Path:
    return saved(tmp_path / "x", bytes(100))


@pytest.mark.parametrize("ns", [1, -1, 1000, 10**6, 10**9])
def test_change_of_the_same_size(ns, path):
    """The time of the last change counts to the nanosecond: a program that writes again within a second is common."""
    before = path.stat().st_mtime_ns // 10**9 * 10**9 + 500_000_000  # most of the changed times are in the same second
    os.utime(path, ns=(before, before))
    file = RegularFile(str(path))
    file.check()
    os.utime(path, ns=(before, before + ns))
    for look in (file.check, lambda: file.read(0, 1), lambda: file.read_rows(0, 10, 2, 5)):
        with pytest.raises(GGUFError, match=r"x: changed since it was opened$"):
            look()
    os.utime(path, ns=(before, before))
    file.check()
    file.close()


@pytest.mark.parametrize("size", [99, 101])
def test_change_of_the_size_alone(size, path):
    """Whoever sets the time back does not get by."""
    file = RegularFile(str(path))
    status = path.stat()
    os.truncate(path, size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(GGUFError, match=r"x: changed since it was opened$"):
        file.check()
    file.close()


def test_open_file_without_a_name(path):
    """It is read by its descriptor, whatever file has its name by then."""
    fd = os.open(path, os.O_RDONLY)
    path.unlink()
    saved(path, b"another")
    file = RegularFile("x", fd=fd)
    os.close(fd)
    assert file.read(0, 100).tobytes() == bytes(100)
    file.close()


PIECE = 1 << 16  # bools that are checked at a time


@pytest.mark.parametrize("offset", [0, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 99])
def test_every_bool_of_a_long_array_is_checked(offset, tmp_path):
    bools = bytearray(2 * PIECE + 100)
    bools[offset] = 2
    bad = file_of([key(b"k", ARRAY, array(BOOL, len(bools), bytes(bools)))])
    assert refused(saved(tmp_path / "x.gguf", bad)) == "key 'k': a bool must be 0 or 1, is 2"
