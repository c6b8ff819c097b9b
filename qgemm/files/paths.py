"""Open files by path: any spelling of a path, typed errors, and a check that files do not change while being read."""

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
from qgemm.system import READ, system

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def path_string(path: PathLike) -> str:
    """A path of any bytes as str; TypeError for other objects, GGUFError for a name that no file can have."""
    name = os.fsdecode(path)
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise GGUFError(f"{shown_path(name)}: no file can have this name")
    return name


def shown(text: str | bytes) -> str:
    """Text as printable ASCII of bounded length, since text from files may hold escape sequences."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return ascii(text[:80]) + "..." * (len(text) > 80)


def shown_path(path: str) -> str:
    """A path for the start of a message: whole, in printable ASCII, without quotes."""
    return ascii(path)[1:-1]


@contextmanager
def system_errors(path: str, action: str) -> Iterator[None]:
    """Turn the body's OSError into a typed error that names the file, the action (a participle) and the reason."""
    try:
        yield
    except GGUFError:
        raise
    except OSError as error:
        missing = action == "read" and error.errno == errno.ENOENT
        kind = GGUFNotFoundError if missing else GGUFAccessError
        typed = kind(f"{shown_path(path)}: cannot be {action}: {error.strerror or error}")
        typed.errno = error.errno
        raise typed from error


class RegularFile:
    """A regular file open for reading. Every read verifies that it has not changed."""

    def __init__(self, path: str, error: type[QgemmError] = GGUFError, fd: int | None = None) -> None:
        """error: raised for anything but a non-empty regular file. fd: the descriptor of an already open file."""
        self.path, self._error = path, error
        with ExitStack() as undo, system_errors(path, "read"):
            self.fd = os.open(path, READ) if fd is None else os.dup(fd)
            undo.callback(os.close, self.fd)
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{shown_path(path)}: is not a regular file")
            if status.st_size == 0:
                raise error(f"{shown_path(path)}: is empty")
            undo.pop_all()
        self.size = status.st_size
        self.stamp = status.st_size, status.st_mtime_ns
        self._close = weakref.finalize(self, os.close, self.fd)  # closes a file that nobody closed

    def check(self) -> None:
        """Raise if the file was closed or changed."""
        self._check_open()
        try:  # a context manager would cost twice the time of all else, for each product by weights of a file
            status = os.fstat(self.fd)
        except OSError:
            with system_errors(self.path, "read"):
                raise
        if (status.st_size, status.st_mtime_ns) != self.stamp:
            raise self._error(f"{shown_path(self.path)}: changed since it was opened")

    def check_named(self) -> None:
        """Raise if the path leads to another file by now."""
        with system_errors(self.path, "read"):
            named = os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        if not named:
            raise self._error(f"{shown_path(self.path)}: was replaced while it was opened: open it again")

    def _check_open(self) -> None:
        if not self._close.alive:
            raise self._error(f"{shown_path(self.path)}: was closed: what is in a file is read while it is open")

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Read `size` bytes from an offset; the caller ensures that they lie inside the file."""
        self._check_open()  # its descriptor may be another file's by now
        data = np.empty(size, np.uint8)
        left = data.data
        with system_errors(self.path, "read"):
            while left and (count := system.read_into(self.fd, left, offset + size - len(left))):
                left = left[count:]
        self.check()
        if left:
            raise self._error(f"{shown_path(self.path)}: changed since it was opened")
        return data

    def read_rows(self, offset: int, stride: int, rows: int, size: int) -> NDArray[np.uint8]:
        """The first `size` bytes of each row, for rows `stride` bytes apart."""
        if size == stride:
            return self.read(offset, rows * size)
        self._check_open()
        data = np.empty((rows, size), np.uint8)
        with system_errors(self.path, "read"):
            for row in range(rows):
                if system.read_into(self.fd, data[row].data, offset + row * stride) != size:
                    raise self._error(f"{shown_path(self.path)}: changed since it was opened")
        self.check()
        return data

    def close(self) -> None:
        """Close the file."""
        self._close()
