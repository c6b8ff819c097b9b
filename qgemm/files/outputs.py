"""What is written must not be what is read: files compared by what they are, not by how they are spelled."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeAlias

from qgemm.errors import QgemmError

from .atomic import check_replaceable
from .paths import PathLike, path_string, shown_path

STREAMS = "/dev/stdout", "/dev/stderr"  # where they go to files: those would lose what is printed
Identity: TypeAlias = tuple[int, int, str]  # device and inode of a file, or of the folder of one that is to come; name


def check_output(path: PathLike, kept: Iterable[PathLike]) -> None:
    """Refuse a path that cannot be written to, or that means one of the files to keep: by another spelling, a link, a
    hard link; also where neither file is there yet. Called before the work that makes what is written."""
    name = path_string(path)
    check_replaceable(name)
    wanted = identity(name)
    for other in map(path_string, (*kept, *STREAMS)):
        if identity(other) == wanted:
            same = "is" if other == name else f"is the same file as {shown_path(other)},"
            raise QgemmError(f"{shown_path(name)}: {same} a file of this very command, write to another")


def identity(path: str) -> Identity:
    """What a path means: a file, or a name in a folder."""
    try:
        found = os.stat(path)
        return found.st_dev, found.st_ino, ""
    except OSError:
        pass  # none yet, or none at all, as whoever writes there will say
    try:
        folder, name = os.path.split(os.path.realpath(path))
        found = os.stat(folder)
        return found.st_dev, found.st_ino, name
    except OSError:
        return -1, -1, path
