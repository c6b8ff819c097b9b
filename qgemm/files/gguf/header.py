"""Check every rule of a .gguf file's header in one pass, and record the offsets of values and tensors.

Lengths are compared with the remaining bytes before they are used. Python's integers do not overflow: checking that a
tensor lies inside the file also excludes sizes that would wrap in 64 bits.
"""

from __future__ import annotations

from itertools import chain
from math import inf, prod
from typing import NamedTuple

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from qgemm.codec.format import Format
from qgemm.errors import GGUFError
from qgemm.files.kinds import hint
from qgemm.files.paths import shown, shown_path
from qgemm.files.shards import piece_hint
from qgemm.formats import GGML_TYPES

from .foreign import RIVALS, Foreign, Rival
from .foreign import TYPES as FOREIGN_TYPES
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
    NUMBERS,
    REMOVED,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    STRING,
    U32,
    U64,
    VERSIONS,
    Buffer,
    broken_alignment_rule,
    broken_key_rule,
    broken_name_rule,
    broken_shape_rule,
    read_value,
)


class Place(NamedTuple):
    """The location of a key's value: its type and the offset where it starts."""

    kind: int
    offset: int


PAGE = 4096  # bytes; some programs pad tensors to pages
MAX_BYTES = 2**60  # limit of an empty array, if the zero among its dimensions were a one


