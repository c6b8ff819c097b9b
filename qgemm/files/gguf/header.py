"""One pass over the header of a mapped .gguf file, which checks every rule and notes where things are.

Lengths are held against the bytes left before anything is done with them. Python's integers do not overflow:
that a tensor lies inside the file also rules out every size that would wrap in 64 bits.
"""

from __future__ import annotations

from math import inf, prod
from mmap import mmap
from typing import NamedTuple

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from qgemm.codec.format import Format
from qgemm.errors import GGUFError
from qgemm.files.paths import shown, shown_path
from qgemm.formats import GGML_TYPES

from .layout import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    INTEGERS,
    MAGIC,
    MAX_DIMS,
    MAX_KEY_BYTES,
    MAX_READ_NAME_BYTES,
    MIN_KEY,
    MIN_TENSOR,
    NE,
    NOT_GGUF,
    NUMBERS,
    REMOVED,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    STRING,
    U32,
    U64,
    VERSIONS,
    broken_alignment_rule,
    broken_key_rule,
    broken_name_rule,
    broken_shape_rule,
    read_value,
)


class Place(NamedTuple):
    """Where a key's value is: its type and the byte at which it starts."""

    kind: int
    at: int


PAGE = 4096  # bytes, to which some programs pad tensors


class Entry(NamedTuple):
    """One tensor: blocks of `format`, shape (..., N, K) in weights, first byte in the file."""

    format: Format
    shape: tuple[int, ...]
    offset: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """(..., N, K / weights per block)."""
        return (*self.shape[:-1], self.shape[-1] // self.format.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return prod(self.block_shape) * self.format.block_bytes


class Split(NamedTuple):
    """A file's place in a split model: which shard, from 0, of how many; the tensors of all, if it says."""

    shard: int
    shards: int
    tensors: int | None


class Header(NamedTuple):
    """What a checked header says."""

    version: int
    alignment: int
    keys: dict[str, Place]
    tensors: dict[str, Entry]
    split: Split


def read_header(path: str, data: mmap) -> Header:
    """Check the header of a mapped file; GGUFError names `path`, the place and the first broken rule."""
    walk = _Walk(path, data)
    version, tensors, keys = walk.counts()
    found = walk.keys(keys)
    alignment = walk.alignment(found)
    entries = walk.tensors(tensors)
    return Header(version, alignment, found, walk.placed(entries, alignment), walk.split(found))


class _Walk:
    """Goes over a header from front to back; `place` is what a refusal names."""

    def __init__(self, path: str, data: mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.at = 0
        self.place: tuple[str, int | str | bytes | None] = ("header", None)

    def refusal(self, rule: str) -> GGUFError:
        """The error for a broken rule at this place."""
        kind, which = self.place
        if which is not None:
            kind += f" number {which}" if isinstance(which, int) else f" {shown(which)}"
        return GGUFError(f"{shown_path(self.path)}: {kind}: {rule}")

    def take(self, size: int, what: str) -> int:
        """Move over `size` bytes, which must be there; returns where they start."""
        at, left = self.at, self.size - self.at
        if size > left:
            raise self.refusal(f"the file ends within its {what}: {size} bytes needed, {left} left")
        self.at = at + size
        return at

    def u32(self, what: str) -> int:
        """Read a u32."""
        number: int = U32.unpack_from(self.data, self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """Read a u64."""
        number: int = U64.unpack_from(self.data, self.take(8, what))[0]
        return number

    def name(self, most: int) -> bytes:
        """Read a string, or of one longer than `most` enough to see that it is."""
        length = self.u64("name")
        at = self.take(length, "name")
        return self.data[at : at + min(length, most + 1)]

    def counts(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of keys."""
        start = self.data[:64]
        if not start.startswith(MAGIC):
            hints = (f", it is {what}" for at, magic, what in NOT_GGUF if start[at:].startswith(magic))
            raise self.refusal(f"not a GGUF file: it starts with {shown(start[:4])}{next(hints, '')}")
        self.take(len(MAGIC), "magic")
        version = self.u32("version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
            raise self.refusal("big-endian files are not read, gguf-convert-endian makes them little-endian")
        if version not in VERSIONS:
            raise self.refusal(f"version {version} is not {' or '.join(map(str, VERSIONS))}")
        tensors, keys = self.u64("tensor count"), self.u64("key count")
        least, left = tensors * MIN_TENSOR + keys * MIN_KEY, self.size - self.at
        if least > left:
            raise self.refusal(f"{tensors} tensors and {keys} keys need {least} bytes, {left} are left")
        return version, tensors, keys

    def keys(self, count: int) -> dict[str, Place]:
        """Every key."""
        found: dict[str, Place] = {}
        for number in range(count):
            self.place = "key", number
            raw = self.name(MAX_KEY_BYTES)
            self.place = "key", raw
            if rule := broken_key_rule(raw):
                raise self.refusal(rule)
            key = raw.decode("ascii")
            if key in found:
                raise self.refusal("this key comes twice")
            kind = self.u32("type")
            found[key] = Place(kind, self.at)
            if kind == ARRAY:
                self.skip(self.u32("element type"), self.u64("length"))
            else:
                self.skip(kind, 1)
        return found

    def skip(self, kind: int, count: int) -> None:
        """Move over values of one type."""
        if kind == ARRAY:
            raise self.refusal("nested arrays are not read: the readers of GGUF disagree on what they mean")
        if kind == STRING:
            self.skip_strings(count)
        elif kind not in NUMBERS:
            raise self.refusal(f"there is no type {kind} of values")
        else:
            at = self.take(count * NUMBERS[kind].itemsize, "value")
            if kind == BOOL:
                self.check_bools(at, at + count)

    def skip_strings(self, count: int) -> None:
        """Move over strings; a vocabulary has 256k of them, so the loop calls nothing but unpack."""
        data, at, last, unpack = self.data, self.at, self.size - 8, U64.unpack_from
        for number in range(count):
            if at > last:
                raise self.refusal(f"the file ends before string {number} of {count}")
            at += 8 + unpack(data, at)[0]
        self.take(at - self.at, "string" if count == 1 else "strings")

    def check_bools(self, start: int, end: int) -> None:
        """Refuse bools that are neither 0 nor 1."""
        for at in range(start, end, 1 << 16):
            if other := self.data[at : min(at + (1 << 16), end)].translate(None, b"\0\1"):
                raise self.refusal(f"a bool must be 0 or 1, is {other[0]}")

    def alignment(self, keys: dict[str, Place]) -> int:
        """The alignment of the tensor data."""
        if ALIGNMENT not in keys:
            return GGUF_DEFAULT_ALIGNMENT
        self.place = "key", ALIGNMENT
        kind, at = keys[ALIGNMENT]
        value = int(read_value(self.data, kind, at)) if kind in INTEGERS else 0  # type: ignore[arg-type]
        if rule := broken_alignment_rule(kind, value):
            raise self.refusal(rule)
        return value

    def tensors(self, count: int) -> dict[str, Entry]:
        """Every tensor, with its offset still counted from the start of the data."""
        found: dict[str, Entry] = {}
        for number in range(count):
            self.place = "tensor", number
            raw = self.name(MAX_READ_NAME_BYTES)
            self.place = "tensor", raw
            if rule := broken_name_rule(raw, MAX_READ_NAME_BYTES):
                raise self.refusal(rule)
            name = raw.decode("utf-8")
            if name in found:
                raise self.refusal("this name comes twice")
            dims = self.u32("n_dims")
            if dims not in NE:
                raise self.refusal(f"{dims} dimensions are not 1 to {MAX_DIMS}")
            ne = NE[dims].unpack_from(self.data, self.take(8 * dims, "dimensions"))
            kind, offset = self.u32("type"), self.u64("offset")
            fmt = GGML_TYPES.get(kind)
            if fmt is None:
                why = f"was {REMOVED[kind]}, which ggml removed" if kind in REMOVED else "is unknown"
                raise self.refusal(f"type {kind} {why}")
            if rule := broken_shape_rule(fmt, ne[::-1]):
                raise self.refusal(rule)
            found[name] = Entry(fmt, ne[::-1], offset)
        return found

    def placed(self, tensors: dict[str, Entry], alignment: int) -> dict[str, Entry]:
        """The tensors with offsets from the start of the file: aligned, inside it, apart from each other.

        Any order, gaps between tensors, bytes behind the last one or its padding missing do no harm. A gap of a byte
        and more for each block before it, beyond what padding to a page explains, is none: the blocks have another
        size, in a file of a fork of llama.cpp to which the type's number is another type.
        """
        data = -(-self.at // alignment) * alignment
        before, end, another = "", 0, inf  # another: the gap from which on the blocks before are others
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].offset):
            self.place = "tensor", name
            if entry.offset % alignment:
                raise self.refusal(f"offset {entry.offset} is not a multiple of the alignment {alignment}")
            if entry.offset < end:
                raise self.refusal(f"offset {entry.offset} lies inside tensor {shown(before)}")
            if entry.offset - end >= another:
                why = f"lies {entry.offset - end} bytes behind tensor {shown(before)}, whose blocks are of another size"
                raise self.refusal(f"offset {entry.offset} {why}: {tensors[before].format} of another program")
            before, end = name, entry.offset + entry.nbytes
            another = max(PAGE, entry.nbytes // entry.format.block_bytes) if entry.format.weights > 1 else inf
            if data + end > self.size:
                raise self.refusal(f"the file ends within its data: it has {self.size} of {data + end} bytes")
        return {name: entry._replace(offset=data + entry.offset) for name, entry in tensors.items()}

    def split(self, keys: dict[str, Place]) -> Split:
        """The file's place in a split model: 0 of 1 if it is whole, for which merged files say 0 of 0."""
        shard = self.counted(SPLIT_NO, keys) or 0
        shards = self.counted(SPLIT_COUNT, keys) or 1
        if shard >= shards:
            self.place = "key", SPLIT_NO
            raise self.refusal(f"shard {shard}, counted from 0, is not one of {shards}")
        return Split(shard, shards, self.counted(SPLIT_TENSORS, keys))

    def counted(self, key: str, keys: dict[str, Place]) -> int | None:
        """The value of a key that counts something, None without that key."""
        if key not in keys:
            return None
        self.place = "key", key
        kind, at = keys[key]
        if kind not in INTEGERS:
            raise self.refusal(f"must be an integer, is {GGUFValueType(kind).name}")
        value = int(read_value(self.data, kind, at))  # type: ignore[arg-type]
        if value < 0:
            raise self.refusal(f"must not be negative, is {value}")
        return value
