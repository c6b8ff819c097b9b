"""Tensors of PyTorch's .pt and .bin files: a zip archive of a pickle and of the bytes of each storage.

    ROOT/data.pkl    a pickle, which is read as data and never run (pickled.py)
    ROOT/data/KEY    the elements of a storage, stored without compression
    ROOT/byteorder   "little"; older files have none

A tensor is a call of _rebuild_tensor_v2(storage, offset, shape, strides, ...) in the pickle. Only contiguous ones are
read.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np

from .limits import longest_text
from .paths import shown
from .pickled import Call, Global, Persistent, unpickled
from .safetensors import DTYPES, Entry, SafetensorsFile
from .zip import STORED, Member, inflate, members

PICKLE = "/data.pkl"
FREE_PICKLE = 1 << 17  # bytes that a pickle may have besides a share of the weights
MAX_DEPTH = 3  # dictionaries within dictionaries: modules, their parts, settings of parts, and of settings
REBUILD = "torch._utils._rebuild_"
TENSOR, OTHER_TENSOR = f"{REBUILD}tensor_v2", f"{REBUILD}tensor_v3"  # the second has a dtype of its own
PARAMETERS = f"{REBUILD}parameter", f"{REBUILD}parameter_with_state"
SIZE = "torch.Size"
STORAGES = {  # class of a storage -> safetensors' name of its dtype
    "torch.FloatStorage": "F32", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.DoubleStorage": "F64", "torch.LongStorage": "I64", "torch.IntStorage": "I32", "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
    "torch.storage.UntypedStorage": "U8",
}  # fmt: skip
TYPES = {  # torch's dtypes, of which a pickle may have the names
    "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL", "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
NAMES = frozenset((TENSOR, OTHER_TENSOR, *PARAMETERS, SIZE, *STORAGES, *TYPES))


class TorchFile(SafetensorsFile):
    """One open file: `tensors` by name, and `settings`, the other values; both by dictionary keys joined by dots.

    CheckpointError if it is malformed, or its pickle has anything but dictionaries of tensors and plain values.
    """

    settings: dict[str, Any]

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        self.settings = {}
        listed = {member.name: member for member in members(self.file)}
        roots = [name.removesuffix(PICKLE) for name in listed if name.endswith(PICKLE)]
        if len(roots) != 1:
            raise self._refusal(f"has {len(roots)} members NAME{PICKLE}, PyTorch's files have one")
        [root] = roots
        if f"{root}/byteorder" in listed and self._content(listed[f"{root}/byteorder"]) != b"little":
            raise self._refusal("byteorder: only little-endian files are read")
        value = unpickled(self._content(listed[root + PICKLE]), NAMES, lambda rule: self._refusal(f"data.pkl: {rule}"))
        if type(value) is not dict:
            raise self._refusal("data.pkl: is no dictionary of tensors")
        storages = {name.removeprefix(f"{root}/data/"): member for name, member in listed.items()}
        tensors: dict[str, Entry] = {}
        self._collect("", value, storages, tensors, depth=0)
        return tensors, {}

    def _content(self, member: Member) -> bytes:
        """A short member, unpacked."""
        limit = longest_text(FREE_PICKLE, self.file.size - member.packed)
        if member.size > limit:
            rule = f"{member.size} bytes are more than a file of {self.file.size} can have: {limit}"
            raise self._refusal(f"{shown(member.name)}: {rule}")
        if member.method != STORED:
            return b"".join(inflate(self.file, member))
        return self.file.read(member.start, member.size).tobytes()

    def _collect(
        self, prefix: str, value: Any, storages: dict[str, Member], tensors: dict[str, Entry], depth: int
    ) -> None:
        """Add the tensors and settings below a value of the pickle."""
        name = prefix.removesuffix(".")
        while type(value) is Call and value.function in PARAMETERS and value.arguments:
            value = value.arguments[0]
        if type(value) is dict:
            if depth > MAX_DEPTH:
                raise self._refusal(f"{shown(name)}: dictionaries are nested more than {MAX_DEPTH} deep")
            for key, inner in value.items():
                self._collect(f"{prefix}{key}.", inner, storages, tensors, depth + 1)
        elif name in tensors or name in self.settings:
            raise self._refusal(f"{shown(name)}: is there twice")
        elif type(value) is Call and value.function in (TENSOR, OTHER_TENSOR):
            tensors[name] = self._tensor(name, value, storages)
        else:
            self.settings[name] = value

    def _tensor(self, name: str, call: Call, storages: dict[str, Member]) -> Entry:
        """The entry of a tensor, whose bytes are in the file."""
        arguments: list[Any] = [*call.arguments, *[None] * 7]
        storage, offset, shape, strides, *others = arguments
        fields = storage.fields if type(storage) is Persistent else ()
        shape, strides = _numbers(shape), _numbers(strides)
        if type(fields) is not tuple or len(fields) != 5 or fields[0] != "storage" or type(fields[1]) is not Global:
            raise self._refusal(f"tensor {shown(name)}: has no storage")
        kind = STORAGES.get(fields[1].name)
        if call.function == OTHER_TENSOR:
            kind = TYPES.get(others[2].name) if type(others[2]) is Global else None
        member = storages.get(fields[2]) if type(fields[2]) is str else None
        if kind is None or member is None or member.method != STORED:
            raise self._refusal(f"tensor {shown(name)}: its storage is missing, compressed or of no type")
        if type(offset) is not int or shape is None or strides is None or len(shape) != len(strides):
            raise self._refusal(f"tensor {shown(name)}: has no shape")
        entry = Entry(kind, shape, member.start + offset * np.dtype(DTYPES[kind]).itemsize)
        if offset < 0 or entry.offset + entry.nbytes > member.start + member.size:
            raise self._refusal(f"tensor {shown(name)}: {kind} {list(shape)} does not lie within its storage")
        whole = [*accumulate(shape[:0:-1], mul, initial=1)][::-1]
        if prod(shape) and any(n > 1 and a != b for n, a, b in zip(shape, strides, whole, strict=False)):
            raise self._refusal(f"tensor {shown(name)}: strides {list(strides)} of {list(shape)} are not those of rows")
        return entry


def _numbers(value: Any) -> tuple[int, ...] | None:
    """The sizes in a tuple or a torch.Size, None if it is neither."""
    if type(value) is Call and value.function == SIZE and len(value.arguments) == 1:
        [value] = value.arguments
    fits = type(value) is tuple and all(type(size) is int and 0 <= size < 2**63 for size in value)
    return value if fits else None
