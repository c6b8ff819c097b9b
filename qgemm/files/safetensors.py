"""Reading and laying out .safetensors files.

    offset  bytes  field
         0      8  size     u64, of the header, little-endian
         8   size  header   JSON: {name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}
         .      .  data     each tensor at its offsets from here, without overlaps, holes or trailing bytes

The whole header is checked before a byte of data is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError

from .kinds import LONGEST, SAFETENSORS, hint
from .limits import FREE_HEADER, longest_text, most_names
from .paths import PathLike, RegularFile, path_string, shown, shown_path
from .safetensors_header import METADATA, Described, parse_header

SIZE = struct.Struct("<Q")
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
ALIGNMENT = 8  # bytes; headers are padded with spaces

DTYPES = {  # safetensors' dtype -> NumPy's, or that of the stored bits where NumPy has none
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "u1",
}


class Entry(NamedTuple):
    """One tensor: safetensors' name of its dtype, its shape, and its offset in the file."""

    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of the stored bits."""
        return np.dtype(DTYPES[self.type])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One open file: `tensors` by name, in the order of their data, and `metadata`. CheckpointError if malformed."""

    def __init__(self, path: PathLike, fd: int | None = None) -> None:
        """fd: the descriptor of the file if it is already open."""
        self.path = path_string(path)
        self.file = RegularFile(self.path, CheckpointError, fd)
        try:
            self.tensors, self.metadata = self._header()
        except BaseException:
            self.close()
            raise

    def read(self, entry: Entry, start: int, stop: int) -> NDArray[Any]:
        """Elements start to stop of a tensor, in C order."""
        size = entry.dtype.itemsize
        return self.file.read(entry.offset + start * size, (stop - start) * size).view(entry.dtype)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _refusal(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{shown_path(self.path)}: {rule}")

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        left = self.file.size - SIZE.size
        start = self.file.read(0, min(self.file.size, LONGEST)).tobytes()
        if left < 2:
            raise self._refusal(f"not a safetensors file: it has {self.file.size} bytes{hint(start, SAFETENSORS)}")
        size = SIZE.unpack_from(start)[0]
        if size > (limit := min(left, MAX_HEADER, longest_text(FREE_HEADER, left - min(size, left)))):
            rule = f"{size} bytes are more than a file of {self.file.size} can have: {limit}"
            raise self._refusal(f"header: {rule}{hint(start, SAFETENSORS)}")
        raw = self.file.read(SIZE.size, size).tobytes()
        described, metadata = parse_header(raw, most_names(self.file.size), self._refusal)
        entries = {name: self._entry(name, fields, SIZE.size + size) for name, fields in described.items()}
        return self._placed(entries, SIZE.size + size), metadata

    def _entry(self, name: str, described: Described, start: int) -> Entry:
        kind, shape, offsets = described
        if kind not in DTYPES:
            raise self._refusal(f"tensor {shown(name)}: dtype {shown(kind)} is not one of {', '.join(DTYPES)}")
        if max((*shape, *offsets), default=0) >= 2**63:
            raise self._refusal(f"tensor {shown(name)}: has 2^63 elements or more along an axis")
        entry = Entry(kind, shape, start + offsets[0] if offsets else start)
        if len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
            rule = f"must span the {entry.nbytes} bytes of {kind} {list(shape)}"
            raise self._refusal(f"tensor {shown(name)}: data_offsets {list(offsets)} {rule}")
        return entry

    def _placed(self, entries: dict[str, Entry], start: int) -> dict[str, Entry]:
        """The tensors in the order of their data, which must fill the file from `start`."""
        position, previous = start, ""
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        for name, entry in ordered.items():
            if entry.offset != position:
                relation = "inside" if entry.offset < position else "a hole behind"
                other = f"tensor {shown(previous)}" if position > start else "the header"
                raise self._refusal(f"tensor {shown(name)}: starts at byte {entry.offset}, {relation} {other}")
            position, previous = position + entry.nbytes, name
        if position != self.file.size:
            raise self._refusal(f"the tensors end at byte {position}, the file at {self.file.size}")
        return ordered


def file_layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The header, the offset of each tensor and the size of a file with these tensors (dtype, shape)."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    ends, position = {}, 0
    for name, (kind, shape) in tensors.items():
        ends[name] = position, position + prod(shape) * np.dtype(DTYPES[kind]).itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": list(ends[name])}
        position = ends[name][1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % ALIGNMENT)
    start = SIZE.size + len(text)
    return SIZE.pack(len(text)) + text, {name: start + first for name, (first, _) in ends.items()}, start + position
