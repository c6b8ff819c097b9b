"""The calls on files, folders and mappings that posix.py and portable.py both have, and the flags that open a file."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Protocol


def _flags(*names: str) -> int:
    """Flags of os.open together; a system that lacks one does without it."""
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


# O_NONBLOCK: opening a FIFO must not wait for its writer. O_NOCTTY: a terminal must not become this process's.
READ = _flags("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
NEW = _flags("O_RDWR", "O_CREAT", "O_EXCL", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
EXISTING = _flags("O_RDWR", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
FOLDER_ERRORS = errno.ENOTDIR, errno.ELOOP  # open_folder raises them for a file and for a link


class Files(Protocol):
    """Files by descriptor, and by name in an open folder.

    The descriptor of a folder is valid in these calls alone. `folder` None: the working directory. Names that are links
    are not followed. Where a call renames or removes a file that this process has open, `fd` is its descriptor: it
    stays valid, but a system that does not rename open files loses its lock meanwhile.
    """

    def open(self, name: str, flags: int, mode: int = 0o777, folder: int | None = None) -> int:
        """The descriptor of a file; OSError(ELOOP) for a link."""

    def open_folder(self, name: str, folder: int | None = None, follow: bool = False) -> int:
        """The descriptor of a folder; an OSError of FOLDER_ERRORS for a file or, unless `follow`, a link."""

    def close(self, fd: int) -> None:
        """Close a file or folder."""

    def dup(self, fd: int) -> int:
        """Another descriptor of a file or folder."""

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open file or folder."""

    def stat(self, name: str, folder: int | None) -> os.stat_result:
        """The status of an entry of a folder."""

    def names(self, folder: int) -> list[str]:
        """The names of a folder's entries."""

    def access(self, name: str, mode: int, folder: int) -> bool:
        """Whether this user has access to an entry of a folder; follows links."""

    def mkdir(self, name: str, mode: int, folder: int) -> None:
        """Create a folder in a folder."""

    def rmdir(self, name: str, folder: int) -> None:
        """Remove an empty folder from a folder."""

    def unlink(self, name: str, folder: int, fd: int | None = None) -> None:
        """Remove a file from a folder."""

    def link(self, name: str, source: int, target: int, new_name: str) -> None:
        """Give a file a second name; FileExistsError if there is an entry of this name."""

    def rename(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        """Rename an entry; whether it replaces another one depends on the system."""

    def replace(self, name: str, source: int, target: int, new_name: str, fd: int | None = None) -> None:
        """Rename an entry, in place of a file of the new name if there is one."""

    def rename_with_flags(self, name: str, source: int, target: int, new_name: str, flags: int) -> None:
        """Rename an entry as renameat2 of Linux does; OSError(ENOSYS) elsewhere."""

    def sync(self, fd: int) -> None:
        """Sync a file or the names in a folder to the disk."""

    def lock(self, fd: int) -> bool:
        """Lock a file or folder; False if another process holds the lock. A file system without locks gives all."""

    def lock_stale(self, fd: int) -> bool:
        """Lock a file or folder of a writer that is dead; False if it may be alive, and if the system cannot tell."""

    def user(self) -> int:
        """The user of this process, as the status of a file names its owner."""

    def others_write(self, status: os.stat_result) -> bool:
        """Whether other users may write to a file or folder, as far as its mode tells."""

    def change_owner(self, fd: int, user: int, group: int) -> None:
        """Set the owner and group of a file or folder; -1: keep."""

    def change_mode(self, fd: int, mode: int) -> None:
        """Set the mode of a file or folder."""

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read at an offset until the buffer is full or the data ends; returns the number of bytes."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset; returns the number of bytes that were written."""

    def copy(self, source: int, start: int, target: int, offset: int, count: int) -> int:
        """Copy bytes of a file into another without reading them; returns their number, 0 where no call can."""

    def allocate(self, fd: int, size: int) -> None:
        """Reserve space on the disk for a file, where the system can."""

    def mount(self, folder: int) -> str:
        """The mount that a folder is on."""

    def map_copied(self, fd: int, size: int) -> mmap.mmap:
        """The first `size` bytes of a file, copy-on-write."""

    def map_read_only(self, fd: int, size: int) -> mmap.mmap:
        """The first `size` bytes of a file, for reading."""
