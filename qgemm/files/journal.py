"""Replace several files of a folder together, by a journal in that folder.

No system renames several files in one step. So the new files wait in a folder of their own, a journal lists them, the
old files move into a second folder, and the new ones take their names, the first file last: without it no program opens
the others. Then the journal goes.

    .qgemm-journal   JSON: {"new": folder, "old": folder, "names": [file, ...], "away": [old file, ...]}

Readers refuse the files that a journal names. If the process is killed, the next one that writes to the folder finishes
the work; after an error the old files move back. A move never replaces a file, so that nothing can be lost.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from qgemm.errors import GGUFError
from qgemm.system import READ, system

from .json_parser import parse_object
from .paths import shown, shown_path
from .temporary import (
    exists_in,
    is_named,
    is_own,
    move,
    remove,
    remove_stale,
    sync_folder,
    sync_replaced,
    temporary_file,
    temporary_folder,
)

NAME = ".qgemm-journal"
LONGEST = 1 << 24  # bytes of a journal
PAUSE, PAUSES = 0.01, 1000  # seconds between two attempts at the lock of another process, and their number


class Journal(NamedTuple):
    """A replacement: the folders of new and old files, the names of new files, and of the old ones that go.

    The first name is the file by which programs open the others.
    """

    new: str
    old: str
    names: tuple[str, ...]
    away: tuple[str, ...]


class Busy(OSError):
    """Another process holds the lock of the journal."""


# ---------------------------------------------------------------- writing


def replace_files(folder: int, new: str, names: Sequence[str], away: Callable[[], Sequence[str]], where: str) -> None:
    """Put the files `names` of the folder `new`, which is inside `folder`, there in place of those that `away` names.

    away: called after the replacements of other processes.

    Raises OSError, and the old files are back then, unless the message says that a journal stays.
    """
    for _ in range(PAUSES):
        try:
            finish_pending(folder, where)
            _replace(folder, new, names, away, where)
            return
        except Busy:
            time.sleep(PAUSE)
    raise OSError(errno.EAGAIN, f"another process replaces files of this folder ({NAME})")


def _replace(folder: int, new: str, names: Sequence[str], away: Callable[[], Sequence[str]], where: str) -> None:
    def old_names() -> tuple[str, ...]:
        return tuple(sorted(away(), key=lambda name: (name != names[0], name)))

    with ExitStack() as closing:
        old, old_fd = temporary_folder(folder, 0o700)
        closing.callback(system.close, old_fd)
        closing.callback(discard, old_fd, folder, old)
        new_fd = _open_folder(folder, new, closing)
        journal = Journal(new, old, tuple(names), old_names())
        fd = _begin(folder, journal)
        closing.callback(system.close, fd)
        try:
            if old_names() != journal.away:  # another process was faster
                raise Busy(errno.EAGAIN, os.strerror(errno.EAGAIN))
            _apply(folder, journal, new_fd, old_fd)
        except BaseException:
            _undo(folder, journal, new_fd, old_fd)
            _end(folder, fd)
            raise
        try:
            sync_replaced(folder, where)
        finally:
            _end(folder, fd)


def finish_pending(folder: int, where: str) -> None:
    """Finish the replacement that a killed process began in a folder, or undo it where it cannot be finished.

    Raises GGUFError where neither is possible, and an OSError while another process is at work.
    """
    with ExitStack() as closing:
        try:
            fd = system.open(NAME, READ, folder=folder)
        except FileNotFoundError:
            return
        closing.callback(system.close, fd)
        if not system.lock(fd):
            raise Busy(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not is_named(fd, folder, NAME):
            return
        try:
            journal = _read(fd)
            if system.fstat(fd).st_uid != system.user():
                raise GGUFError("it belongs to another user")
            new, old = (_open_folder(folder, name, closing) for name in (journal.new, journal.old))
            _check_moves(folder, journal, new, old)
            try:
                _apply(folder, journal, new, old)
            except OSError:
                _undo(folder, journal, new, old)
        except (OSError, GGUFError) as error:
            reason = getattr(error, "strerror", None) or error
            rule = f"{NAME} beside it describes a replacement that cannot be finished ({reason})"
            raise GGUFError(f"{where}: {rule}: remove it once the files that it names are right") from error
        sync_folder(folder)
        _end(folder, fd)
        discard(old, folder, journal.old)
        discard(new, folder, journal.new)


def remove_unfinished(folder: int) -> None:
    """Finish the replacements of killed processes and remove their temporary files, as far as the system permits."""
    with suppress(OSError, GGUFError):
        finish_pending(folder, "")
    remove_stale(folder, lambda: _folders(folder))


def discard(fd: int, place: int, name: str) -> None:
    """Remove a temporary folder, unless a journal needs it."""
    if name not in _folders(place):
        remove(fd, place, name)


def _folders(folder: int) -> tuple[str, ...]:
    """The folders that the journal of a folder needs."""
    try:
        fd = system.open(NAME, READ, folder=folder)
    except FileNotFoundError:
        return ()
    try:
        return _read(fd)[:2]
    except (OSError, GGUFError):
        return ()
    finally:
        system.close(fd)


def _begin(folder: int, journal: Journal) -> int:
    """Write the journal to the disk; its locked descriptor."""
    temporary, fd = temporary_file(folder, 0o666)
    data = json.dumps(journal._asdict()).encode()
    try:
        while data:
            data = data[os.write(fd, data) :]
        system.sync(fd)
        try:
            move(temporary, folder, folder, NAME, fd)
        except FileExistsError:
            raise Busy(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        sync_folder(folder)
    except BaseException:
        remove(fd, folder, temporary)
        remove(fd, folder, NAME)
        system.close(fd)
        raise
    return fd


def _apply(folder: int, journal: Journal, new: int, old: int) -> None:
    """Move old files out and new ones in, as far as that is not done already."""
    for name in journal.away:
        if name not in journal.names or exists_in(new, name):
            with suppress(FileNotFoundError):
                move(name, folder, old)
    for name in reversed(journal.names):
        with suppress(FileNotFoundError):
            move(name, new, folder)


def _check_moves(folder: int, journal: Journal, new: int, old: int) -> None:
    """GGUFError if a file that is no part of the replacement has one of its names by now."""
    for name in journal.names:
        if exists_in(new, name) and exists_in(folder, name) and (name not in journal.away or exists_in(old, name)):
            raise GGUFError(f"{shown(name)} was written meanwhile")


def _undo(folder: int, journal: Journal, new: int, old: int) -> None:
    """Move new files out and old ones back."""
    for name in journal.names:
        if not exists_in(new, name):
            with suppress(FileNotFoundError):
                move(name, folder, new)
    for name in reversed(journal.away):
        with suppress(FileNotFoundError):
            move(name, old, folder)


def _end(folder: int, fd: int) -> None:
    """Remove the journal, before the old files go."""
    with suppress(OSError):
        sync_folder(folder)
    if is_named(fd, folder, NAME):
        system.unlink(NAME, folder, fd)
    with suppress(OSError):
        sync_folder(folder)


def _open_folder(folder: int, name: str, closing: ExitStack) -> int:
    fd = system.open_folder(name, folder)
    closing.callback(system.close, fd)
    if not is_own(system.fstat(fd)):
        raise GGUFError(f"{shown(name)} belongs to another user")
    return fd


# ---------------------------------------------------------------- reading


def _read(fd: int) -> Journal:
    """The journal in an open file; GGUFError if malformed."""
    try:
        data = bytearray(min(system.fstat(fd).st_size, LONGEST))
        size = system.read_into(fd, memoryview(data), 0)
        fields = parse_object(bytes(data[:size]), GGUFError)
        journal = Journal(fields["new"], fields["old"], tuple(fields["names"]), tuple(fields["away"]))
    except (GGUFError, TypeError, KeyError):
        raise GGUFError("it is no journal") from None
    entries = [*journal[:2], *journal.names, *journal.away]
    if not all(
        isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") for name in entries
    ):
        raise GGUFError("it names files of other folders")
    return journal


def check_finished(path: str) -> None:
    """Refuse a file that is being replaced together with others, by the journal of its folder."""
    folder, name = os.path.split(path)
    try:
        fd = system.open(os.path.join(folder, NAME), READ)
    except OSError:
        return
    try:
        journal = _read(fd)
    except (OSError, GGUFError):
        return
    finally:
        system.close(fd)
    if name in journal.names or name in journal.away:
        rule = "is being replaced together with other files"
        rest = f"if that process was killed, the next conversion that writes to this folder finishes its work ({NAME})"
        raise GGUFError(f"{shown_path(path)}: {rule}; {rest}")


@contextmanager
def unchanged(folder: str, head: str, suffixes: tuple[str, ...]) -> Iterator[None]:
    """Refuse the result of the body if files of a folder were replaced while it read them.

    head: the name of the file that a replacement puts there last. suffixes: of the names of files that are read.
    """
    path = os.path.join(folder, head)
    check_finished(path)
    before = _entries(folder, suffixes)
    try:
        yield
    finally:
        check_finished(path)
        if _entries(folder, suffixes) != before:
            raise GGUFError(f"{shown_path(folder)}: was replaced while it was opened: open it again")


def _entries(folder: str, suffixes: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The device and inode of a folder, and of its files that have one of the suffixes, with the time of their data.

    A file system gives the inode of a file that is gone to the next one: two replacements may restore all numbers.
    """
    entries: dict[str, tuple[int, ...]] = {}
    with suppress(OSError):
        entries["."] = _identity(os.stat(folder or "."))
        with os.scandir(folder or ".") as listing:
            files = {entry.name: entry.stat() for entry in listing if entry.name.endswith(suffixes)}
        entries.update({name: (*_identity(status), status.st_mtime_ns) for name, status in files.items()})
    return entries


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
