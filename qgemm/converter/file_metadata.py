"""Keys of a .gguf file set and removed, without decoding its tensors.

The bytes of all other keys and of the tensors stay as they are. A header is rewritten in place only if no crash can
leave half of it: the header keeps its length, and the bytes that differ lie in one sector of the disk, as where a
number gets another value of its type. Every other change goes into a new file that replaces the old one whole or not
at all; the system copies the tensors there, and shares their blocks between both files where the file system can.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from qgemm.errors import QgemmError
from qgemm.files.atomic import allocate, replacing, write_at
from qgemm.files.gguf.header import Header
from qgemm.files.gguf.layout import MAGIC, U32, U64
from qgemm.files.gguf.parts import VERSION
from qgemm.files.gguf.reader import GGUFFile
from qgemm.files.gguf.shard import Shard
from qgemm.files.gguf.writer import key_bytes
from qgemm.files.paths import PathLike, RegularFile, path_string, shown, shown_path, system_errors
from qgemm.system import EXISTING, system

from .edits import check_keys

SECTOR = 512  # bytes that a disk writes whole or not at all
PIECE = 8 << 20  # bytes that are copied at once where the system has no call that copies


def set_metadata(path: PathLike, values: Mapping[str, Any] | None = None, remove: Iterable[str] = ()) -> bool:
    """Set and remove keys of a .gguf file; returns whether the file was changed in place, or was right already.

    Otherwise a new file with copied tensors has replaced it, whole or not at all. values: as those of `qgemm.write`; a
    key that exists keeps its place, others come last. Of a split model each shard is a file with keys of its own.

    Raises GGUFError or TypeError for keys and values that a file cannot hold, QgemmError for keys that do not exist or
    that follow from the tensors; the file is intact then.
    """
    name = path_string(path)
    values, removed = dict(values or {}), set(remove)
    where = shown_path(name)
    with ExitStack() as closing:
        shard = Shard(name, copy=True)
        closing.callback(shard.close)
        header = shard.header
        check_keys(name, (*values, *removed))
        if VERSION in header.keys:
            rule = "holds kbit tensors, whose metadata `qgemm convert --override-kv` changes"
            raise QgemmError(f"{where}: {rule}")
        for key in removed:
            if key not in header.keys:
                raise QgemmError(f"{where}: there is no key {shown(key)} to remove")
            if key in values:
                raise QgemmError(f"{where}: key {shown(key)}: is set and removed")
        old = bytes(shard.data()[: header.end])
        new = _header_bytes(where, header, old, values, removed)
        file = RegularFile(name)
        closing.callback(file.close)
        shard.check_named()
        if _overwritten(name, old, new, file):
            return True
        _replace(name, header, new, file)
    return False


def _header_bytes(where: str, header: Header, old: bytes, values: Mapping[str, Any], removed: set[str]) -> bytes:
    """The header with other keys, without the padding after it."""
    infos = sum(U64.size + len(name.encode()) + 2 * U32.size + U64.size * (1 + len(entry.shape))
                for name, entry in header.tensors.items())  # fmt: skip
    starts = [place.offset - U32.size - len(key) - U64.size for key, place in header.keys.items()]
    ends = [*starts[1:], header.end - infos]
    entries = {key: old[start:end] for key, start, end in zip(header.keys, starts, ends, strict=True)}
    entries |= {key: key_bytes(where, key, value) for key, value in values.items()}
    keys = [entries[key] for key in entries if key not in removed]
    counts = U64.pack(len(header.tensors)) + U64.pack(len(keys))
    return MAGIC + U32.pack(header.version) + counts + b"".join(keys) + old[header.end - infos :]


def _overwritten(path: str, old: bytes, new: bytes, file: RegularFile) -> bool:
    """Write the bytes that differ into the file, with one call, if a crash leaves them old or new."""
    if len(old) != len(new):
        return False
    differing = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))
    if not differing.size:
        return True
    first, last = int(differing[0]), int(differing[-1])
    with system_errors(path, "written"):
        if first // SECTOR != last // SECTOR or os.fstat(file.fd).st_nlink > 1:  # another name keeps the old file
            return False
        fd = os.open(path, EXISTING)
        try:
            if not os.path.samestat(os.fstat(fd), os.fstat(file.fd)):
                return False
            file.check()
            system.write(fd, memoryview(new)[first : last + 1], first)
            system.sync(fd)
        finally:
            os.close(fd)
    return True


def _replace(path: str, header: Header, new: bytes, file: RegularFile) -> None:
    """Write a file with another header and the same tensors, which replaces the old one."""
    alignment = header.alignment
    old_start, start = (-(-size // alignment) * alignment for size in (header.end, len(new)))
    size = max(file.size - old_start, 0)

    def check(fd: int) -> None:
        GGUFFile([Shard(path, fd, copy=True)], part=True).close()
        file.check()

    with replacing(path, check) as fd:
        allocate(fd, start + size)
        write_at(fd, 0, memoryview(new))
        done = 0
        while done < size:
            count = system.copy(file.fd, old_start + done, fd, start + done, size - done)
            if not count:
                count = min(PIECE, size - done)
                write_at(fd, start + done, file.read(old_start + done, count))
            done += count
