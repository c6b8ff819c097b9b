"""Files that nobody but this user can have written: what is in them is run as the user's own code is."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from .atomic import FOLDER, replacing_in, write_at
from .paths import READ, shown_path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(Exception):
    """Something that another user owns or may write to, or that is no file or no folder; the message says which."""


def open_folder(path: str) -> int:
    """The descriptor of a folder that is this user's alone, made with mode 0700 if there is none.

    Raises NotPrivate for a folder of another user, one that others may write to, or a link; OSError where there is
    none and none can be made.
    """
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, 0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):
        raise NotPrivate(f"{shown_path(path)}: is a link: name the folder itself")
    fd = os.open(path, FOLDER | os.O_NOFOLLOW)
    try:
        _check(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_private(folder: int, name: str) -> bytes | None:
    """The bytes of a file in such a folder; None if there is none; NotPrivate for one that is not this user's alone."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):  # asked before it is opened: some devices act on that
            raise NotPrivate(f"{shown_path(name)}: is not a regular file")
        fd = os.open(name, READ | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        _check(os.fstat(fd), name)
        return file.read()


def write_private(folder: int, name: str, data: bytes) -> None:
    """Write a file of mode 0600 in such a folder, in place of whatever has this name there. Raises OSError."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
    with replacing_in(folder, name, shown_path(name), mode=0o600) as fd:
        write_at(fd, 0, memoryview(data))


def _check(found: os.stat_result, path: str) -> None:
    """Refuse what another user owns, who may always write to it, or what others may write to."""
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"{shown_path(path)}: belongs to another user (uid {found.st_uid})")
    if found.st_mode & OTHERS:
        raise NotPrivate(f"{shown_path(path)}: others may write to it (mode {stat.S_IMODE(found.st_mode):o})")
