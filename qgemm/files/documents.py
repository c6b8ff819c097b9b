"""JSON files of a checkpoint, its configs and its index, read as objects at bounded cost.

Every JSON text of an input is parsed here: its depth, its numbers and its names are checked in one place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from qgemm.errors import CheckpointError

from .kinds import POINTER, hint
from .limits import FREE_TEXT, longest_text
from .paths import RegularFile, shown, shown_path, system_errors

WEIGHTS = ".safetensors"
FREE_BRACKETS, BYTES_PER_BRACKET = 1 << 14, 16  # bounds: an empty list of 2 bytes costs 64 in memory
# Python's parser recurses into lists and objects, and fails anywhere near the interpreter's limit, which depends on the
# caller's depth. The deepest objects of real files, in a tokenizer.json, are nested 7 deep.
MAX_DEPTH = 64
# Limit of a number: Python's conversion needs time quadratic in the digits. transformers writes 10^30, which has 31
# digits, for a tokenizer without a maximum length.
MAX_DIGITS = 32
NOT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
STRING = json.JSONDecoder()


def shards(path: str) -> dict[str, str]:
    """Tensor name -> path of its file, from an index (model.safetensors.index.json)."""
    where = shown_path(path)
    files = json_object(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{where}: weight_map must be an object of file names")
    for file in dict.fromkeys(files.values()):
        if file != os.path.basename(file) or not file.endswith(WEIGHTS) or "\0" in file:
            raise CheckpointError(f"{where}: weight_map: {shown(file)} is not the name of a {WEIGHTS} file beside it")
    return {name: os.path.join(os.path.dirname(path), file) for name, file in files.items()}


def json_object(path: str) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError for anything else, or a file too long for the weights beside it."""
    return parse_object(_read(path), lambda rule: CheckpointError(f"{shown_path(path)}: {rule}"))


def text_file(path: str) -> str:
    """The text of a file beside weights; CheckpointError if it is not UTF-8 or too long for the weights."""
    raw, where = _read(path), shown_path(path)
    if raw.startswith(POINTER):
        raise CheckpointError(f"{where}: is not the text itself{hint(raw)}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not UTF-8: {error}") from None


def parse_object(raw: bytes, refusal: Callable[[str], CheckpointError]) -> dict[str, Any]:
    """The object in a JSON text; refusal(rule) makes the error.

    NaN and Infinity are numbers, as Python writes them: who uses a number checks its range.
    """
    if raw.count(b"[") + raw.count(b"{") > FREE_BRACKETS + len(raw) // BYTES_PER_BRACKET:
        raise refusal("is made of brackets")
    if (depth := _depth(raw)) > MAX_DEPTH:
        raise refusal(f"is JSON nested {depth} deep, at most {MAX_DEPTH} are read")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_int=_integer)
    except ValueError as error:
        raise refusal(f"is not JSON that is read: {error}{hint(raw)}") from None
    if not isinstance(value, dict):
        raise refusal("is not a JSON object")
    return value


def parse_string(raw: bytes, text: str, start: int) -> tuple[str, int]:
    """The string at the quote at raw[start], and its end; ValueError if it is none of UTF-8.

    text: raw as latin-1, one character per byte, so that strings end at the same index in both.
    """
    end = STRING.raw_decode(text, start)[1]
    quoted = raw[start:end].decode("utf-8")
    string = str(json.loads(quoted)) if "\\" in quoted else quoted[1:-1]
    string.encode("utf-8")  # an escape may be half of a surrogate pair
    return string, end


def _depth(raw: bytes) -> int:
    """The depth of the brackets outside strings. At an error, where a parser stops, the depth up to there is right."""
    marks = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NOT_MARKS)
    codes = np.frombuffer(marks, np.uint8)
    outside = np.bitwise_xor.accumulate(codes == ord('"')) == 0
    opening, closing = (((codes == pair[0]) | (codes == pair[1])) & outside for pair in (b"[{", b"]}"))
    return int(np.cumsum(opening.astype(np.int32) - closing).max(initial=0))


def _read(path: str) -> bytes:
    file = RegularFile(path, CheckpointError)
    try:
        if file.size > FREE_TEXT and file.size > (limit := longest_text(FREE_TEXT, _weights_beside(path))):
            rule = f"has {file.size} bytes, the weights beside it cannot need more than {limit}"
            raise CheckpointError(f"{shown_path(path)}: {rule}")
        return file.read(0, file.size).tobytes()
    finally:
        file.close()


def _weights_beside(path: str) -> int:
    """Bytes of the weights in a file's folder."""
    with system_errors(path, "read"), os.scandir(os.path.dirname(path) or ".") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(WEIGHTS) and entry.is_file())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name comes twice in an object")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)
