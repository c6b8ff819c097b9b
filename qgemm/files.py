"""Files by their paths: of any spelling, refused with one typed error, replaced whole or left alone."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from .errors import GGUFAccessError, GGUFError, GGUFNotFoundError

PathLike: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def path_string(path: PathLike) -> str:
    """A path of any bytes as str; TypeError for what is no path, GGUFError for what no file can be called."""
    name = os.fsdecode(path)
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise GGUFError(f"{shown_path(name)}: no file can have this name")
    return name


def shown(text: str | bytes) -> str:
    """Any text as printable ASCII of bounded length: what comes from a file may hold escape sequences."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return ascii(text[:80]) + "..." * (len(text) > 80)


def shown_path(path: str) -> str:
    """A path as it starts a message: whole, in printable ASCII, without quotes."""
    return ascii(path)[1:-1]


@contextmanager
def system_errors(path: str, what: str) -> Iterator[None]:
    """Turn the body's OSError into a typed one that names the file, what was done to it, and the reason."""
    try:
        yield
    except GGUFError:
        raise
    except OSError as error:
        missing = what == "read" and error.errno == errno.ENOENT
        kind = GGUFNotFoundError if missing else GGUFAccessError
        found = kind(f"{shown_path(path)}: cannot be {what}: {error.strerror or error}")
        found.errno = error.errno
        raise found from error


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """The path of an empty new file, which replaces the one at `path` if the body succeeds, or else vanishes.

    A link stays a link, to the new file. The mode is the old file's or, without one, what open() would give.
    The body syncs its data. If syncing the folder fails, the new file is in place already.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    mode = _old_mode(target)
    temporary = os.path.join(folder, f".qgemm-{secrets.token_hex(8)}.tmp")  # a name that is nobody else's
    try:
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(temporary, create, 0o666 if mode is None else 0o600))
        yield temporary
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _old_mode(target: str) -> int | None:
    """The mode of a file to be replaced, None if there is none; an error if it could not be written to."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise GGUFError(f"{shown_path(target)}: is not a regular file")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(found.st_mode)
