"""PyTorch's .pt files written without torch: a zip archive of a pickle, instruction by instruction, and of storages."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STORAGES = {
    "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "float64": "DoubleStorage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip


class Name(NamedTuple):
    """A name that the pickle imports."""

    module: str
    name: str


class Called(NamedTuple):
    """A call by name."""

    function: Name
    arguments: tuple


class Reference(NamedTuple):
    """A persistent id."""

    fields: tuple


def instructions(value: Any) -> bytes:
    """The instructions of protocol 2 that put a value on the stack."""
    if isinstance(value, Name):
        return b"c" + f"{value.module}\n{value.name}\n".encode()
    if isinstance(value, Called):
        return instructions(value.function) + instructions(tuple(value.arguments)) + b"R"
    if isinstance(value, Reference):
        return instructions(tuple(value.fields)) + b"Q"
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(instructions, value)) + b"t"
    items = b"".join(instructions(key) + instructions(inner) for key, inner in value.items())
    return b"}(" + items + b"u"


def tensor(key: str, array: np.ndarray, **changes: Any) -> Called:
    """The call that makes a tensor over the storage of this key. changes: of the storage, offset, shape or strides."""
    shape = array.shape
    strides = tuple(step // array.itemsize for step in array.strides)
    storage = ("storage", Name("torch", STORAGES[array.dtype.name]), key, "cpu", array.size)
    arguments = {"storage": Reference(storage), "offset": 0, "shape": shape, "strides": strides, **changes}
    return Called(Name("torch._utils", "_rebuild_tensor_v2"), (*arguments.values(), False, Called(ORDERED, ())))


ORDERED = Name("collections", "OrderedDict")


def size(*shape: int) -> Called:
    """A torch.Size."""
    return Called(Name("torch", "Size"), (shape,))


def write(path: Path, value: Any, arrays: dict[str, np.ndarray], *, raw: bytes | None = None, method: int = 0,
          others: dict[str, bytes] | None = None) -> Path:  # fmt: skip
    """raw: the pickle itself. method: of the archive, for storages. others: further members."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", b"\x80\x02" + instructions(value) + b"." if raw is None else raw)
        for key, array in arrays.items():
            file.writestr(f"m/data/{key}", array.tobytes(), method)
        for name, data in (others or {"m/byteorder": b"little", "m/version": b"3\n"}).items():
            file.writestr(name, data)
    return path
