"""Replacing a file whole or not at all.

The new file is written under a temporary name beside the old one and takes its place when it is complete and on the
disk. After it was made it is handled by its descriptor, and by its name only in the folder that was opened first and
where that name still is this very file: who else may write to the folder can hinder a write, not lead it elsewhere.
What users may rely on is in docs/files.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import GGUFAccessError, GGUFError

from .paths import READ, PathLike, path_string, shown_path, system_errors

TEMPORARY = ".qgemm-{}.tmp"  # of a random number in hexadecimal digits
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
ATTEMPTS = 100  # to make a temporary file that nobody takes away or locks first
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO  # of fallocate: the disk's word, not that it cannot do it
NO_LINKS = errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK  # of link: exFAT, FUSE
NO_SYNC = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS  # of fsync on a folder


def write_file(path: PathLike, data: bytes) -> None:
    """Write a file of these bytes, which replaces any old one."""
    with replacing(path_string(path)) as fd:
        write_at(fd, 0, memoryview(data))


@contextmanager
def replacing(path: str, check: Callable[[int], object] = lambda fd: None, replace: bool = True) -> Iterator[int]:
    """The descriptor of an empty new file, to read and write, which takes the place of the one at `path` if the body
    succeeds, or else vanishes.

    check: is given the descriptor when the data is on the disk; what it raises leaves the old file.
    replace: False to refuse a file that is there, also one that came during the body.

    A link stays a link, to the new file. The mode, and as far as the system permits owner and group, are those of the
    old file or, without one, what open() would give.

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
    """`replacing` by the descriptor of a folder and a name in it, which is no link.

    where: what errors call the file. mode: of a file that was not there, less the umask. Raises OSError as it comes.
    """
    old = _old(folder, name, where)
    if old is not None and not replace:
        raise exists(where)
    _remove_stale(folder)
    temporary, fd = _temporary(folder, mode if old is None else 0o600)
    try:
        try:
            if old is not None:
                _inherit(fd, old)
            yield fd
            os.fsync(fd)
            check(fd)
            if not _is_named(fd, folder, temporary):
                raise GGUFError(f"{where}: cannot be written: someone removed or replaced the unfinished file")
            _put(fd, folder, temporary, name, where, replace)
        except BaseException:
            _remove(fd, folder, temporary)
            raise
    finally:
        os.close(fd)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            why = error.strerror or error
            failed = GGUFAccessError(f"{where}: was replaced, but its folder cannot be synced to the disk: {why}")
            failed.errno = error.errno
            raise failed from error


def check_replaceable(path: PathLike) -> None:
    """Raise before any work what `replacing` would raise at its start: no folder, no permission, no regular file."""
    name = path_string(path)
    with system_errors(name, "written"), ExitStack() as closing:
        folder, last = _place(name, closing)
        _old(folder, last, shown_path(name))
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def exists(where: str) -> GGUFError:
    """The error for a file that must not be replaced."""
    return GGUFError(f"{where}: exists; it is replaced only by force (--force, force=True)")


def allocate(fd: int, size: int) -> None:
    """Make a file so long, of zeros: a disk without room for it says so before any work, where the system can."""
    try:
        if size and hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in FULL:
            raise
    os.ftruncate(fd, size)


def write_at(fd: int, offset: int, piece: NDArray[Any] | memoryview) -> int:
    """Write all bytes of something contiguous at an offset; returns how many."""
    data = piece.reshape(-1).view(np.uint8).data if isinstance(piece, np.ndarray) else piece
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)
    return written


# ---------------------------------------------------------------- one folder, and names in it


def _place(path: str, closing: ExitStack) -> tuple[int, str]:
    """The folder of the file that a path means, open, and the name there, which is no link."""
    with suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # some have no real path, as a pipe that is /dev/stdout
            raise GGUFError(f"{shown_path(path)}: is not a regular file")
    folder, name = os.path.split(os.path.realpath(path))
    fd = os.open(folder, FOLDER)
    closing.callback(os.close, fd)
    return fd, name or "."


def _old(folder: int, name: str, where: str) -> os.stat_result | None:
    """What is to be replaced, None if nothing; an error if it is no file or could not be written to."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):  # one that leads to itself, or that came just now
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(found.st_mode):
        raise GGUFError(f"{where}: is not a regular file")
    if not os.access(name, os.W_OK, dir_fd=folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def _temporary(folder: int, mode: int) -> tuple[str, int]:
    """The name of a new file, and its descriptor, locked: who else gets the lock knows the writer dead.

    It never waits for the lock, which anyone who may read the file can hold.
    """
    for _ in range(ATTEMPTS):
        name = TEMPORARY.format(secrets.token_hex(8))  # a name that is nobody else's
        fd = os.open(name, NEW, mode, dir_fd=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # someone else has it, perhaps to remove the file as stale
            _remove(fd, folder, name)
        except OSError:  # a file system without locks
            return name, fd
        else:
            if os.fstat(fd).st_nlink:
                return name, fd
        os.close(fd)  # taken for stale before it was locked
    raise OSError(errno.EAGAIN, "others take its unfinished files away")


def _remove_stale(folder: int) -> None:
    """Remove the temporary files of writers that were killed, as far as the system lets us."""
    stale = re.compile(re.escape(TEMPORARY).replace(r"\{\}", "[0-9a-f]{16}"))
    with suppress(OSError):
        for name in filter(stale.fullmatch, os.listdir(folder)):
            with suppress(OSError), ExitStack() as closing:
                fd = os.open(name, READ | os.O_NOFOLLOW, dir_fd=folder)
                closing.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    _remove(fd, folder, name)


def _inherit(fd: int, old: os.stat_result) -> None:
    """Give a new file, which is private, the group, owner and mode of the old one, as far as the system permits."""
    new, mode = os.fstat(fd), stat.S_IMODE(old.st_mode) & 0o777
    if new.st_gid != old.st_gid:
        try:
            os.fchown(fd, -1, old.st_gid)
        except OSError:  # another group must not get more than everyone
            mode &= 0o707 | (mode & 0o007) << 3
    if new.st_uid != old.st_uid:
        with suppress(OSError):
            os.fchown(fd, old.st_uid, -1)
    with suppress(OSError):  # a file system without modes, as exFAT
        os.fchmod(fd, mode)


def _is_named(fd: int, folder: int, name: str) -> bool:
    """Whether a name in a folder is the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(fd: int, folder: int, name: str) -> None:
    """Remove a name in a folder if it is the open file, as far as the system lets us."""
    with suppress(OSError):
        if _is_named(fd, folder, name):
            os.unlink(name, dir_fd=folder)


def _put(fd: int, folder: int, temporary: str, name: str, where: str, replace: bool) -> None:
    """Give a complete file its name; a file of that name goes, or is the reason to refuse."""
    if not replace:
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            _remove(fd, folder, temporary)
            return
        except FileExistsError:
            raise exists(where) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        if _old(folder, name, where) is not None:
            raise exists(where)
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
