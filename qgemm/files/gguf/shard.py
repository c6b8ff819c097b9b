"""One open .gguf file and the blocks of its tensors, which are pickled as a path and an offset.

The checks on opening stay valid: before bytes are handed out, size and modification time of the file are compared. Only
a file that is truncated while its mapping is being read ends the process by SIGBUS, as any mapping does; `read`, and
copied blocks, use the descriptor and raise an error instead. Where blocks are copied, or the file system has no
mappings, nothing is mapped: the header is read into memory as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from mmap import mmap
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from qgemm.codec.format import Blocks
from qgemm.errors import GGUFError
from qgemm.files.mapping import map_private
from qgemm.files.paths import PathLike, RegularFile, path_string, shown_path, system_errors
from qgemm.locks import new_lock
from qgemm.tensor import Tensor

from .foreign import Foreign
from .header import EndOfBufferError, Entry, read_header
from .layout import Buffer


class Link(NamedTuple):
    """A file to reopen: its absolute path, size and modification time, and whether blocks are copied."""

    path: str
    stamp: tuple[int, int]
    copy: bool


FIRST_BYTES = 1 << 20  # read for the header of a file that is not mapped, and doubled until they hold it


class Shard:
    """One open file: its header, and its mapping or copied blocks, whose readers are guarded against changes."""

    def __init__(self, path: PathLike, fd: int | None = None, copy: bool = False) -> None:
        """fd: the descriptor of the file if it is already open.

        copy: nothing is mapped, and blocks are read into memory on first use, as on a file system without mappings.
        """
        self.path = path = path_string(path)
        self._absolute = os.path.abspath(path)
        self._file = RegularFile(path, fd=fd)
        with ExitStack() as undo, system_errors(path, "read"):
            undo.callback(self._file.close)
            mapped = None if copy else _mapping(self._file)
            if mapped is not None:
                undo.callback(mapped.close)
                self.header = read_header(path, mapped, self._file.size)
            self._data: Buffer | None = self._read_header() if mapped is None else mapped
            undo.pop_all()
        self._copies: dict[int, Blocks] | None = {} if mapped is None else None  # offset -> blocks
        self._views: dict[int, tuple[Entry, Blocks]] = {}  # offset -> the last tensor that was viewed there, its blocks
        self._lock = new_lock()

    def _read_header(self) -> Buffer:
        """Read the header by the descriptor; returns the bytes that hold it."""
        size = FIRST_BYTES
        while True:
            data = self._file.read(0, min(size, self._file.size)).data
            try:
                self.header = read_header(self.path, data, self._file.size)
                return data
            except EndOfBufferError:
                size *= 2

    def data(self) -> Buffer:
        """The bytes of the header, and those of the blocks unless these are copied, if the file has not changed."""
        self._file.check()  # reading a mapping beyond a new end would be a SIGBUS
        assert self._data is not None, "only a closed file has no data"
        return self._data

    def check_named(self) -> None:
        """GGUFError if the path leads to another file by now."""
        self._file.check_named()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, in the file's order; blocks are read on use."""
        for name, entry in self.header.tensors.items():
            blocks = StoredBlocks(self, entry)
            yield name, Tensor(entry.format, entry.shape, blocks, name, blocks.read)

    def blocks(self, entry: Entry) -> Blocks:
        """The blocks [..., N, K / weights per block] of a tensor, read-only: a view of the mapping, or a copy.

        Those of a type that lies otherwise in the file are converted at each access.
        """
        viewed, blocks = self._views.get(entry.offset, (None, None))
        if viewed is entry and blocks is not None:  # each product asks: a fifth of the time of a token
            self._file.check()
            return blocks
        if not entry.nbytes:  # its offset may lie beyond the file, or be that of another tensor
            return np.ndarray(entry.block_shape, entry.format.dtype, b"")  # read-only
        if self._copies is None and entry.foreign is None:
            view: Blocks = np.ndarray(entry.block_shape, entry.format.dtype, self.data(), entry.offset)
            view.flags.writeable = False
            self._views[entry.offset] = entry, view
            return view
        if self._copies is None:
            converted = self.read(entry, 0, entry.number_of_blocks).reshape(entry.block_shape)
            converted.flags.writeable = False
            return converted
        with self._lock:
            if entry.offset not in self._copies:
                copy = self.read(entry, 0, entry.number_of_blocks).reshape(entry.block_shape)
                copy.flags.writeable = False
                self._copies[entry.offset] = copy
            return self._copies[entry.offset]

    def read(self, entry: Entry, start: int, stop: int) -> Blocks:
        """Blocks start to stop of a tensor, copied."""
        if entry.foreign is not None:
            return self._converted(entry, entry.foreign, start, stop)
        size = entry.format.block_bytes
        return self._file.read(entry.offset + start * size, (stop - start) * size).view(entry.format.dtype)

    def _converted(self, entry: Entry, foreign: Foreign, start: int, stop: int) -> Blocks:
        """Blocks start to stop of a tensor that lies otherwise in the file; whole groups of rows are read."""
        k = entry.shape[-1]
        group_blocks, size = foreign.rows * entry.block_shape[-1], foreign.group_bytes(k)
        first, last = start // group_blocks, -(-stop // group_blocks)
        raw = self._file.read(entry.offset + first * size, (last - first) * size).reshape(-1, size)
        return foreign.blocks(raw, k).reshape(-1)[start - first * group_blocks : stop - first * group_blocks]

    def link(self) -> Link:
        """The link by which another process reopens the file; GGUFError if it was closed or changed."""
        self._file.check()
        return Link(self._absolute, self._file.stamp, self._copies is not None)

    def close(self) -> None:
        """Close the file. Existing views keep its mapping alive."""
        self._data = None
        self._views = {}
        if self._copies is not None:
            self._copies = {}
        self._file.close()


def _mapping(file: RegularFile) -> mmap | None:
    """The mapping of a file, None where the system cannot map it (ENODEV on some network file systems)."""
    try:
        return map_private(file.fd, file.size)
    except ValueError as error:  # truncated after it was opened
        raise GGUFError(f"{shown_path(file.path)}: cannot be mapped: {error}") from error
    except OSError:
        return None


class StoredBlocks:
    """The blocks of one tensor: all of them when called, a range by `read`.

    It is pickled or copied as a Link and the tensor's entry. The file is then reopened on first use, once per process
    for all its tensors, and must not have changed.
    """

    def __init__(self, shard: Shard | Link, entry: Entry) -> None:
        self._shard, self._entry = shard, entry

    def __call__(self) -> Blocks:
        """All blocks."""
        return self._opened().blocks(self._entry)

    def read(self, start: int, stop: int) -> Blocks:
        """Blocks start to stop, copied."""
        return self._opened().read(self._entry, start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        link = self._shard if isinstance(self._shard, Link) else self._shard.link()
        return StoredBlocks, (link, self._entry)

    def _opened(self) -> Shard:
        if isinstance(self._shard, Link):
            self._shard = _reopen(self._shard)
        return self._shard


_REOPENED: WeakValueDictionary[Link, Shard] = WeakValueDictionary()  # files opened by a link


def _reopen(link: Link) -> Shard:
    """Reopen the file of a link; GGUFError if it has changed."""
    shard = _REOPENED.get(link)
    if shard is None:
        shard = Shard(link.path, copy=link.copy)
        if shard.link() != link:
            shard.close()
            raise GGUFError(f"{shown_path(link.path)}: changed since its tensors were pickled or copied")
        _REOPENED[link] = shard
    return shard
