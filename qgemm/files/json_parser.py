"""JSON of inputs, parsed at bounded cost: every other module that reads JSON calls this one.

The depth of the text, its numbers and its names are checked here, so that no input raises anything but the caller's
error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from qgemm.errors import QgemmError

from .kinds import hint

FREE_BRACKETS, BYTES_PER_BRACKET = 1 << 14, 16  # bounds: an empty list of 2 bytes costs 64 in memory
# Python's parser recurses into lists and objects, and fails anywhere near the interpreter's limit, which depends on the
# caller's depth. The deepest objects of real files, in a tokenizer.json, are nested 7 deep.
MAX_DEPTH = 64
# Limit of a number: Python's conversion needs time quadratic in the digits. transformers writes 10^30, which has 31
# digits, for a tokenizer without a maximum length.
MAX_DIGITS = 32
NOT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
STRING = json.JSONDecoder()


def parse_object(raw: bytes, refusal: Callable[[str], QgemmError]) -> dict[str, Any]:
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name comes twice in an object")
    return values


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)
