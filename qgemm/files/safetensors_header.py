"""The header of a .safetensors file: JSON of one form, read strictly and from front to back.

    {"__metadata__": {"a": "text", ...}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

A JSON library may need twenty times the memory of the text. Here the first error ends the reading, one pattern matches
the description of a tensor, and nothing else is turned into objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .json_parser import parse_string
from .limits import MAX_EMPTY
from .paths import shown

METADATA = "__metadata__"
SPACES = b" \t\r\n"
MAX_LIST_BYTES = 1500  # more than the list of any tensor's axes
KEYS = b"dtype", b"shape", b"data_offsets"
DIGITS = re.compile(rb"[0-9]+")


def _pattern(text: bytes) -> re.Pattern[bytes]:
    """A pattern in which ~ stands for spaces."""
    return re.compile(text.replace(b"~", b"[" + SPACES + b"]*"))


STARTS = tuple(SPACES[i : i + 1] for i in range(len(SPACES)))
SKIP = _pattern(b"~")
PLAIN = _pattern(rb'"([^"\\\x00-\x1f\x80-\xff]*)"~')  # a string without escapes
FIELD = rb'"(dtype|shape|data_offsets)"~:~("[^"\\\x00-\x1f]{0,20}"|\[[^][{}":]{0,%d}\])' % MAX_LIST_BYTES
TENSOR = _pattern(rb"{~FIELD~,~FIELD~,~FIELD~}~".replace(b"FIELD", FIELD))
NUMBERS = _pattern(rb"\[~(?:NUMBER(?:,~NUMBER)*)?\]".replace(b"NUMBER", rb"(?:0|[1-9][0-9]{0,18})~"))


class Described(NamedTuple):
    """The description of a tensor in a header."""

    type: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def parse_header(
    raw: bytes, limit: int, refusal: Callable[[str], CheckpointError]
) -> tuple[dict[str, Described], dict[str, str]]:
    """The tensors of a header, and its metadata, of both together at most `limit`; refusal(rule) makes the error."""
    walk = _Walk(raw, limit, refusal)
    if not raw.startswith(b"{"):
        raise refusal(f"header: is not a JSON object: it starts with {shown(raw[:4])}")
    tensors: dict[str, Described] = {}
    metadata: dict[str, str] | None = None
    empty = 0
    for name in walk.names():
        if name == METADATA and metadata is None:
            metadata = walk.strings()
        elif name in tensors or name == METADATA:
            raise refusal("header: a name comes twice")
        else:
            tensors[name] = described = walk.tensor(name)
            empty += 0 in described.shape
            if empty > MAX_EMPTY:
                raise refusal(f"header: lists more than {MAX_EMPTY} tensors without data, {shown(name)} is one")
    if walk.position != len(raw):
        raise refusal(f"header: has {shown(raw[walk.position :])} after its end")
    return tensors, metadata or {}


class _Walk:
    """Reads a header once from front to back; `position` is the next byte."""

    def __init__(self, raw: bytes, limit: int, refusal: Callable[[str], CheckpointError]) -> None:
        self.raw, self.limit, self.refusal = raw, limit, refusal
        self.text = raw.decode("latin-1")  # one character per byte, so that strings end at the same index in both
        self.position = 0

    def take(self, expected: bytes) -> bytes:
        """Move past one of these characters and the spaces after it."""
        character = self.raw[self.position : self.position + 1]
        if not character or character not in expected:
            rule = f"has {shown(self.raw[self.position :])} at byte {self.position}" if character else "ends"
            raise self.refusal(f"header: {rule} where {' or '.join(expected.decode())} must be")
        self.position += 1
        if self.raw.startswith(STARTS, self.position):
            self.skip()
        return character

    def skip(self) -> None:
        """Move past spaces."""
        if spaces := SKIP.match(self.raw, self.position):
            self.position = spaces.end()

    def names(self) -> Iterator[str]:
        """The names in an object; the caller must move past each value before the next name."""
        self.take(b"{")
        if self.raw[self.position : self.position + 1] == b"}":
            self.take(b"}")
            return
        while True:
            self.limit -= 1
            if self.limit < 0:
                raise self.refusal("header: lists more tensors than so short a file can have")
            name = self.string()
            self.take(b":")
            yield name
            if self.take(b",}") == b"}":
                return

    def string(self) -> str:
        """Move past a string and the spaces after it."""
        start = self.position
        if plain := PLAIN.match(self.raw, start):
            self.position = plain.end()
            return str(plain[1], "ascii")
        if self.raw[start : start + 1] != b'"':
            self.take(b'"')
        try:
            text, end = parse_string(self.raw, self.text, start)
        except ValueError as error:
            raise self.refusal(f"header: a string at byte {start} is not one of UTF-8: {error}") from None
        self.position = end
        self.skip()
        return text

    def strings(self) -> dict[str, str]:
        """Move past an object of strings."""
        strings_by_name: dict[str, str] = {}
        if self.raw[self.position : self.position + 1] != b"{":
            raise self.refusal(f"header: {METADATA} must be an object of strings")
        for name in self.names():
            if self.raw[self.position : self.position + 1] != b'"':
                raise self.refusal(f"header: {METADATA} must be an object of strings")
            if name in strings_by_name:
                raise self.refusal(f"header: {METADATA}: a name comes twice")
            strings_by_name[name] = self.string()
        return strings_by_name

    def tensor(self, name: str) -> Described:
        """Move past the description of a tensor."""
        match = TENSOR.match(self.raw, self.position)
        fields = {} if match is None else dict(zip(match.groups()[::2], match.groups()[1::2], strict=True))
        if match is None or len(fields) < len(KEYS):
            raise self.refusal(f"tensor {shown(name)}: must have dtype, shape and data_offsets, and nothing else")
        self.position = match.end()
        kind, shape, offsets = (fields[key] for key in KEYS)
        if not kind.startswith(b'"'):
            raise self.refusal(f"tensor {shown(name)}: dtype {shown(kind)} is not the name of one")
        for key, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not NUMBERS.fullmatch(numbers):
                raise self.refusal(f"tensor {shown(name)}: {key} must be a list of whole numbers, is {shown(numbers)}")
        return Described(
            str(kind[1:-1], "latin-1"), tuple(map(int, DIGITS.findall(shape))), tuple(map(int, DIGITS.findall(offsets)))
        )
