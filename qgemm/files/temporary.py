"""Temporary files and folders beside the files that they replace: names, locks, removal, and renames.

The writer holds a lock on each. A process that gets the lock later knows that the writer is dead and removes the file.
A lock is never waited for, since anyone who may read the file can hold it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

from qgemm.errors import GGUFAccessError
from qgemm.system import NEW, READ, system

FILE, SUBFOLDER = ".qgemm-{}.tmp", ".qgemm-{}.dir"  # with random hexadecimal digits
TEMPORARY_FILE, TEMPORARY_FOLDER = (
    re.compile(re.escape(name).replace(r"\{\}", "[0-9a-f]{16}")) for name in (FILE, SUBFOLDER)
)
ATTEMPTS = 100  # at a temporary file that no other process removes or locks first
NO_SYNC = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS  # errors of fsync on file systems that cannot sync a folder
NO_FLAGS = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS  # errors of renameat2 without support for its flags
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


def temporary_file(folder: int, mode: int) -> tuple[str, int]:
    """The name and locked descriptor of a new file."""
    return _locked(folder, FILE, lambda name: system.open(name, NEW, mode, folder))


def temporary_folder(folder: int, mode: int) -> tuple[str, int]:
    """The name and locked descriptor of a new folder inside a folder."""

    def create(name: str) -> int | None:
        system.mkdir(name, mode, folder)
        try:
            return system.open_folder(name, folder)
        except FileNotFoundError:  # removed as stale
            return None

    return _locked(folder, SUBFOLDER, create)


def _locked(folder: int, pattern: str, create: Callable[[str], int | None]) -> tuple[str, int]:
    for _ in range(ATTEMPTS):
        name = pattern.format(secrets.token_hex(8))  # unique
        fd = create(name)
        if fd is None:
            continue
        if not system.lock(fd):  # another process holds it, perhaps to remove the file as stale
            remove(fd, folder, name)
        elif is_named(fd, folder, name):
            return name, fd
        system.close(fd)  # removed as stale before it was locked
    raise OSError(errno.EAGAIN, "others take its unfinished files away")


def remove_stale(folder: int, protected: Callable[[], Collection[str]]) -> None:
    """Remove the temporary files and folders of killed writers, as far as the system permits.

    protected: called once a stale folder is locked, returns the names of those that are still needed.
    """
    with suppress(OSError):
        for name in system.names(folder):
            is_folder = TEMPORARY_FOLDER.fullmatch(name) is not None
            if not (is_folder or TEMPORARY_FILE.fullmatch(name)):
                continue
            with suppress(OSError), ExitStack() as closing:
                fd = system.open_folder(name, folder) if is_folder else system.open(name, READ, folder=folder)
                closing.callback(system.close, fd)
                if not system.lock_stale(fd):
                    continue
                status = system.fstat(fd)
                own = stat.S_ISDIR(status.st_mode) and is_own(status) and name not in protected()
                if own if is_folder else stat.S_ISREG(status.st_mode):
                    remove(fd, folder, name)


def is_own(status: os.stat_result) -> bool:
    """Whether an entry belongs to the user of this process."""
    return status.st_uid == system.user()


def is_named(fd: int, folder: int, name: str) -> bool:
    """Whether a name in a folder is the open file."""
    try:
        return os.path.samestat(system.fstat(fd), system.stat(name, folder))
    except FileNotFoundError:
        return False


def exists_in(folder: int, name: str) -> bool:
    """Whether a folder has an entry of this name, also a link that leads nowhere."""
    try:
        system.stat(name, folder)
    except FileNotFoundError:
        return False
    return True


def remove(fd: int, folder: int, name: str) -> None:
    """Remove a name in a folder if it is the open file or folder, as far as the system permits.

    A folder loses its files; one with folders inside stays.
    """
    with suppress(OSError):
        if not is_named(fd, folder, name):
            return
        if not stat.S_ISDIR(system.fstat(fd).st_mode):
            system.unlink(name, folder, fd)
            return
        for entry in system.names(fd):
            with suppress(OSError):
                system.unlink(entry, fd)
        system.rmdir(name, folder)


def sync_folder(folder: int) -> None:
    """Sync the names in a folder to the disk, where the file system can."""
    try:
        system.sync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def sync_replaced(folder: int, where: str) -> None:
    """Sync the folder of a new file; the error says that the file is there."""
    try:
        sync_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        failed = GGUFAccessError(f"{where}: was replaced, but its folder cannot be synced to the disk: {reason}")
        failed.errno = error.errno
        raise failed from error


# ---------------------------------------------------------------- renames that lose nothing


def move(name: str, source: int, target: int, new_name: str = "", fd: int | None = None) -> None:
    """Rename an entry of one folder into another; FileExistsError if that has an entry of this name already.

    fd: the descriptor of an entry that is open.
    """
    new_name = new_name or name
    try:
        system.rename_with_flags(name, source, target, new_name, RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in NO_FLAGS:
            raise
        if exists_in(target, new_name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        system.rename(name, source, target, new_name, fd)


def exchange(folder: int, first: str, second: str) -> None:
    """Exchange two entries of a folder in one step; OSError with an errno of NO_FLAGS where that does not exist."""
    system.rename_with_flags(first, folder, folder, second, RENAME_EXCHANGE)
