"""Reading and laying out .safetensors files.

    offset  bytes  field
         0      8  size     u64, of the header, little-endian
         8   size  header   JSON: {name: {"dtype", "shape", "data_offsets": [start, end]}, "__metadata__": {str: str}}
         .      .  data     each tensor at its offsets from here: no overlap, no holes, nothing behind the last

The header is checked whole before a byte of data is read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import CheckpointError

from .paths import Opened, PathLike, path_string, shown, shown_path

SIZE = struct.Struct("<Q")
MAX_HEADER = 100_000_000  # bytes: what the format's own library takes
METADATA = "__metadata__"
ALIGNMENT = 8  # of the data: headers are padded with spaces

DTYPES = {  # of safetensors: NumPy's, of the stored bits where NumPy has none
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
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
    """One tensor: safetensors' name of its dtype, its shape, and where it starts in the file."""

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
    """One open file: `tensors` by name, in the order of their data, and `metadata`. CheckpointError for a bad one."""

    def __init__(self, path: PathLike, fd: int | None = None) -> None:
        """fd: of the file, if it is open already."""
        self.path = path_string(path)
        self.file = Opened(self.path, CheckpointError, fd)
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
        """Let go of the file."""
        self.file.close()

    def _refusal(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{shown_path(self.path)}: {rule}")

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        left = self.file.size - SIZE.size
        if left < 2:
            raise self._refusal(f"not a safetensors file: it has {self.file.size} bytes")
        size = SIZE.unpack(self.file.read(0, SIZE.size).tobytes())[0]
        if size > min(left, MAX_HEADER):
            raise self._refusal(f"header: {size} bytes are more than the file has or {MAX_HEADER}")
        header = self.parsed(self.file.read(SIZE.size, size).tobytes())
        metadata = header.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._refusal(f"header: {METADATA} must be an object of strings")
        start = SIZE.size + size
        entries = {name: self._entry(name, value, start) for name, value in header.items()}
        at, before = start, "the header"
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        for name, entry in ordered.items():
            if entry.offset != at:
                what = "inside" if entry.offset < at else "a hole behind"
                raise self._refusal(f"tensor {shown(name)}: starts at byte {entry.offset}, {what} {before}")
            at, before = at + entry.nbytes, f"tensor {shown(name)}"
        if at != self.file.size:
            raise self._refusal(f"the tensors end at byte {at}, the file at {self.file.size}")
        return ordered, metadata

    def parsed(self, raw: bytes) -> dict[str, Any]:
        """A JSON object in which no key comes twice."""
        if not raw.startswith(b"{"):
            raise self._refusal(f"header: is not a JSON object: it starts with {shown(raw[:4])}")

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                raise ValueError("a name comes twice")
            return found

        try:
            header: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise self._refusal(f"header: {error}") from None
        return header

    def _entry(self, name: str, value: Any, start: int) -> Entry:
        who = f"tensor {shown(name)}"
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._refusal(f"{who}: must have dtype, shape and data_offsets, and nothing else")
        kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(kind, str) or kind not in DTYPES:
            raise self._refusal(f"{who}: dtype {shown(str(kind))} is not one of {', '.join(DTYPES)}")
        for what, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
                raise self._refusal(f"{who}: {what} must be a list of whole numbers")
        entry = Entry(kind, tuple(shape), start + offsets[0] if offsets else start)
        if len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
            raise self._refusal(f"{who}: data_offsets {offsets} must span the {entry.nbytes} bytes of {kind} {shape}")
        return entry


def shards(path: str) -> dict[str, str]:
    """By tensor, the path of its file: of an index (model.safetensors.index.json)."""
    where = shown_path(path)
    document = json_object(path)
    files = document.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{where}: weight_map must be an object of file names")
    for file in files.values():
        if file != os.path.basename(file) or not file.endswith(".safetensors") or "\0" in file:
            raise CheckpointError(
                f"{where}: weight_map: {shown(file)} is not the name of a .safetensors file beside it"
            )
    return {name: os.path.join(os.path.dirname(path), file) for name, file in files.items()}


def json_object(path: str) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError for anything else."""
    file = Opened(path, CheckpointError)
    try:
        if file.size > MAX_HEADER:
            raise CheckpointError(f"{shown_path(path)}: has {file.size} bytes, more than {MAX_HEADER}")
        found = json.loads(file.read(0, file.size).tobytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{shown_path(path)}: {error}") from None
    finally:
        file.close()
    if not isinstance(found, dict):
        raise CheckpointError(f"{shown_path(path)}: is not a JSON object")
    return found


def laid_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """For tensors by name, their dtype and shape: the file's beginning, where each tensor starts, the file's size."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    ends, at = {}, 0
    for name, (kind, shape) in tensors.items():
        ends[name] = at, at + prod(shape) * np.dtype(DTYPES[kind]).itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": list(ends[name])}
        at = ends[name][1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % ALIGNMENT)
    start = SIZE.size + len(text)
    return SIZE.pack(len(text)) + text, {name: start + first for name, (first, _) in ends.items()}, start + at
