"""Files of a POSIX system: a folder has a descriptor, by which its entries are opened, renamed and removed."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import mmap
import os
import stat
import sys
from contextlib import suppress
from functools import cache
from typing import Any

NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# Without this flag Linux refuses a writable mapping of a file larger than its memory. Python names it since 3.13;
# 0x4000 is its value on x86 and ARM, and a bit without effect on other machines.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
NAMES = "O_NOFOLLOW", "O_DIRECTORY", "geteuid", "fchown", "fchmod", "pread", "pwrite"
OF_FOLDERS = "open", "stat", "access", "mkdir", "rmdir", "unlink", "link", "rename"

NO_COPY = errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY


def is_complete() -> bool:
    """Whether Python has all these calls here."""
    supported = [getattr(os, name, None) in os.supports_dir_fd for name in OF_FOLDERS]
    has_locks = importlib.util.find_spec("fcntl") is not None
    return has_locks and all(supported) and all(hasattr(os, name) for name in NAMES)


class PosixFiles:
    """As Files of files.py."""

    def open(self, name: str, flags: int, mode: int = 0o777, folder: int | None = None) -> int:
        return os.open(name, flags | NOT_FOLLOWED, mode, dir_fd=folder)

    def open_folder(self, name: str, folder: int | None = None, follow: bool = False) -> int:
        return os.open(name, FOLDER | (0 if follow else NOT_FOLLOWED), dir_fd=folder)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, name: str, folder: int | None) -> os.stat_result:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def names(self, folder: int) -> list[str]:
        return os.listdir(folder)

    def access(self, name: str, mode: int, folder: int) -> bool:
        return os.access(name, mode, dir_fd=folder)

    def mkdir(self, name: str, mode: int, folder: int) -> None:
        os.mkdir(name, mode, dir_fd=folder)

    def rmdir(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def unlink(self, name: str, folder: int, fd: int | None = None) -> None:
        os.unlink(name, dir_fd=folder)

    def link(self, name: str, source: int, target: int, new_name: str) -> None:
        os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

    def rename(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def replace(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        os.replace(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def rename_with_flags(self, name: str, source: int, target: int, new_name: str, flags: int) -> None:
        renameat2 = _renameat2()
        if renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if renameat2(source, os.fsencode(name), target, os.fsencode(new_name), flags):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        try:
            self._lock(fd)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def lock_stale(self, fd: int) -> bool:
        try:
            self._lock(fd)
        except OSError:
            return False
        return True

    def _lock(self, fd: int) -> None:
        import fcntl  # absent on Windows

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def user(self) -> int:
        return os.geteuid()

    def others_write(self, status: os.stat_result) -> bool:
        return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))

    def change_owner(self, fd: int, user: int, group: int) -> None:
        os.fchown(fd, user, group)

    def change_mode(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [buffer], offset)
        data = os.pread(fd, len(buffer), offset)  # macOS before 11
        buffer[: len(data)] = data
        return len(data)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def copy(self, source: int, start: int, target: int, offset: int, count: int) -> int:
        if not hasattr(os, "copy_file_range"):  # Linux alone has it
            return 0
        try:
            return os.copy_file_range(source, target, count, start, offset)
        except OSError as error:
            if error.errno in NO_COPY:
                return 0
            raise

    def allocate(self, fd: int, size: int) -> None:
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(fd, 0, size)

    def mount(self, folder: int) -> str:
        """The number of the mount on Linux, the device elsewhere."""
        with suppress(OSError), open(f"/proc/self/fdinfo/{folder}") as file:
            return next(line for line in file if line.startswith("mnt_id"))
        return str(os.fstat(folder).st_dev)

    def map_copied(self, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)

    def map_read_only(self, fd: int, size: int) -> mmap.mmap:
        return mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ)


@cache
def _renameat2() -> Any:
    """The C library's function; None where it has none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
    return function
