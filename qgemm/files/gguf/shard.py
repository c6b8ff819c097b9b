"""One open .gguf file, and the blocks of a tensor in it: to copies and other processes a path and an offset.

What was checked on opening stays true: before bytes are handed out, the file must still have the size and modification
time that it had. Only a file that is cut short while bytes of its mapping are being read ends the process by SIGBUS, as
any mapping does; `read`, and blocks that are copied, come through the descriptor and end in an error instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from mmap import ACCESS_READ, mmap
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.errors import GGUFError
from qgemm.files.paths import Opened, PathLike, path_string, shown_path, system_errors
from qgemm.tensor import Tensor

from .header import Entry, read_header


class Link(NamedTuple):
    """A file to be opened again: its absolute path, its size and modification time, and whether blocks are copied."""

    path: str
    stamp: tuple[int, int]
    copy: bool


class Shard:
    """One open file: its header, its mapping, and the guard between its bytes and their readers."""

    def __init__(self, path: PathLike, fd: int | None = None, copy: bool = False) -> None:
        """fd: of the file, if it is open already. copy: blocks are read into memory when they are first used."""
        self.path = path = path_string(path)
        self._absolute = os.path.abspath(path)
        self._file = Opened(path, fd=fd)
        with ExitStack() as undo, system_errors(path, "read"):
            undo.callback(self._file.close)
            try:
                mapped = mmap(self._file.fd, self._file.size, access=ACCESS_READ)
            except ValueError as error:  # it shrank just now
                raise GGUFError(f"{shown_path(path)}: cannot be mapped: {error}") from error
            undo.callback(mapped.close)
            self.header = read_header(path, mapped)
            undo.pop_all()
        self._mapped: mmap | None = mapped
        self._copies: dict[int, Blocks] | None = {} if copy else None  # by offset
        self._lock = Lock()

    def mapped(self) -> mmap:
        """The bytes of the file, if they are still those that were checked."""
        self._file.check()  # reading behind a new end would be a SIGBUS
        assert self._mapped is not None, "there is none only once the file is closed"
        return self._mapped

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name, in the file's order; its blocks stay in the file until they are asked for."""
        for name, entry in self.header.tensors.items():
            blocks = StoredBlocks(self, entry)
            yield name, Tensor(entry.format, entry.shape, blocks, name, blocks.read)

    def blocks(self, entry: Entry) -> Blocks:
        """The blocks [..., N, K / weights per block] of a tensor, read-only: a view of the mapping, or a copy."""
        if self._copies is None:
            view: Blocks = np.ndarray(entry.block_shape, entry.format.dtype, self.mapped(), entry.offset)
            return view
        with self._lock:
            if entry.offset not in self._copies:
                found = self.read(entry, 0, entry.nbytes // entry.format.block_bytes).reshape(entry.block_shape)
                found.flags.writeable = False
                self._copies[entry.offset] = found
            return self._copies[entry.offset]

    def read(self, entry: Entry, start: int, stop: int) -> Blocks:
        """Blocks start to stop of a tensor, read into memory of their own."""
        size = entry.format.block_bytes
        return self._file.read(entry.offset + start * size, (stop - start) * size).view(entry.format.dtype)

    def link(self) -> Link:
        """What another process needs to open the file; GGUFError if it was closed or changed."""
        self._file.check()
        return Link(self._absolute, self._file.stamp, self._copies is not None)

    def close(self) -> None:
        """Let go of the file. Views in other hands keep the mapping, which is never closed itself, alive."""
        self._mapped = None
        if self._copies is not None:
            self._copies = {}
        self._file.close()


class StoredBlocks:
    """The blocks of one tensor: all of them when it is called, a range by `read`.

    Pickled or copied it is a Link and the tensor's entry. The file is then opened at first use, once for all tensors of
    a process that came so, and must be the one that it was.
    """

    def __init__(self, shard: Shard | Link, entry: Entry) -> None:
        self._shard, self._entry = shard, entry

    def __call__(self) -> Blocks:
        """All blocks."""
        return self._opened().blocks(self._entry)

    def read(self, start: int, stop: int) -> Blocks:
        """Blocks start to stop, in memory of their own."""
        return self._opened().read(self._entry, start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        link = self._shard if isinstance(self._shard, Link) else self._shard.link()
        return StoredBlocks, (link, self._entry)

    def _opened(self) -> Shard:
        if isinstance(self._shard, Link):
            self._shard = _opened_again(self._shard)
        return self._shard


_AGAIN: WeakValueDictionary[Link, Shard] = WeakValueDictionary()  # those opened by a link


def _opened_again(link: Link) -> Shard:
    """The file of a link; GGUFError if it is not the one that it was."""
    shard = _AGAIN.get(link)
    if shard is None:
        shard = Shard(link.path, copy=link.copy)
        if shard.link() != link:
            shard.close()
            raise GGUFError(f"{shown_path(link.path)}: changed since its tensors were pickled or copied")
        _AGAIN[link] = shard
    return shard
