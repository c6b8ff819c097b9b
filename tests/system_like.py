"""A process without POSIX, as on Windows: `python tests/system_like.py SYSTEM PROGRAM` runs a program in it.

Windows opens no folder, knows no descriptor of one, and neither renames nor removes a file that is open; a rename
replaces nothing. Calls that it lacks are gone from the modules that have them. macOS lacks less.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from functools import partial
from typing import Any

LINUX = ("memfd_create", "MFD_CLOEXEC", "posix_fallocate", "preadv", "copy_file_range", "pwritev", "sched_getaffinity")
POSIX = (
    *LINUX, "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "geteuid", "getuid", "getgid", "fchown",
    "fchmod", "chown", "pread", "pwrite", "fork", "register_at_fork",
)  # fmt: skip
ONE_PATH = "open", "stat", "access", "mkdir", "rmdir", "unlink", "remove", "link", "rename", "replace"
DESCRIPTORS = "dir_fd", "src_dir_fd", "dst_dir_fd"


def is_open(path: str) -> bool:
    """Whether this process has a file open."""
    try:
        status = original["stat"](path, follow_symlinks=False)
    except OSError:
        return False
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            same = os.path.samestat(os.fstat(fd), status)
        except OSError:
            continue
        if same and not stat.S_ISDIR(status.st_mode):
            return True
    return False


def refused(path: Any) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def call(name: str, *arguments: Any, **named: Any) -> Any:
    """A call of os as Windows has it."""
    if any(named.get(word) is not None for word in DESCRIPTORS):
        raise NotImplementedError(f"{name}: dir_fd unavailable on this platform")
    if name == "open" and os.path.isdir(arguments[0]):
        raise refused(arguments[0])
    if name in ("unlink", "remove", "rename", "replace") and any(map(is_open, arguments)):
        raise refused(arguments[0])
    if name == "rename" and os.path.lexists(arguments[1]):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), arguments[1])
    if name == "access" and isinstance(arguments[0], int):
        raise TypeError("access: a path")
    return original[name](*arguments, **named)


def listdir(path: Any = ".") -> list[str]:
    """os.listdir of a path alone; is_open calls the original with a path."""
    if isinstance(path, int):
        raise TypeError("listdir: a path")
    return original["listdir"](path)


original = {name: getattr(os, name) for name in (*ONE_PATH, "listdir")}


def become(system: str) -> None:
    """Remove from this process the calls that a system lacks."""
    for name in {"macos": LINUX, "windows": POSIX}[system]:
        if hasattr(os, name):
            delattr(os, name)
    if system == "windows":
        sys.modules["fcntl"] = None  # type: ignore[assignment]
        for name in ONE_PATH:
            setattr(os, name, partial(call, name))
        os.listdir = listdir  # type: ignore[assignment]
        os.supports_dir_fd = set()
        os.supports_fd = set()


if __name__ == "__main__":
    become(sys.argv[1])
    exec(compile(sys.argv[2], "program", "exec"), {"__name__": "program"})
