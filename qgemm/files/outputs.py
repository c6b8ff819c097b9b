"""Outputs must not overwrite inputs: files are compared by identity, not by spelling of their paths."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeAlias

from qgemm.errors import QgemmError

from .atomic import check_replaceable
from .paths import PathLike, path_string, shown_path

STREAMS = "/dev/stdout", "/dev/stderr"  # if redirected to a file, it must not be replaced either
# Device and inode of a file, and ""; for a future file those of its folder, and its name.
Identity: TypeAlias = tuple[int, int, str]


def check_output(path: PathLike, inputs: Iterable[PathLike]) -> None:
    """Refuse an output path that is not writable, or that is one of the inputs under any spelling, link or hard link.

    It also works where neither file exists yet, so call it before the work that produces the output.
    """
    name = path_string(path)
    check_replaceable(name)
    output = identity(name)
    for other in map(path_string, (*inputs, *STREAMS)):
        if identity(other) == output:
            same = "is" if other == name else f"is the same file as {shown_path(other)},"
            raise QgemmError(f"{shown_path(name)}: {same} a file of this very command, write to another")


def identity(path: str) -> Identity:
    """The identity of a path's file, or of a future file by its folder and name."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino, ""
    except OSError:
        pass  # no file yet, or an invalid path, which the writer reports
    try:
        folder, name = os.path.split(os.path.realpath(path))
        status = os.stat(folder)
        return status.st_dev, status.st_ino, name
    except OSError:
        return -1, -1, path
