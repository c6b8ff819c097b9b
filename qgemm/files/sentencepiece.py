"""The pieces of a SentencePiece model (tokenizer.model): a protobuf message, of which no more is read than them.

    ModelProto     field 1, repeated  SentencePiece
    SentencePiece  field 1  piece   string
                   field 2  score   float
                   field 3  type    enum: 1 normal (default), 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte

Wire types: 0 a varint, 1 eight bytes, 2 a length and as many bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .paths import Opened, shown_path

FLOAT = struct.Struct("<f")
FIXED = {1: 8, 5: 4}
VARINT, BYTES, FOUR = 0, 2, 5
TYPES = range(1, 7)


class SentencePiece(NamedTuple):
    """One token: its text in UTF-8, the score by which merges are chosen, and its type as .gguf files number it."""

    text: bytes
    score: float
    type: int


def read_sentencepiece(path: str) -> list[SentencePiece]:
    """The pieces of a model in the order of their numbers; CheckpointError for what is no such file."""
    file = Opened(path, CheckpointError)
    try:
        data = file.read(0, file.size).tobytes()
    finally:
        file.close()
    try:
        found = [_piece(value) for field, value in _fields(data) if field == 1 and isinstance(value, bytes)]
    except (ValueError, struct.error):
        found = []
    if not found:
        raise CheckpointError(f"{shown_path(path)}: is no SentencePiece model")
    return found


def _piece(data: bytes) -> SentencePiece:
    text, score, kind = b"", 0.0, 1
    for field, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            text = value
        elif field == 2 and isinstance(value, bytes):
            score = FLOAT.unpack(value)[0]
        elif field == 3 and isinstance(value, int):
            kind = value
    if kind not in TYPES:
        raise ValueError(kind)
    return SentencePiece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int of a varint, else its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in FIXED:
            size = FIXED[wire]
        else:
            raise ValueError(wire)
        if size > len(data) - at:
            raise ValueError(size)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    found = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError(at)
        found |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return found, at
    raise ValueError(at)
