"""Folders and files that tests replace, and faults of the process that replaces them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import faults

from qgemm.files import journal
from qgemm.files.folders import replacing_files, replacing_folder

HEAD = "config.json"
OLD = {HEAD: b"old config", "model.bin": b"old weights", "vocab.txt": b"old words"}
NEW = {"model.bin": b"new weights", HEAD: b"new config"}


def belongs(name: str) -> bool:
    return name in OLD


def put(path: Path, files: dict[str, bytes], replace: bool = True, during: Callable[[], object] = lambda: None) -> None:
    """Replace a folder by one with these files."""
    with replacing_folder(str(path), HEAD, belongs, replace) as create:
        for name, data in files.items():
            with create(str(path / name)) as fd:
                os.write(fd, data)
        during()


def put_files(path: Path, files: dict[str, bytes], replace: bool = True) -> None:
    """Replace files of a folder together."""
    with replacing_files([str(path / name) for name in sorted(files)], replace) as create:
        for name, data in files.items():
            with create(str(path / name)) as fd:
                os.write(fd, data)


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.is_file()}


def one_error(monkeypatch, module, name: str, number: int, error: int = errno.EIO) -> None:
    """The call of this number fails, counted from 0."""
    real, calls = getattr(module, name), []

    def call(*arguments, **named):
        calls.append(name)
        if len(calls) == number + 1:
            raise OSError(error, os.strerror(error))
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, call)


def killed(work: Callable[[], object], moves: int) -> None:
    """Do the work in a child that is killed before its move of this number."""

    def dying() -> None:
        move, calls = journal.move, []

        def moved(*arguments) -> None:
            calls.append(arguments)
            if len(calls) > moves:
                os.kill(os.getpid(), signal.SIGKILL)
            move(*arguments)

        journal.move = moved
        work()

    _, status = os.waitpid(faults.forked(dying), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
