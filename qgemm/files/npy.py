"""NumPy's files, .npy and .npz: arrays by name, read in ranges; every refusal is a CheckpointError."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from qgemm.errors import CheckpointError

from .paths import Opened, shown, shown_path


class NpyArray(NamedTuple):
    """An array of a file.

    type: safetensors' name of its dtype, e.g. "F16". read: (start, stop) in elements, C order -> those elements.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[Any]]


def parse_npy(name: str, file: Opened, start: int, size: int) -> NpyArray:
    """The array in the .npy file that starts at a byte of another and has so many."""
    who = f"{shown_path(file.path)}: array {shown(name)}"
    head = _Window(file, start, size)
    try:
        version = npy_format.read_magic(head)
        reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = reader(head)
    except ValueError as error:
        raise CheckpointError(f"{who}: {error}") from None
    kind = _type_name(dtype)
    if kind is None:
        raise CheckpointError(f"{who}: {dtype} is not a type of weights")
    if fortran and len(shape) > 1:
        raise CheckpointError(f"{who}: is in Fortran order, np.ascontiguousarray gives the one that is read")
    if prod(shape) * dtype.itemsize != size - head.at:
        raise CheckpointError(f"{who}: {size - head.at} bytes are not those of {dtype} {shape}")
    first = start + head.at

    def read(begin: int, end: int) -> NDArray[Any]:
        return file.read(first + begin * dtype.itemsize, (end - begin) * dtype.itemsize).view(dtype)

    return NpyArray(name, kind, shape, read)


class _Window:
    """What NumPy's reader of headers takes for a file: some bytes of another."""

    def __init__(self, file: Opened, start: int, size: int) -> None:
        self.file, self.start, self.size, self.at = file, start, size, 0

    def read(self, size: int = -1, /) -> bytes:
        size = min(size, self.size - self.at)
        self.at += size
        return self.file.read(self.start + self.at - size, size).tobytes()


def _type_name(dtype: np.dtype[Any]) -> str | None:
    """Safetensors' name of a dtype in either byte order."""
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        return None
    return "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}"


def open_npz(path: str, undo: ExitStack, fd: int | None = None) -> dict[str, NpyArray]:
    """The arrays of an archive, by name; what is compressed is unpacked into files without a name. fd: if it is open
    already."""
    where = shown_path(path)
    file = Opened(path, CheckpointError, fd)
    undo.callback(file.close)
    found: dict[str, NpyArray] = {}
    try:
        with open(file.fd, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in found or name == member.filename:
                    raise CheckpointError(f"{where}: {shown(member.filename)}: is no array, or there are two")
                if member.compress_type == zipfile.ZIP_STORED:
                    found[name] = parse_npy(name, file, _data_offset(file, member), member.file_size)
                    continue
                spool = tempfile.NamedTemporaryFile()  # noqa: SIM115 lives as long as the source
                undo.callback(spool.close)
                with archive.open(member) as packed:
                    shutil.copyfileobj(packed, spool)
                spool.flush()
                unpacked = Opened(spool.name, CheckpointError)
                undo.callback(unpacked.close)
                found[name] = parse_npy(name, unpacked, 0, member.file_size)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    return found


def _data_offset(file: Opened, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member start: behind its local header, which has lengths of its own."""
    fixed = 30
    if member.header_offset + fixed > file.size:
        raise zipfile.BadZipFile("the file ends within a header")
    head = file.read(member.header_offset, fixed).tobytes()
    start = member.header_offset + fixed + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if start + member.file_size > file.size or member.compress_size != member.file_size:
        raise zipfile.BadZipFile("the file ends within an array")
    return start


def open_npy(path: str, undo: ExitStack) -> Mapping[str, NpyArray]:
    """The array of a .npy file, under the file's name."""
    file = Opened(path, CheckpointError)
    undo.callback(file.close)
    name = os.path.splitext(os.path.basename(path))[0]
    return {name: parse_npy(name, file, 0, file.size)}
