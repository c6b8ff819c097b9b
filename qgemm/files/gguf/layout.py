"""The layout of .gguf files, and the rules that reader and writer share.

    offset  bytes  field                                                       (everything is little-endian)
         0      4  magic        "GGUF"
         4      4  version      u32, 2 or 3
         8      8  tensors      u64, count
        16      8  keys         u64, count
        24      .  each key     name (string), type of the value (u32), value
         .      .  each tensor  name (string), n_dims (u32), ne (u64 each, fastest first), type (u32),
                                offset (u64)
         .      .  padding      up to a multiple of general.alignment (32 without that key)
         .      .  data         each tensor at its offset from here, itself a multiple of the alignment

    string  u64 length, then as many bytes
    array   type of the elements (u32), u64 count, then as many elements

The padding after the last tensor may be missing.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import GGUF_VERSION, GGUFValueType, Keys
from numpy.typing import NDArray

from qgemm.codec.format import Format

Buffer: TypeAlias = "mmap | memoryview"  # the bytes of a file from its start, mapped or read
Value: TypeAlias = bool | str | np.generic | NDArray[Any] | list[str]

MAGIC = b"GGUF"
VERSIONS = (2, GGUF_VERSION)  # both have the same layout
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 63  # limit of written names: ggml's buffer has 64 bytes with the NUL
MAX_READ_NAME_BYTES = 127  # limit of read names: diffusion models use GGML_MAX_NAME=128
MAX_DIMS = 5  # ggml has four; video models of ComfyUI-GGUF have convolutions of five
MIN_KEY = 8 + 1 + 4 + 1  # bytes: length, name, type, value
MIN_TENSOR = 8 + 0 + 4 + 8 + 4 + 8  # bytes: length, name, n_dims, ne, type, offset

U32, U64, ELEMENTS = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
NE = {n: struct.Struct(f"<{n}Q") for n in range(1, MAX_DIMS + 1)}

ALIGNMENT = Keys.General.ALIGNMENT
SPLIT_NO, SPLIT_COUNT = Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT
SPLIT_TENSORS = Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT
SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)

STRING, ARRAY, BOOL = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.BOOL
NUMBERS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
INTEGERS = tuple(kind for kind, dtype in NUMBERS.items() if dtype.kind in "iu")
REMOVED = {  # former ggml types, whose ids are not reused
    4: "Q4_2",
    5: "Q4_3",
}

# ---------------------------------------------------------------- rules: each returns the broken rule, or ""


def broken_key_rule(key: bytes) -> str:
    """The rule that a key's name breaks."""
    if not key:
        return "a key must not be empty"
    if len(key) > MAX_KEY_BYTES:
        return f"a key must not be longer than {MAX_KEY_BYTES} bytes"
    if not key.isascii() or b"\0" in key:
        return "a key must be ASCII without NUL"
    return ""


def broken_name_rule(name: bytes, limit: int = MAX_NAME_BYTES) -> str:
    """The rule that a tensor's name breaks; it may be empty."""
    if len(name) > limit:
        return f"a name must not be longer than {limit} bytes"
    if b"\0" in name:
        return "a name must not hold NUL"  # "a\0b": one name to Python, another to C
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return "a name must be UTF-8"
    return ""


def broken_shape_rule(fmt: Format, shape: tuple[int, ...]) -> str:
    """The rule that a tensor's shape (..., N, K) in weights breaks."""
    if not 1 <= len(shape) <= MAX_DIMS:
        return f"{len(shape)} dimensions are not 1 to {MAX_DIMS}"
    if shape[-1] % fmt.weights:
        return f"row length {shape[-1]} is not a multiple of {fmt.weights} ({fmt})"
    return ""


def broken_alignment_rule(kind: int, value: int) -> str:
    """The rule that general.alignment breaks, by the type of its value and, if that is UINT32, the value."""
    if kind != GGUFValueType.UINT32:
        return f"must be UINT32, is {GGUFValueType(kind).name}"
    return "" if value.bit_count() == 1 else f"must be a power of two, is {value}"


# ---------------------------------------------------------------- values


def read_value(data: Buffer, kind: int, offset: int) -> Value:
    """The value of a type at an offset of a checked file; numbers keep their type, arrays are copies.

    Bytes that are not UTF-8 become lone surrogates; `text.encode("utf-8", "surrogateescape")` restores them.
    """
    if kind == STRING:
        return _read_strings(data, offset, 1)[0]
    if kind == ARRAY:
        kind, count = ELEMENTS.unpack_from(data, offset)
        offset += ELEMENTS.size
        if kind == STRING:
            return _read_strings(data, offset, count)
        return np.ndarray(count, NUMBERS[kind], data, offset).copy()
    number = np.ndarray(1, NUMBERS[kind], data, offset)[0]
    return bool(number) if kind == BOOL else number


def _read_strings(data: Buffer, position: int, count: int) -> list[str]:
    strings, unpack = [], U64.unpack_from
    for _ in range(count):
        start = position + 8
        position = start + unpack(data, position)[0]
        strings.append(str(data[start:position], "utf-8", "surrogateescape"))
    return strings
