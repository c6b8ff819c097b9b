"""The header of a .safetensors file: JSON of one form, read strictly and from front to back.

    {"__metadata__": {"a": "text", ...}, "NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

What a JSON library makes of text may be twenty times as long. Here the first thing out of place ends the reading, what
is said of a tensor is matched by one pattern, and nothing is made of what is neither a tensor nor a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .paths import shown

METADATA = "__metadata__"
SPACES = b" \t\r\n"
MOST_NUMBERS = 1500  # bytes of a list: of more axes than any tensor has
KEYS = b"dtype", b"shape", b"data_offsets"
DIGITS = re.compile(rb"[0-9]+")


def _pattern(text: bytes) -> re.Pattern[bytes]:
    """A pattern in which ~ stands for spaces."""
    return re.compile(text.replace(b"~", b"[" + SPACES + b"]*"))


STARTS = tuple(SPACES[i : i + 1] for i in range(len(SPACES)))
SKIP = _pattern(b"~")
PLAIN = _pattern(rb'"([^"\\\x00-\x1f\x80-\xff]*)"~')  # a string as it stands
FIELD = rb'"(dtype|shape|data_offsets)"~:~("[^"\\\x00-\x1f]{0,20}"|\[[^][{}":]{0,%d}\])' % MOST_NUMBERS
TENSOR = _pattern(rb"{~FIELD~,~FIELD~,~FIELD~}~".replace(b"FIELD", FIELD))
NUMBERS = _pattern(rb"\[~(?:NUMBER(?:,~NUMBER)*)?\]".replace(b"NUMBER", rb"(?:0|[1-9][0-9]{0,18})~"))
STRING = json.JSONDecoder()


class Described(NamedTuple):
    """What a header says of a tensor."""

    type: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def parsed(
    raw: bytes, most: int, refusal: Callable[[str], CheckpointError]
) -> tuple[dict[str, Described], dict[str, str]]:
    """The tensors that a header lists, and its metadata, at most so many of both; refusal(rule) is raised."""
    walk = _Walk(raw, most, refusal)
    if not raw.startswith(b"{"):
        raise refusal(f"header: is not a JSON object: it starts with {shown(raw[:4])}")
    tensors: dict[str, Described] = {}
    metadata: dict[str, str] | None = None
    for name in walk.names():
        if name == METADATA and metadata is None:
            metadata = walk.strings()
        elif name in tensors or name == METADATA:
            raise refusal("header: a name comes twice")
        else:
            tensors[name] = walk.tensor(name)
    if walk.at != len(raw):
        raise refusal(f"header: has {shown(raw[walk.at :])} behind its end")
    return tensors, metadata or {}


class _Walk:
    """Goes over a header once; `at` is where it is."""

    def __init__(self, raw: bytes, most: int, refusal: Callable[[str], CheckpointError]) -> None:
        self.raw, self.most, self.refusal = raw, most, refusal
        self.text = raw.decode("latin-1")  # of as many characters as bytes: where strings end in it, they end in both
        self.at = 0

    def take(self, expected: bytes) -> bytes:
        """Move over one of some characters, with the spaces around it."""
        found = self.raw[self.at : self.at + 1]
        if not found or found not in expected:
            rule = f"has {shown(self.raw[self.at :])} at byte {self.at}" if found else "ends"
            raise self.refusal(f"header: {rule} where {' or '.join(expected.decode())} must be")
        self.at += 1
        if self.raw.startswith(STARTS, self.at):
            self.skip()
        return found

    def skip(self) -> None:
        """Move over spaces."""
        if spaces := SKIP.match(self.raw, self.at):
            self.at = spaces.end()

    def names(self) -> Iterator[str]:
        """The names in an object, each with the walk at its value, which must be moved over."""
        self.take(b"{")
        if self.raw[self.at : self.at + 1] == b"}":
            self.take(b"}")
            return
        while True:
            self.most -= 1
            if self.most < 0:
                raise self.refusal("header: lists more tensors than so short a file can have")
            name = self.string()
            self.take(b":")
            yield name
            if self.take(b",}") == b"}":
                return

    def string(self) -> str:
        """Move over a string, and the spaces behind it."""
        start = self.at
        if plain := PLAIN.match(self.raw, start):
            self.at = plain.end()
            return str(plain[1], "ascii")
        if self.raw[start : start + 1] != b'"':
            self.take(b'"')
        try:
            end = STRING.raw_decode(self.text, start)[1]
            found = self.raw[start:end].decode("utf-8")
            found = str(json.loads(found)) if "\\" in found else found[1:-1]
            found.encode("utf-8")
        except ValueError as error:
            raise self.refusal(f"header: a string at byte {start} is not one of UTF-8: {error}") from None
        self.at = end
        self.skip()
        return found

    def strings(self) -> dict[str, str]:
        """Move over an object of strings."""
        found: dict[str, str] = {}
        if self.raw[self.at : self.at + 1] != b"{":
            raise self.refusal(f"header: {METADATA} must be an object of strings")
        for name in self.names():
            if self.raw[self.at : self.at + 1] != b'"':
                raise self.refusal(f"header: {METADATA} must be an object of strings")
            if name in found:
                raise self.refusal(f"header: {METADATA}: a name comes twice")
            found[name] = self.string()
        return found

    def tensor(self, name: str) -> Described:
        """Move over what is said of a tensor."""
        found = TENSOR.match(self.raw, self.at)
        fields = {} if found is None else dict(zip(found.groups()[::2], found.groups()[1::2], strict=True))
        if found is None or len(fields) < len(KEYS):
            raise self.refusal(f"tensor {shown(name)}: must have dtype, shape and data_offsets, and nothing else")
        self.at = found.end()
        kind, shape, offsets = (fields[key] for key in KEYS)
        if not kind.startswith(b'"'):
            raise self.refusal(f"tensor {shown(name)}: dtype {shown(kind)} is not the name of one")
        for key, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not NUMBERS.fullmatch(numbers):
                raise self.refusal(f"tensor {shown(name)}: {key} must be a list of whole numbers, is {shown(numbers)}")
        return Described(
            str(kind[1:-1], "latin-1"), tuple(map(int, DIGITS.findall(shape))), tuple(map(int, DIGITS.findall(offsets)))
        )
