"""The pieces of a SentencePiece model (tokenizer.model), a protobuf message; its other fields are skipped.

    ModelProto     field 1, repeated  SentencePiece
    SentencePiece  field 1  piece   string
                   field 2  score   float
                   field 3  type    enum: 1 normal (default), 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte

Wire types: 0 a varint, 1 eight bytes, 2 a length and as many bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .kinds import hint
from .paths import RegularFile, shown_path

FLOAT = struct.Struct("<f")
FIXED = {1: 8, 5: 4}
VARINT, BYTES, FOUR = 0, 2, 5
TYPES = range(1, 7)


class SentencePiece(NamedTuple):
    """One token: its text in UTF-8, the score that ranks merges, and its type as .gguf files number it."""

    text: bytes
    score: float
    type: int


def read_sentencepiece(path: str) -> list[SentencePiece]:
    """The pieces of a model in the order of their numbers; CheckpointError for any other file."""
    file = RegularFile(path, CheckpointError)
    try:
        data = file.read(0, file.size).tobytes()
    finally:
        file.close()
    try:
        pieces = [_piece(value) for field, value in _fields(data) if field == 1 and isinstance(value, bytes)]
    except (ValueError, struct.error):
        pieces = []
    if not pieces:
        raise CheckpointError(f"{shown_path(path)}: is no SentencePiece model{hint(data)}")
    return pieces


def _piece(data: bytes) -> SentencePiece:
    text, score, kind = b"", 0.0, 1
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, bytes):
            score = FLOAT.unpack(value)[0]
        elif field == 3 and isinstance(value, int):
            kind = value
    if kind not in TYPES or not isfinite(score):
        raise ValueError(kind, score)
    return SentencePiece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int for a varint, else bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == BYTES:
            size, position = _varint(data, position)
        elif wire in FIXED:
            size = FIXED[wire]
        else:
            raise ValueError(wire)
        if size > len(data) - position:
            raise ValueError(size)
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint of seven bits per byte, and the position after it."""
    number = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ValueError(position)
        number |= (data[position] & 127) << shift
        position += 1
        if data[position - 1] < 128:
            return number, position
    raise ValueError(position)
