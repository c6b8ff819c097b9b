"""Replace several files together: a folder, or files of a folder. docs/files.md lists the guarantees for users.

The new files are written into a temporary folder. A new folder is created beside the old one, and the two exchange
their names in one step. Where that is impossible, and for files that lie beside others, a journal replaces the files
(journal.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol

from qgemm.errors import GGUFError
from qgemm.system import FOLDER_ERRORS, NEW, system

from .atomic import exists, inherit, old_file, synced
from .journal import Busy, discard, finish_pending, remove_unfinished, replace_files
from .paths import shown_path, system_errors
from .temporary import (
    TEMPORARY_FILE,
    exchange,
    is_named,
    move,
    sync_folder,
    sync_replaced,
    temporary_folder,
)

# Errors of an exchange that the system or this folder does not support; a journal replaces the files then.
NO_EXCHANGE = (
    errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBUSY, errno.EXDEV,
)  # fmt: skip
ATTEMPTS = 10  # at a folder that others create or remove meanwhile
WRITE = os.W_OK | os.X_OK
Belongs = Callable[[str], bool]


class Create(Protocol):
    """Opens a new file at a path; check: see `replacing`."""

    def __call__(self, path: str, check: Callable[[int], object] = ...) -> AbstractContextManager[int]: ...


class _Staging:
    """New files in a temporary folder.

    place, name, fd: the folder that holds it, its name there, its descriptor. old: the folder of the files that are
    replaced, None if missing. names: the new files.
    """

    def __init__(self, place: int, old: int | None, mode: int) -> None:
        self.place, self.old = system.dup(place), old
        self.names: list[str] = []
        try:
            self.name, self.fd = temporary_folder(place, mode)
        except BaseException:
            system.close(self.place)
            raise

    @contextmanager
    def create(self, path: str, check: Callable[[int], object] = lambda fd: None) -> Iterator[int]:
        """The descriptor of a new file for a path, whose folder is that of the old files."""
        name = os.path.basename(path)
        with system_errors(path, "written"):
            old = None if self.old is None else _status(self.old, name)
            if old is not None and not stat.S_ISREG(old.st_mode):
                old = None
            fd = system.open(name, NEW, 0o666 if old is None else 0o600, self.fd)
            try:
                with synced(fd, old, check):
                    yield fd
            finally:
                system.close(fd)
        self.names.append(name)

    def complete(self, where: str) -> None:
        """Sync the names of the files; GGUFError if the temporary folder is another one by now."""
        if not is_named(self.fd, self.place, self.name):
            raise GGUFError(f"{where}: cannot be written: someone removed or replaced the unfinished files")
        sync_folder(self.fd)

    def move(self, place: int) -> None:
        """Move the temporary folder into another one."""
        move(self.name, self.place, place)
        system.close(self.place)
        self.place = system.dup(place)

    def close(self) -> None:
        """Remove the temporary folder, with the new files if they took no place, else with those that they replaced."""
        discard(self.fd, self.place, self.name)
        system.close(self.fd)
        system.close(self.place)


# ---------------------------------------------------------------- files beside others


class _Files:
    """Files of a folder that are replaced together.

    path: of the folder, for errors. belongs: whether a file of this name is among them. replace: whether old ones may
    go.
    """

    def __init__(self, path: str, belongs: Belongs, replace: bool) -> None:
        self.path, self.belongs, self.replace = path, belongs, replace

    def old(self, folder: int) -> list[str]:
        """The names of the old files; an error if one must not be replaced."""
        names = []
        for name in filter(self.belongs, sorted(system.names(folder))):
            status = _status(folder, name)
            if status is None or stat.S_ISDIR(status.st_mode):
                continue
            where = shown_path(os.path.join(self.path, name))
            if not self.replace:
                raise exists(where)
            if not stat.S_ISLNK(status.st_mode):
                old_file(folder, name, where)
            names.append(name)
        return names

    def put(self, staging: _Staging, folder: int, names: Sequence[str]) -> None:
        """Replace the old files by the new ones of these names, by a journal."""
        where = shown_path(os.path.join(self.path, names[0]))
        try:
            replace_files(folder, staging.name, names, lambda: self.old(folder), where)
        except FileExistsError:
            if self.replace:
                raise
            raise exists(where) from None


@contextmanager
def replacing_files(paths: Sequence[str], replace: bool = True) -> Iterator[Create]:
    """A function that creates new files for these paths of one folder, which take their places together.

    The first path is the one by which programs open the others. replace: False refuses existing files. Links among the
    files are replaced, and the files that they lead to stay.
    """
    with ExitStack() as closing, system_errors(paths[0], "written"):
        path = os.path.dirname(paths[0])
        names = [os.path.basename(file) for file in paths]
        folder = _open(os.path.realpath(path), closing)
        files = _Files(path, names.__contains__, replace)
        finish(folder, shown_path(paths[0]))
        files.old(folder)
        remove_unfinished(folder)
        staging = _Staging(folder, folder, 0o700)
        closing.callback(staging.close)
        yield staging.create
        staging.complete(shown_path(paths[0]))
        files.put(staging, folder, names)


# ---------------------------------------------------------------- a folder


@contextmanager
def replacing_folder(path: str, head: str, belongs: Belongs, replace: bool = True) -> Iterator[Create]:
    """A function that creates the files of a new folder, which replaces the one at `path`.

    head: the file by which programs open the others. belongs: whether a file of this name is replaced or removed with
    the old folder; all others stay. replace: False refuses a folder with such files.

    A link to a folder stays a link. Mode and, as far as the system permits, owner and group are those of the old folder
    and of its files.
    """
    with ExitStack() as undo, ExitStack() as closing, system_errors(path, "written"):
        parent_path, name = os.path.split(os.path.realpath(path))
        _make_folders(parent_path, undo)
        target = _Target(path, _open(parent_path, closing), name)
        files = _Files(path, belongs, replace)
        old = target.open(closing)
        if old is not None:
            finish(old, target.where)
            files.old(old)
            remove_unfinished(old)
        beside = old is None or target.is_movable(old)
        place = target.parent if old is None or beside else old
        remove_unfinished(place)
        staging = _Staging(place, old, 0o777 if old is None else 0o700)
        closing.callback(staging.close)
        yield staging.create
        staging.complete(target.where)
        names = sorted(staging.names, key=lambda file: file != head)
        for _ in range(ATTEMPTS):
            with suppress(_Again), ExitStack() as trying:
                old = target.open(trying)
                if old is None:
                    target.create(staging)
                elif not beside or not target.exchange(staging, old, files):
                    if beside:
                        staging.move(old)
                    files.put(staging, old, names)
                undo.pop_all()
                return
        raise OSError(errno.EAGAIN, "others create and remove this folder")


class _Again(Exception):
    """The folder came or went meanwhile."""


class _Target(NamedTuple):
    """A folder to be replaced: its path for errors, the open folder that it is in, and its name there."""

    path: str
    parent: int
    name: str

    @property
    def where(self) -> str:
        """The path in errors."""
        return shown_path(self.path)

    def open(self, closing: ExitStack) -> int | None:
        """The descriptor of the old folder, None if missing."""
        try:
            return _open(self.name, closing, self.parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in FOLDER_ERRORS:
                raise GGUFError(f"{self.where}: is not a folder") from None
            raise

    def is_movable(self, old: int) -> bool:
        """Whether another folder can take the place of the old one.

        Not so for a mount point, for the working directory, in which the user's shell would stay, and where this user
        cannot write to the old folder or to the one that holds it.
        """
        status, parent = system.fstat(old), system.fstat(self.parent)
        others = parent.st_mode & stat.S_ISVTX and system.user() not in (0, status.st_uid, parent.st_uid)
        writable = all(system.access(".", WRITE, folder) for folder in (old, self.parent))
        same_mount = system.mount(old) == system.mount(self.parent)
        return writable and not others and same_mount and not _is_working_directory(old)

    def create(self, staging: _Staging) -> None:
        """Give the new folder its name."""
        try:
            move(staging.name, self.parent, self.parent, self.name)
        except FileExistsError:
            raise _Again from None
        sync_replaced(self.parent, self.where)

    def exchange(self, staging: _Staging, old: int, files: _Files) -> bool:
        """Exchange new and old folder, and keep the files that do not belong; False where that is impossible."""
        inherit(staging.fd, system.fstat(old))
        for name in filter(partial(_stays, files), system.names(old)):
            try:
                system.link(name, old, staging.fd, name)
            except (FileExistsError, FileNotFoundError):  # linked by an attempt before, or removed
                pass
            except OSError:  # a folder, a file of another user, a file system without hard links
                return False
        sync_folder(staging.fd)
        files.old(old)
        system.lock(old)  # without a lock another process may remove it as stale after the exchange
        try:
            exchange(self.parent, staging.name, self.name)
        except FileNotFoundError:
            raise _Again from None
        except OSError as error:
            if error.errno in NO_EXCHANGE:
                return False
            raise
        try:
            with ExitStack() as closing:
                out = _open(staging.name, closing, self.parent)
                files.old(out)
                _keep(staging.fd, out, files)
                new, staging.fd = staging.fd, system.dup(out)
        except BaseException:
            exchange(self.parent, staging.name, self.name)
            raise
        system.close(new)
        sync_replaced(self.parent, self.where)
        return True


def _stays(files: _Files, name: str) -> bool:
    """Whether a file of an old folder goes into the new one: neither one that is replaced nor a temporary one."""
    return not files.belongs(name) and not TEMPORARY_FILE.fullmatch(name)


def _keep(new: int, out: int, files: _Files) -> None:
    """Move files that the user added to the old folder between the links and the exchange into the new one."""
    for name in filter(partial(_stays, files), system.names(out)):
        linked, status = _status(new, name), _status(out, name)
        if status is not None and not (linked is not None and os.path.samestat(linked, status)):
            system.replace(name, out, new, name)


# ---------------------------------------------------------------- entries of folders


def finish(folder: int, where: str) -> None:
    """Finish the replacement that a killed process began in a folder; the commit waits for a living process."""
    with suppress(Busy):
        finish_pending(folder, where)


def _open(path: str, closing: ExitStack, folder: int | None = None) -> int:
    """The descriptor of a folder, which is no link."""
    fd = system.open_folder(path or ".", folder)
    closing.callback(system.close, fd)
    return fd


def _status(folder: int, name: str) -> os.stat_result | None:
    """The status of an entry of a folder, which may be a link; None if missing."""
    with suppress(FileNotFoundError):
        return system.stat(name, folder)
    return None


def _is_working_directory(folder: int) -> bool:
    with suppress(OSError):  # a working directory that was removed
        return os.path.samestat(system.fstat(folder), os.stat("."))
    return False


def _make_folders(path: str, undo: ExitStack) -> None:
    """Make a folder and those that it is in, which are removed again by `undo`."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folders(parent, undo)
    with suppress(FileExistsError):
        os.mkdir(path)
        undo.callback(_remove_empty, path)
    with ExitStack() as closing:
        sync_folder(_open(parent, closing))


def _remove_empty(path: str) -> None:
    with suppress(OSError):
        os.rmdir(path)
