"""Replace a file whole or not at all.

The new file is written under a temporary name beside the old one, and renamed once it is complete and on the disk. It
is handled by its descriptor; by name only in the folder that was opened first, and only while that name still is this
very file. So a process that writes to the same folder can make a write fail, but cannot redirect it. docs/files.md
lists the guarantees for users.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import GGUFError
from qgemm.system import system

from .journal import remove_unfinished
from .paths import PathLike, path_string, shown_path, system_errors
from .temporary import exists_in, is_named, remove, sync_replaced, temporary_file

# Errors of fallocate that mean a full disk; others mean that it is not supported.
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO
NO_LINKS = errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK  # errors of link without hard links (exFAT, FUSE)


def write_file(path: PathLike, data: bytes) -> None:
    """Write these bytes to a file, which replaces any old one."""
    with replacing(path_string(path)) as fd:
        write_at(fd, 0, memoryview(data))


@contextmanager
def replacing(path: str, check: Callable[[int], object] = lambda fd: None, replace: bool = True) -> Iterator[int]:
    """The descriptor of an empty new file, to read and write.

    The file replaces the one at `path` if the body succeeds, and is removed otherwise.

    check: called with the descriptor when the data is on the disk; if it raises, the old file stays.
    replace: False refuses an existing file, also one that appeared during the body.

    A link stays a link, to the new file. Mode and, as far as the system permits, owner and group are those of the old
    file or, without one, those that open() would give.

    Raises GGUFAccessError, naming `path`, if the system fails; then the old file is intact, unless the message says
    that it was replaced.
    """
    with system_errors(path, "written"), ExitStack() as closing:
        folder, name = _place(path, closing)
        with replacing_in(folder, name, shown_path(path), check, replace) as fd:
            yield fd


@contextmanager
def replacing_in(
    folder: int,
    name: str,
    where: str,
    check: Callable[[int], object] = lambda fd: None,
    replace: bool = True,
    mode: int = 0o666,
) -> Iterator[int]:
    """Like `replacing`, for the descriptor of a folder and a name in it, which is no link.

    where: the file's name in errors. mode: of a file without a predecessor, less the umask. Raises plain OSErrors.
    """
    old = old_file(folder, name, where)
    if old is not None and not replace:
        raise exists(where)
    remove_unfinished(folder)
    temporary, fd = temporary_file(folder, mode if old is None else 0o600)
    try:
        try:
            with synced(fd, old, check):
                yield fd
            if not is_named(fd, folder, temporary):
                raise GGUFError(f"{where}: cannot be written: someone removed or replaced the unfinished file")
            _put(fd, folder, temporary, name, where, replace)
        except BaseException:
            remove(fd, folder, temporary)
            raise
    finally:
        system.close(fd)
    sync_replaced(folder, where)


def check_replaceable(path: PathLike) -> None:
    """Raise before any work the errors that `replacing` would raise at its start: no folder, no permission, no file."""
    name = path_string(path)
    with system_errors(name, "written"), ExitStack() as closing:
        folder, last = _place(name, closing)
        old_file(folder, last, shown_path(name))
        if not system.access(".", os.W_OK | os.X_OK, folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def exists(where: str) -> GGUFError:
    """The error for a file that must not be replaced."""
    return GGUFError(f"{where}: exists; it is replaced only by force (--force, force=True)")


def allocate(fd: int, size: int) -> None:
    """Set the size of a file, filled with zeros; a full disk is reported before any work, where the system can."""
    try:
        if size:
            system.allocate(fd, size)
    except OSError as error:
        if error.errno in FULL:
            raise
    os.ftruncate(fd, size)


def write_at(fd: int, offset: int, piece: NDArray[Any] | memoryview) -> int:
    """Write a contiguous array or buffer at an offset; returns its size in bytes."""
    data = piece.reshape(-1).view(np.uint8).data if isinstance(piece, np.ndarray) else piece
    written = 0
    while written < len(data):
        written += system.write(fd, data[written:], offset + written)
    return written


# ---------------------------------------------------------------- names in one folder


def _place(path: str, closing: ExitStack) -> tuple[int, str]:
    """The open folder of the file at a path, and the name there, which is no link."""
    with suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # some have no real path, such as /dev/stdout if a pipe
            raise GGUFError(f"{shown_path(path)}: is not a regular file")
    folder, name = os.path.split(os.path.realpath(path))
    fd = system.open_folder(folder, follow=True)
    closing.callback(system.close, fd)
    return fd, name or "."


def old_file(folder: int, name: str, where: str) -> os.stat_result | None:
    """The file to replace, None if there is none; an error if it is no regular file or not writable."""
    try:
        status = system.stat(name, folder)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):  # a link to itself, or one that was just created
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(status.st_mode):
        raise GGUFError(f"{where}: is not a regular file")
    if not system.access(name, os.W_OK, folder):
        if not exists_in(folder, name):  # moved away meanwhile, with others
            return None
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return status


@contextmanager
def synced(fd: int, old: os.stat_result | None, check: Callable[[int], object]) -> Iterator[None]:
    """Sync and check a new file after it is written; it inherits from the old one first."""
    if old is not None:
        inherit(fd, old)
    yield
    system.sync(fd)
    check(fd)


def inherit(fd: int, old: os.stat_result) -> None:
    """Give a new file or folder, which is private, the group, owner and mode of the old one, as far as possible.

    Set-uid bits go, since they were meant for the old bytes. Those of a folder concern the files in it, and stay.
    """
    new, mode = system.fstat(fd), stat.S_IMODE(old.st_mode) & (0o3777 if stat.S_ISDIR(old.st_mode) else 0o777)
    if new.st_gid != old.st_gid:
        try:
            system.change_owner(fd, -1, old.st_gid)
        except OSError:  # the other group must not get more rights than everyone
            mode &= 0o707 | (mode & 0o007) << 3
    if new.st_uid != old.st_uid:
        with suppress(OSError):
            system.change_owner(fd, old.st_uid, -1)
    with suppress(OSError):  # a file system without modes (exFAT)
        system.change_mode(fd, mode)


def _put(fd: int, folder: int, temporary: str, name: str, where: str, replace: bool) -> None:
    """Give a complete file its name; an existing file is replaced or the reason to refuse."""
    if not replace:
        try:
            system.link(temporary, folder, folder, name)
            remove(fd, folder, temporary)
            return
        except FileExistsError:
            raise exists(where) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        if old_file(folder, name, where) is not None:
            raise exists(where)
    system.replace(temporary, folder, folder, name, fd)
