"""Files of a system without folders that are open, such as Windows: a folder's descriptor is a number for its path.

An entry is found by its path again at each call, so that another process which moves a folder can redirect a write:
only users who may write to the folder can. A file that is open is neither renamed nor removed. Its descriptor then
reads and writes nothing during the call, and the file again after it.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

try:
    import msvcrt
except ImportError:  # a system with locks of another kind, which are not used
    msvcrt = None  # type: ignore[assignment]

FAR = 1 << 62  # offset of the byte that is locked: a lock must not refuse reads of data
ABANDONED = 86400.0  # seconds after which a temporary folder counts as one of a dead writer
OPEN = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)


class PortableFiles:
    """As Files of files.py."""

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self._numbers = itertools.count(-2, -1)  # no file has these
        self._seeking = threading.Lock()  # a descriptor has one position

    def _path(self, name: str, folder: int | None) -> str:
        return name if folder is None else os.path.join(self._folders[folder], name)

    def open(self, name: str, flags: int, mode: int = 0o777, folder: int | None = None) -> int:
        path = self._path(name, folder)
        if os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(path, flags, mode)

    def open_folder(self, name: str, folder: int | None = None, follow: bool = False) -> int:
        path = os.path.abspath(self._path(name, folder))
        status = os.stat(path, follow_symlinks=follow)
        if not stat.S_ISDIR(status.st_mode):
            code = errno.ELOOP if stat.S_ISLNK(status.st_mode) else errno.ENOTDIR
            raise OSError(code, os.strerror(code))
        return self._number(path)

    def _number(self, path: str) -> int:
        number = next(self._numbers)
        self._folders[number] = path
        return number

    def close(self, fd: int) -> None:
        if self._folders.pop(fd, None) is None:
            os.close(fd)

    def dup(self, fd: int) -> int:
        return self._number(self._folders[fd]) if fd in self._folders else os.dup(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.stat(self._folders[fd]) if fd in self._folders else os.fstat(fd)

    def stat(self, name: str, folder: int | None) -> os.stat_result:
        return os.stat(self._path(name, folder), follow_symlinks=False)

    def names(self, folder: int) -> list[str]:
        return os.listdir(self._folders[folder])

    def access(self, name: str, mode: int, folder: int) -> bool:
        return os.access(self._path(name, folder), mode)

    def mkdir(self, name: str, mode: int, folder: int) -> None:
        os.mkdir(self._path(name, folder), mode)

    def rmdir(self, name: str, folder: int) -> None:
        os.rmdir(self._path(name, folder))

    def unlink(self, name: str, folder: int, fd: int | None = None) -> None:
        if fd is not None:
            self._release(fd)
        os.unlink(self._path(name, folder))

    def link(self, name: str, source: int, target: int, new_name: str) -> None:
        os.link(self._path(name, source), self._path(new_name, target))

    def rename(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        old, new = self._path(name, source), self._path(new_name, target)
        if fd is not None:
            self._release(fd)
        try:
            os.rename(old, new)
        except OSError:
            self._reopen(fd, old)
            raise
        self._reopen(fd, new)
        self._renamed(old, new)

    def replace(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        old, new = self._path(name, source), self._path(new_name, target)
        if fd is not None:
            self._release(fd)
        try:
            os.replace(old, new)
        except OSError:
            self._reopen(fd, old)
            raise
        self._reopen(fd, new)

    def rename_with_flags(self, name: str, source: int, target: int, new_name: str, flags: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _renamed(self, old: str, new: str) -> None:
        """Let the descriptors of a folder follow its new path."""
        for number, path in list(self._folders.items()):
            if path == old:
                self._folders[number] = new

    def _release(self, fd: int) -> None:
        """Close the file of a descriptor, whose number stays taken."""
        empty = os.open(os.devnull, os.O_RDWR)
        os.dup2(empty, fd, inheritable=False)
        os.close(empty)

    def _reopen(self, fd: int | None, path: str) -> None:
        """Open a file anew as the descriptor, with its lock."""
        if fd is None:
            return
        file = os.open(path, OPEN)
        os.dup2(file, fd, inheritable=False)
        os.close(file)
        self.lock(fd)

    def sync(self, fd: int) -> None:
        if fd not in self._folders:
            os.fsync(fd)

    def lock(self, fd: int) -> bool:
        locking = self._locking(fd)
        return locking is None or locking()

    def lock_stale(self, fd: int) -> bool:
        locking = self._locking(fd)
        return time.time() - self.fstat(fd).st_mtime > ABANDONED if locking is None else locking()

    def _locking(self, fd: int) -> Callable[[], bool] | None:
        """The function that locks a file; None for folders, and on a system without this kind of locks."""
        if fd in self._folders or msvcrt is None:
            return None

        def lock() -> bool:
            with self._seeking, suppress(OSError):
                os.lseek(fd, FAR, os.SEEK_SET)
                msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
                return True
            return False

        return lock

    def user(self) -> int:
        return 0  # Windows gives all files this owner

    def others_write(self, status: os.stat_result) -> bool:
        return False  # the mode does not tell

    def change_owner(self, fd: int, user: int, group: int) -> None:
        pass

    def change_mode(self, fd: int, mode: int) -> None:
        if fd in self._folders:
            os.chmod(self._folders[fd], mode)
        elif os.chmod in os.supports_fd:
            os.chmod(fd, mode)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, min(len(buffer), 1 << 30))
        buffer[: len(data)] = data
        return len(data)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        with self._seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.write(fd, data[: 1 << 30])

    def copy(self, source: int, start: int, target: int, offset: int, count: int) -> int:
        return 0

    def allocate(self, fd: int, size: int) -> None:
        pass

    def mount(self, folder: int) -> str:
        return str(self.fstat(folder).st_dev)

    def map_copied(self, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)

    def map_read_only(self, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
