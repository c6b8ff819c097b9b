"""Files that only this user can have written, since their contents are executed with the user's rights."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from qgemm.system import READ, system

from .atomic import replacing_in, write_at
from .paths import shown_path


class NotPrivate(Exception):
    """A file or folder that another user owns or may write to, or of another kind; the message gives the reason."""


def open_folder(path: str) -> int:
    """The descriptor of a folder that only this user may write to, created with mode 0700 if missing.

    Raises NotPrivate for a folder of another user, one that others may write to, or a link; OSError where it is missing
    and cannot be created.
    """
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, 0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):
        raise NotPrivate(f"{shown_path(path)}: is a link: name the folder itself")
    fd = system.open_folder(path)
    try:
        _check(system.fstat(fd), path)
    except BaseException:
        system.close(fd)
        raise
    return fd


def read_private(folder: int, name: str) -> bytes | None:
    """The bytes of a file in a private folder; None if missing; NotPrivate if others may have written it."""
    try:
        status = system.stat(name, folder)
        if not stat.S_ISREG(status.st_mode):  # checked before opening, which has effects on some devices
            raise NotPrivate(f"{shown_path(name)}: is not a regular file")
        fd = system.open(name, READ, folder=folder)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        _check(system.fstat(fd), name)
        return file.read()


def write_private(folder: int, name: str, data: bytes) -> None:
    """Write a file of mode 0600 in a private folder, in place of an old one. Raises OSError."""
    with suppress(OSError):
        system.unlink(name, folder)
    with replacing_in(folder, name, shown_path(name), mode=0o600) as fd:
        write_at(fd, 0, memoryview(data))


def _check(status: os.stat_result, path: str) -> None:
    """Refuse a file of another user, who can always write to it, and one that others may write to."""
    if status.st_uid != system.user():
        raise NotPrivate(f"{shown_path(path)}: belongs to another user (uid {status.st_uid})")
    if system.others_write(status):
        raise NotPrivate(f"{shown_path(path)}: others may write to it (mode {stat.S_IMODE(status.st_mode):o})")