class Entry(NamedTuple):
    """One tensor: blocks of `format`, shape (..., N, K) in weights, offset in the file.

    kind: the number of the type in the file.
    """

    format: Format
    shape: tuple[int, ...]
    offset: int
    kind: int

    @property
    def foreign(self) -> Foreign | None:
        """The layout in the file where it is not those blocks."""
        return FOREIGN_TYPES.get(self.kind)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """(..., N, K / weights per block)."""
        return (*self.shape[:-1], self.shape[-1] // self.format.weights)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        if self.foreign is not None:
            return self.foreign.nbytes(self.shape)
        return prod(self.block_shape) * self.format.block_bytes

    @property
    def number_of_blocks(self) -> int:
        """Blocks of the format."""
        return prod(self.block_shape)

    def rival(self, span: int, alignment: int) -> Rival | None:
        """The type of another program under this number that fills these bytes, if this type does not."""

        def fills(nbytes: int) -> bool:
            return nbytes <= span <= -(-nbytes // alignment) * alignment

        rivals = () if fills(self.nbytes) else RIVALS.get(self.kind, ())
        return next((rival for rival in rivals if fills(rival.nbytes(self.shape))), None)


class Split(NamedTuple):
    """A file's place in a split model: its number, from 0, the number of shards, and of tensors in all, if given."""

    shard: int
    shards: int
    tensors: int | None


class Header(NamedTuple):
    """The contents of a checked header. end: the offset after the last tensor's entry, before the padding."""

    version: int
    alignment: int
    keys: dict[str, Place]
    tensors: dict[str, Entry]
    split: Split
    end: int


class EndOfBufferError(Exception):
    """The header is longer than the part of the file that was read."""


def read_header(path: str, data: Buffer, size: int) -> Header:
    """Check the header of a file of `size` bytes, of which `data` are the first.

    GGUFError names `path`, the key or tensor and the first broken rule; EndOfBufferError asks for more bytes.
    """
    walk = _Walk(path, data, size)
    version, tensors, keys = walk.counts()
    places = walk.keys(keys)
    alignment = walk.alignment(places)
    entries = walk.tensors(tensors)
    return Header(version, alignment, places, walk.placed(entries, alignment), walk.split(places), walk.position)


class _Walk:
    """Reads a header from front to back; `place` is named by refusals."""

    def __init__(self, path: str, data: Buffer, size: int) -> None:
        self.path, self.data, self.size, self.end = path, data, size, len(data)
        self.position = 0
        self.place: tuple[str, int | str | bytes | None] = ("header", None)

    def refusal(self, rule: str) -> GGUFError:
        """The error for a broken rule at this place."""
        kind, name = self.place
        if name is not None:
            kind += f" number {name}" if isinstance(name, int) else f" {shown(name)}"
        return GGUFError(f"{shown_path(self.path)}: {kind}: {rule}{piece_hint(self.path)}")

    def take(self, size: int, field: str) -> int:
        """Move past `size` bytes, which must exist; returns their offset."""
        offset, left = self.position, self.size - self.position
        if size > left:
            raise self.refusal(f"the file ends within its {field}: {size} bytes needed, {left} left")
        self.position = offset + size
        if self.position > self.end:
            raise EndOfBufferError
        return offset

    def u32(self, field: str) -> int:
        """Read a u32."""
        number: int = U32.unpack_from(self.data, self.take(4, field))[0]
        return number

    def u64(self, field: str) -> int:
        """Read a u64."""
        number: int = U64.unpack_from(self.data, self.take(8, field))[0]
        return number

    def name(self, limit: int) -> bytes:
        """Read a string, or the first `limit` + 1 bytes of a longer one."""
        length = self.u64("name")
        offset = self.take(length, "name")
        return bytes(self.data[offset : offset + min(length, limit + 1)])

    def counts(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of keys."""
        start = bytes(self.data[:64])
        if not start.startswith(MAGIC):
            raise self.refusal(f"not a GGUF file: it starts with {shown(start[:4])}{hint(start)}")
        self.take(len(MAGIC), "magic")
        version = self.u32("version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
            raise self.refusal("big-endian files are not read, gguf-convert-endian makes them little-endian")
        if version not in VERSIONS:
            raise self.refusal(f"version {version} is not {' or '.join(map(str, VERSIONS))}")
        tensors, keys = self.u64("tensor count"), self.u64("key count")
        least, left = tensors * MIN_TENSOR + keys * MIN_KEY, self.size - self.position
        if least > left:
            raise self.refusal(f"{tensors} tensors and {keys} keys need {least} bytes, {left} are left")
        return version, tensors, keys

    def keys(self, count: int) -> dict[str, Place]:
        """All keys, with the places of their values."""
        places: dict[str, Place] = {}
        for number in range(count):
            self.place = "key", number
            raw = self.name(MAX_KEY_BYTES)
            self.place = "key", raw
            if rule := broken_key_rule(raw):
                raise self.refusal(rule)
            key = raw.decode("ascii")
            if key in places:
                raise self.refusal("this key comes twice")
            kind = self.u32("type")
            places[key] = Place(kind, self.position)
            if kind == ARRAY:
                self.skip(self.u32("element type"), self.u64("length"))
            else:
                self.skip(kind, 1)
        return places

    def skip(self, kind: int, count: int) -> None:
        """Move past values of one type."""
        if kind == ARRAY:
            raise self.refusal("nested arrays are not read: the readers of GGUF disagree on what they mean")
        if kind == STRING:
            self.skip_strings(count)
        elif kind not in NUMBERS:
            raise self.refusal(f"there is no type {kind} of values")
        else:
            offset = self.take(count * NUMBERS[kind].itemsize, "value")
            if kind == BOOL:
                self.check_bools(offset, offset + count)

    def skip_strings(self, count: int) -> None:
        """Move past strings; a vocabulary has 256k of them, so the loop calls nothing but unpack."""
        data, position, last, unpack = self.data, self.position, self.end - 8, U64.unpack_from
        for number in range(count):
            if position > last:
                if position <= self.size - 8:
                    raise EndOfBufferError
                raise self.refusal(f"the file ends before string {number} of {count}")
            position += 8 + unpack(data, position)[0]
        self.take(position - self.position, "string" if count == 1 else "strings")

    def check_bools(self, start: int, end: int) -> None:
        """Refuse bools that are neither 0 nor 1."""
        for offset in range(start, end, 1 << 16):
            if invalid := bytes(self.data[offset : min(offset + (1 << 16), end)]).translate(None, b"\0\1"):
                raise self.refusal(f"a bool must be 0 or 1, is {invalid[0]}")

    def alignment(self, keys: dict[str, Place]) -> int:
        """The alignment of the tensor data."""
        if ALIGNMENT not in keys:
            return GGUF_DEFAULT_ALIGNMENT
        self.place = "key", ALIGNMENT
        kind, offset = keys[ALIGNMENT]
        value = int(read_value(self.data, kind, offset)) if kind in INTEGERS else 0  # type: ignore[arg-type]
        if rule := broken_alignment_rule(kind, value):
            raise self.refusal(rule)
        return value

    def tensors(self, count: int) -> dict[str, Entry]:
        """All tensors, with offsets from the start of the data."""
        entries: dict[str, Entry] = {}
        for number in range(count):
            self.place = "tensor", number
            raw = self.name(MAX_READ_NAME_BYTES)
            self.place = "tensor", raw
            if rule := broken_name_rule(raw, MAX_READ_NAME_BYTES):
                raise self.refusal(rule)
            name = raw.decode("utf-8")
            if name in entries:
                raise self.refusal("this name comes twice")
            dims = self.u32("n_dims")
            if dims not in NE:
                raise self.refusal(f"{dims} dimensions are not 1 to {MAX_DIMS}")
            ne = NE[dims].unpack_from(self.data, self.take(8 * dims, "dimensions"))
            kind, offset = self.u32("type"), self.u64("offset")
            foreign = FOREIGN_TYPES.get(kind)
            fmt = GGML_TYPES.get(kind) if foreign is None else foreign.format
            if fmt is None:
                reason = f"was {REMOVED[kind]}, which ggml removed" if kind in REMOVED else "is unknown"
                raise self.refusal(f"type {kind} {reason}")
            rule = broken_shape_rule(fmt, ne[::-1])
            if rule := rule or ("" if foreign is None else foreign.broken_shape_rule(ne[::-1])):
                raise self.refusal(rule)
            if 0 in ne and prod(filter(None, ne)) * fmt.block_bytes > MAX_BYTES:
                raise self.refusal(f"shape {ne[::-1]} is too large for an array, even without elements")
            entries[name] = Entry(fmt, ne[::-1], offset, kind)
        return entries

    def placed(self, tensors: dict[str, Entry], alignment: int) -> dict[str, Entry]:
        """The tensors with offsets from the start of the file, checked to be aligned, inside it, and disjoint.

        Any order, gaps, and missing or extra bytes after the last tensor are accepted. But a gap beyond a page, of at
        least one byte per block of the tensor before it, means blocks of another size: the file comes from a fork of
        llama.cpp that uses the type's number for another type. A tensor without elements may have any offset: it
        overlaps nothing, and `convert --drop` must be able to open its file.
        """
        data = -(-self.position // alignment) * alignment
        before, end, suspicious = "", 0, inf  # suspicious: the smallest gap that means blocks of another size
        for name, entry in tensors.items():
            if entry.offset % alignment:
                self.place = "tensor", name
                raise self.refusal(f"offset {entry.offset} is not a multiple of the alignment {alignment}")
        with_bytes = ((name, entry) for name, entry in tensors.items() if entry.nbytes)
        in_order = sorted(with_bytes, key=lambda item: item[1].offset)
        following = chain((entry.offset for _, entry in in_order[1:]), [self.size - data])
        for (name, entry), after in zip(in_order, following, strict=False):
            self.place = "tensor", name
            if rival := entry.rival(after - entry.offset, alignment):
                own = f"{entry.format} of llama.cpp" if entry.foreign is None else str(entry.foreign)
                reason = f"its size is that of {rival}, not of {own}; both use the number {entry.kind}"
                raise self.refusal(reason)
            if entry.offset < end:
                raise self.refusal(f"offset {entry.offset} lies inside tensor {shown(before)}")
            if entry.offset - end >= suspicious:
                gap = f"lies {entry.offset - end} bytes after tensor {shown(before)}, whose blocks are of another size"
                raise self.refusal(f"offset {entry.offset} {gap}: {tensors[before].format} of another program")
            before, end = name, entry.offset + entry.nbytes
            suspicious = max(PAGE, entry.nbytes // entry.format.block_bytes) if entry.format.weights > 1 else inf
            if data + end > self.size:
                raise self.refusal(f"the file ends within its data: it has {self.size} of {data + end} bytes")
        return {name: entry._replace(offset=data + entry.offset) for name, entry in tensors.items()}

    def split(self, keys: dict[str, Place]) -> Split:
        """The file's place in a split model; 0 of 1 for a whole file, for which merged files store 0 of 0."""
        shard = self.counted(SPLIT_NO, keys) or 0
        shards = self.counted(SPLIT_COUNT, keys) or 1
        if shard >= shards:
            self.place = "key", SPLIT_NO
            raise self.refusal(f"shard {shard}, counted from 0, is not one of {shards}")
        return Split(shard, shards, self.counted(SPLIT_TENSORS, keys))

    def counted(self, key: str, keys: dict[str, Place]) -> int | None:
        """The value of a key that counts, None without the key."""
        if key not in keys:
            return None
        self.place = "key", key
        kind, offset = keys[key]
        if kind not in INTEGERS:
            raise self.refusal(f"must be an integer, is {GGUFValueType(kind).name}")
        value = int(read_value(self.data, kind, offset))  # type: ignore[arg-type]
        if value < 0:
            raise self.refusal(f"must not be negative, is {value}")
        return value
