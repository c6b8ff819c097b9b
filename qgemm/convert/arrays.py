"""Sources of plain arrays: safetensors, .npy and .npz."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import Opened, shown, shown_path
from qgemm.files.safetensors import Entry, SafetensorsFile
from qgemm.formats import GGML_TYPES
from qgemm.tensor import Tensor

from .weight import Weight, of_tensor

Read = Callable[[int, int], NDArray[Any]]  # elements start to stop, in C order

EIGHT_BITS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # safetensors' name: that of ml_dtypes
SCALES = ("_scale", "_scale_inv", ".scale", "_scales")  # what a tensor is called that scales another of 8 bits
WIDER = {"BOOL": "I8", "U8": "I16", "U16": "I32", "U32": "I64"}  # GGUF has no unsigned types: one that holds them all


def of_safetensors(file: SafetensorsFile) -> dict[str, Weight]:
    """The tensors of a file, by name."""
    found = {}
    for name, entry in file.tensors.items():
        if entry.type in EIGHT_BITS:
            for suffix in SCALES:
                if name + suffix in file.tensors or name.removesuffix(".weight") + suffix in file.tensors:
                    raise CheckpointError(
                        f"{shown_path(file.path)}: tensor {shown(name)}: FP8 with scales of its own is not read"
                    )
            found[name] = _eight_bits(name, entry, partial(file.read, entry))
        else:
            found[name] = of_array(name, entry.type, entry.shape, partial(file.read, entry))
    return found


def of_array(name: str, kind: str, shape: tuple[int, ...], read: Read) -> Weight:
    """A Weight of an array whose dtype safetensors calls `kind`; a number becomes a vector of one."""
    shape = shape or (1,)
    stored = WIDER.get(kind, kind)
    if stored not in GGMLQuantizationType.__members__:
        return Weight(name, shape, kind, prod(shape) * 8, 1)
    fmt = GGML_TYPES[GGMLQuantizationType[stored]]
    cast = partial(_cast, read, fmt)
    tensor = Tensor(fmt, shape, lambda: cast(0, prod(shape)).reshape(shape), name, cast)
    return of_tensor(tensor)


def _cast(read: Read, fmt: Format, start: int, stop: int) -> NDArray[Any]:
    found = read(start, stop)
    return found if found.dtype == fmt.dtype else found.astype(fmt.dtype)


def _eight_bits(name: str, entry: Entry, read: Read) -> Weight:
    """Float8: there is no such type in GGUF, but float16 holds all its numbers."""
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(f"tensor {shown(name)}: {entry.type} needs the package ml_dtypes") from None
    dtype = np.dtype(getattr(ml_dtypes, EIGHT_BITS[entry.type]))

    def values(start: int, stop: int) -> Floats:
        found: Floats = read(start, stop).view(dtype).astype(np.float32)
        return found

    return Weight(name, entry.shape or (1,), entry.type, entry.nbytes, 1, values=values)


# ---------------------------------------------------------------- NumPy's files


def of_npy(name: str, file: Opened, start: int, size: int) -> Weight:
    """The array in the .npy file that starts at a byte of another and has so many."""
    who = f"{shown_path(file.path)}: array {shown(name)}"
    head = _Window(file, start, size)
    try:
        version = npy_format.read_magic(head)
        reader = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = reader(head)
    except ValueError as error:
        raise CheckpointError(f"{who}: {error}") from None
    kind = _name(dtype)
    if kind is None:
        raise CheckpointError(f"{who}: {dtype} is not a type of weights")
    if fortran and len(shape) > 1:
        raise CheckpointError(f"{who}: is in Fortran order, np.ascontiguousarray gives the one that is read")
    if prod(shape) * dtype.itemsize != size - head.at:
        raise CheckpointError(f"{who}: {size - head.at} bytes are not those of {dtype} {shape}")
    first = start + head.at

    def read(begin: int, end: int) -> NDArray[Any]:
        return file.read(first + begin * dtype.itemsize, (end - begin) * dtype.itemsize).view(dtype)

    return of_array(name, kind, shape, read)


class _Window:
    """What NumPy's reader of headers takes for a file: some bytes of another."""

    def __init__(self, file: Opened, start: int, size: int) -> None:
        self.file, self.start, self.size, self.at = file, start, size, 0

    def read(self, size: int = -1, /) -> bytes:
        size = min(size, self.size - self.at)
        self.at += size
        return self.file.read(self.start + self.at - size, size).tobytes()


def _name(dtype: np.dtype[Any]) -> str | None:
    """Safetensors' name of a dtype in either byte order."""
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        return None
    return "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}"


def of_npz(path: str, undo: ExitStack) -> dict[str, Weight]:
    """The arrays of an archive, by name; what is compressed is unpacked into files without a name."""
    where = shown_path(path)
    file = Opened(path, CheckpointError)
    undo.callback(file.close)
    found: dict[str, Weight] = {}
    try:
        with open(file.fd, "rb", closefd=False) as raw, zipfile.ZipFile(raw) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in found or name == member.filename:
                    raise CheckpointError(f"{where}: {shown(member.filename)}: is no array, or there are two")
                if member.compress_type == zipfile.ZIP_STORED:
                    found[name] = of_npy(name, file, _data_offset(file, member), member.file_size)
                    continue
                spool = tempfile.NamedTemporaryFile()  # noqa: SIM115 lives as long as the source
                undo.callback(spool.close)
                with archive.open(member) as packed:
                    shutil.copyfileobj(packed, spool)
                spool.flush()
                unpacked = Opened(spool.name, CheckpointError)
                undo.callback(unpacked.close)
                found[name] = of_npy(name, unpacked, 0, member.file_size)
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


def of_npy_file(path: str, undo: ExitStack) -> Mapping[str, Weight]:
    """The array of a .npy file, under the file's name."""
    file = Opened(path, CheckpointError)
    undo.callback(file.close)
    name = os.path.splitext(os.path.basename(path))[0]
    return {name: of_npy(name, file, 0, file.size)}
