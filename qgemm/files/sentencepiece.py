"""A SentencePiece model (tokenizer.model), a protobuf message: its pieces, and how it normalizes text.

    ModelProto      field 1, repeated  SentencePiece
                    field 2  TrainerSpec
                    field 3  NormalizerSpec
    SentencePiece   field 1  piece   string
                    field 2  score   float
                    field 3  type    enum: 1 normal (default), 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    TrainerSpec     field 3  model_type  enum: 1 unigram (default), 2 BPE, 3 words, 4 characters
    NormalizerSpec  field 2  precompiled_charsmap  bytes
                    field 3  add_dummy_prefix  bool (default true)
                    field 4  remove_extra_whitespaces  bool (default true)

Other fields are skipped.

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
VARINT, BYTES = 0, 2
TYPES = range(1, 7)
UNIGRAM, WORDS, CHARACTERS = 1, 3, 4


class SentencePiece(NamedTuple):
    """One token: its text in UTF-8, the score that ranks merges, and its type as .gguf files number it."""

    text: bytes
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    """The pieces in the order of their numbers, and settings.

    unigram: whether text becomes the likeliest pieces; otherwise pairs are merged by scores. leading_space: whether
    text gets a leading space. runs_joined: whether runs of spaces become one. normalization: the table of characters
    that are replaced, empty for none.
    """

    pieces: list[SentencePiece]
    unigram: bool
    leading_space: bool
    runs_joined: bool
    normalization: bytes


def read_sentencepiece(path: str) -> SentencePieceModel:
    """The model in a file; CheckpointError for any other file, and for one of words or characters."""
    file = RegularFile(path, CheckpointError)
    try:
        data = file.read(0, file.size).tobytes()
    finally:
        file.close()
    pieces, trainer, normalizer = [], None, b""
    try:
        for field, value in _fields(data):
            if field == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif field == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value)).get(3, UNIGRAM)
            elif field == 3 and isinstance(value, bytes):
                normalizer = value
        settings = dict(_fields(normalizer))
    except (ValueError, struct.error):
        pieces = []
    if not pieces:
        raise CheckpointError(f"{shown_path(path)}: is no SentencePiece model{hint(data)}")
    if trainer in (WORDS, CHARACTERS):
        raise CheckpointError(f"{shown_path(path)}: model_type {trainer} is not read, unigram and BPE are")
    table = settings.get(2, b"")
    return SentencePieceModel(
        pieces, trainer == UNIGRAM, settings.get(3, 1) != 0, settings.get(4, 1) != 0,
        table if isinstance(table, bytes) else b"",
    )  # fmt: skip


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
