""".npz archives: NumPy's arrays by name, read in ranges; every refusal is a CheckpointError.

A compressed array is unpacked into a temporary file when its weights are first read; opening unpacks only its header.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

from numpy.typing import NDArray

from qgemm.errors import CheckpointError
from qgemm.locks import new_lock

from .npy import HEAD, NpyArray, npy_header, stored_array
from .paths import RegularFile, shown, shown_path, system_errors
from .zip import STORED, Member, inflate, members

SUFFIX = ".npy"


def open_npz(path: str, undo: ExitStack, fd: int | None = None) -> dict[str, NpyArray]:
    """The arrays of an archive, by name. fd: the descriptor of the archive if it is already open."""
    file = RegularFile(path, CheckpointError, fd)
    undo.callback(file.close)
    arrays: dict[str, NpyArray] = {}
    for member in members(file):
        name = member.name.removesuffix(SUFFIX)
        prefix = f"{shown_path(path)}: array {shown(name)}"
        if name in arrays or name == member.name:
            raise CheckpointError(f"{prefix}: is there twice, or does not end in {SUFFIX}")
        if member.method == STORED:
            arrays[name] = stored_array(name, prefix, file, member.start, member.size)
        else:
            arrays[name] = _packed_array(name, prefix, file, member, undo)
    return arrays


def _packed_array(name: str, prefix: str, file: RegularFile, member: Member, undo: ExitStack) -> NpyArray:
    """A deflated array, whose weights are unpacked on first use."""
    header = npy_header(prefix, next(inflate(file, member), b"")[:HEAD], member.size)
    unpacking = undo.enter_context(ExitStack())  # closed with the archive
    spools: list[RegularFile] = []  # empty until the array is unpacked
    lock = new_lock()

    def read(start: int, stop: int) -> NDArray[Any]:
        with lock:
            if not spools:
                spools.append(_unpacked(file, member))
                unpacking.callback(spools[0].close)
        return stored_array(name, prefix, spools[0], 0, member.size).read(start, stop)

    return NpyArray(name, header.type, header.shape, read)


def _unpacked(file: RegularFile, member: Member) -> RegularFile:
    """A member unpacked to an unnamed temporary file."""
    with system_errors(file.path, "unpacked"), tempfile.TemporaryFile() as spool:
        for piece in inflate(file, member):
            spool.write(piece)
        spool.flush()
        return RegularFile(file.path, CheckpointError, spool.fileno())
