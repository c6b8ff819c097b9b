"""NumPy's .npy files: arrays read in ranges; every refusal is a CheckpointError.

    offset  bytes  field
         0      6  magic    "\\x93NUMPY"
         6      2  version  major 1, 2 or 3, minor 0
         8   2, 4  size     u16 in version 1, else u32, of the header
         .   size  header   {"descr": "<f4", "fortran_order": False, "shape": (2, 3), } and spaces
         .      .  data     in C order, to the end of the file

NumPy evaluates the header as Python; here it must match three patterns, and anything else is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError

from .kinds import hint
from .paths import RegularFile, shown, shown_path

MAGIC = b"\x93NUMPY"
LENGTHS = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}  # version -> bytes of the size field
MAX_HEADER = 10_000  # bytes; NumPy reads longer ones only from trusted files
HEAD = len(MAGIC) + 2 + 4 + MAX_HEADER  # bytes that hold any header
MAX_DIMS = 64  # NumPy's own
SPACES = b" \t\r\n"


def _pattern(text: bytes) -> re.Pattern[bytes]:
    """A pattern in which ~ stands for spaces, and N for an integer (Python 2 may append an L)."""
    return re.compile(text.replace(b"N", rb"(?:0|[1-9][0-9]{0,18})L?~").replace(b"~", b"[" + SPACES + b"]*"))


FIELD = _pattern(
    # A key, then a string, a bool, or perhaps a tuple.
    rb"""~(?P<quote>['"])(?P<key>\w+)(?P=quote)~:~"""
    rb"""(?:(?P<mark>['"])(?P<text>[^'"\\]*)(?P=mark)|(?P<word>True|False)|(?P<tuple>\([0-9L, \t\r\n]*\)))~(?:,|$)"""
)
TUPLE = _pattern(rb"\(~(?:N,~(?:N(?:,~N)*(?:,~)?)?)?\)")
TYPE = re.compile(r"[<>|]?(?:f[248]|[iu][1248]|b1)")  # types of weights
KEYS = {"descr": str, "fortran_order": bool, "shape": tuple}


class NpyArray(NamedTuple):
    """An array of a file.

    type: safetensors' name of its dtype, e.g. "F16". read: (start, stop) in elements, C order -> those elements.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[Any]]


class NpyHeader(NamedTuple):
    """The header of a .npy file; nbytes: offset of the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int

    @property
    def type(self) -> str:
        """Safetensors' name of the dtype in either byte order."""
        return "BOOL" if self.dtype.kind == "b" else f"{self.dtype.kind.upper()}{8 * self.dtype.itemsize}"


def npy_header(prefix: str, head: bytes, size: int) -> NpyHeader:
    """The header of an array of `size` bytes, from its first HEAD; `prefix` is the prefix of errors."""
    version = head[len(MAGIC) : len(MAGIC) + 2]
    if not head.startswith(MAGIC) or version not in LENGTHS:
        rule = f"is not a .npy file of version 1 to 3: it starts with {shown(head[:8])}{hint(head, MAGIC)}"
        raise CheckpointError(f"{prefix}: {rule}")
    start = len(MAGIC) + 2 + LENGTHS[version]
    length = int.from_bytes(head[start - LENGTHS[version] : start], "little")
    if length > MAX_HEADER:
        raise CheckpointError(f"{prefix}: a header of {length} bytes is longer than {MAX_HEADER}")
    text = head[start : start + length]
    if len(text) < length:
        raise CheckpointError(f"{prefix}: the file ends within its header")
    values = _fields(prefix, text)
    descr, shape = values["descr"], values["shape"]
    if not TYPE.fullmatch(descr):
        raise CheckpointError(f"{prefix}: {shown(descr)} is not a type of weights")
    if len(shape) > MAX_DIMS or any(n >= 2**63 for n in shape):
        raise CheckpointError(f"{prefix}: shape {shown(str(shape))} has more than {MAX_DIMS} axes, or 2^63 elements")
    if values["fortran_order"] and len(shape) > 1:
        raise CheckpointError(f"{prefix}: is in Fortran order, np.ascontiguousarray gives the one that is read")
    header = NpyHeader(np.dtype(descr), shape, start + length)
    if prod(shape) * header.dtype.itemsize != size - header.nbytes:
        raise CheckpointError(f"{prefix}: {size - header.nbytes} bytes are not those of {descr} {shown(str(shape))}")
    return header


def _fields(prefix: str, text: bytes) -> dict[str, Any]:
    """The three values in a header."""
    inside = text.strip(SPACES)
    if not (inside.startswith(b"{") and inside.endswith(b"}")):
        rule = f"the header is no dict of {', '.join(KEYS)}, it starts with {shown(inside[:20])}"
        raise CheckpointError(f"{prefix}: {rule}")
    inside, position, fields = inside[1:-1].rstrip(SPACES), 0, {}
    while position < len(inside):
        field = FIELD.match(inside, position)
        if field is None:
            raise CheckpointError(f"{prefix}: the header has {shown(inside[position:])}, which is not read")
        key, value = field["key"].decode("ascii"), _value(field)
        if key not in KEYS or key in fields or not isinstance(value, KEYS[key]):
            raise CheckpointError(
                f"{prefix}: the header has {shown(field[0])}, and must have {', '.join(KEYS)} once each"
            )
        fields[key] = value
        position = field.end()
    if len(fields) < len(KEYS):
        raise CheckpointError(f"{prefix}: the header has only {', '.join(fields) or 'nothing'} of {', '.join(KEYS)}")
    return fields


def _value(field: re.Match[bytes]) -> str | bool | tuple[int, ...] | None:
    """The value of a field, None for a tuple that is not one of integers."""
    if field["word"] is not None:
        return bool(field["word"] == b"True")
    if field["text"] is not None:
        return str(field["text"], "latin-1")
    if not TUPLE.fullmatch(field["tuple"]):
        return None
    return tuple(map(int, re.findall(rb"[0-9]+", field["tuple"])))


def stored_array(name: str, prefix: str, file: RegularFile, start: int, size: int) -> NpyArray:
    """The array of a .npy file that occupies `size` bytes of another file from `start` on."""
    header = npy_header(prefix, file.read(start, min(size, HEAD)).tobytes(), size)
    first, dtype = start + header.nbytes, header.dtype

    def read(begin: int, end: int) -> NDArray[Any]:
        return file.read(first + begin * dtype.itemsize, (end - begin) * dtype.itemsize).view(dtype)

    return NpyArray(name, header.type, header.shape, read)


def open_npy(path: str, undo: ExitStack) -> Mapping[str, NpyArray]:
    """The array of a .npy file, under the file's name without its suffix."""
    file = RegularFile(path, CheckpointError)
    undo.callback(file.close)
    name = os.path.splitext(os.path.basename(path))[0]
    return {name: stored_array(name, f"{shown_path(path)}: array {shown(name)}", file, 0, file.size)}
