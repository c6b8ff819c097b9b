""".npz archives: NumPy's arrays by name, read in ranges; every refusal is a CheckpointError.

A compressed array is unpacked when its weights are first read, into a temporary file; its header alone is unpacked to
know what it is.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from threading import Lock
from typing import Any

from numpy.typing import NDArray

from qgemm.errors import CheckpointError

from .npy import HEAD, NpyArray, npy_header, stored_array
from .paths import Opened, shown, shown_path, system_errors
from .zip import STORED, Member, inflated, members

SUFFIX = ".npy"


def open_npz(path: str, undo: ExitStack, fd: int | None = None) -> dict[str, NpyArray]:
    """The arrays of an archive, by name. fd: if it is open already."""
    file = Opened(path, CheckpointError, fd)
    undo.callback(file.close)
    found: dict[str, NpyArray] = {}
    for member in members(file):
        name = member.name.removesuffix(SUFFIX)
        who = f"{shown_path(path)}: array {shown(name)}"
        if name in found or name == member.name:
            raise CheckpointError(f"{who}: is there twice, or does not end in {SUFFIX}")
        if member.method == STORED:
            found[name] = stored_array(name, who, file, member.start, member.size)
        else:
            found[name] = _packed_array(name, who, file, member, undo)
    return found


def _packed_array(name: str, who: str, file: Opened, member: Member, undo: ExitStack) -> NpyArray:
    """A deflated array, of which nothing but the header is unpacked now."""
    header = npy_header(who, next(inflated(file, member), b"")[:HEAD], member.size)
    unpacking = undo.enter_context(ExitStack())  # closed with the archive, by whichever stack closes that
    spools: list[Opened] = []  # one, once it is needed
    lock = Lock()

    def read(start: int, stop: int) -> NDArray[Any]:
        with lock:
            if not spools:
                spools.append(_unpacked(file, member))
                unpacking.callback(spools[0].close)
        return stored_array(name, who, spools[0], 0, member.size).read(start, stop)

    return NpyArray(name, header.type, header.shape, read)


def _unpacked(file: Opened, member: Member) -> Opened:
    """A member as a file of its own, without a name."""
    with system_errors(file.path, "unpacked"), tempfile.TemporaryFile() as spool:
        for piece in inflated(file, member):
            spool.write(piece)
        spool.flush()
        return Opened(file.path, CheckpointError, spool.fileno())
