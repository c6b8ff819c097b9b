"""Files by their paths: of any spelling, refused with one typed error, unchanged while they are read."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import GGUFAccessError, GGUFError, GGUFNotFoundError, QgemmError

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# O_NONBLOCK: opening a FIFO must not wait for its writer. O_NOCTTY: a terminal must not become ours.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def path_string(path: PathLike) -> str:
    """A path of any bytes as str; TypeError for what is no path, GGUFError for what no file can be called."""
    name = os.fsdecode(path)
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise GGUFError(f"{shown_path(name)}: no file can have this name")
    return name


def shown(text: str | bytes) -> str:
    """Any text as printable ASCII of bounded length: what comes from a file may hold escape sequences."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return ascii(text[:80]) + "..." * (len(text) > 80)


def shown_path(path: str) -> str:
    """A path as it starts a message: whole, in printable ASCII, without quotes."""
    return ascii(path)[1:-1]


@contextmanager
def system_errors(path: str, what: str) -> Iterator[None]:
    """Turn the body's OSError into a typed one that names the file, what was done to it, and the reason."""
    try:
        yield
    except GGUFError:
        raise
    except OSError as error:
        missing = what == "read" and error.errno == errno.ENOENT
        kind = GGUFNotFoundError if missing else GGUFAccessError
        found = kind(f"{shown_path(path)}: cannot be {what}: {error.strerror or error}")
        found.errno = error.errno
        raise found from error


class Opened:
    """A regular file open for reading. It must not change: each look at its bytes makes sure that it has not."""

    def __init__(self, path: str, error: type[QgemmError] = GGUFError, fd: int | None = None) -> None:
        """`error` is raised for what is not a file of bytes; fd: of a file that is open already, whatever its name."""
        self.path, self._error = path, error
        with ExitStack() as undo, system_errors(path, "read"):
            self.fd = os.open(path, READ) if fd is None else os.dup(fd)
            undo.callback(os.close, self.fd)
            found = os.fstat(self.fd)
            if not stat.S_ISREG(found.st_mode):
                raise error(f"{shown_path(path)}: is not a regular file")
            if found.st_size == 0:
                raise error(f"{shown_path(path)}: is empty")
            undo.pop_all()
        self.size = found.st_size
        self.stamp = found.st_size, found.st_mtime_ns
        self._close = weakref.finalize(self, os.close, self.fd)  # also for a file that nobody closes

    def check(self) -> None:
        """Raise if the file was closed or changed."""
        self._check_open()
        with system_errors(self.path, "read"):
            found = os.fstat(self.fd)
        if (found.st_size, found.st_mtime_ns) != self.stamp:
            raise self._error(f"{shown_path(self.path)}: changed since it was opened")

    def _check_open(self) -> None:
        if not self._close.alive:
            raise self._error(f"{shown_path(self.path)}: was closed: what is in a file is read while it is open")

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """So many bytes from there, which the caller knows to be inside the file."""
        self._check_open()  # its descriptor may be another file's by now
        data = np.empty(size, np.uint8)
        left = data.data
        with system_errors(self.path, "read"):
            while left and (count := _read_into(self.fd, left, offset + size - len(left))):
                left = left[count:]
        self.check()
        if left:
            raise self._error(f"{shown_path(self.path)}: changed since it was opened")
        return data

    def read_rows(self, offset: int, stride: int, rows: int, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes of each of many rows that lie `stride` bytes apart."""
        if size == stride:
            return self.read(offset, rows * size)
        self._check_open()
        data = np.empty((rows, size), np.uint8)
        with system_errors(self.path, "read"):
            for row in range(rows):
                if _read_into(self.fd, data[row].data, offset + row * stride) != size:
                    raise self._error(f"{shown_path(self.path)}: changed since it was opened")
        self.check()
        return data

    def close(self) -> None:
        """Let go of the file."""
        self._close()


def _read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Read what fits at an offset; returns how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    found = os.pread(fd, len(buffer), offset)  # macOS
    buffer[: len(found)] = found
    return len(found)
