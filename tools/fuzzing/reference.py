"""The rules for readable files: slow, strict, and written from the specifications, without importing qgemm.

Each function raises Invalid for files that must be refused, and Unsure for files that this reference does not judge;
otherwise it returns the content. Files are bytes by name.
"""

from __future__ import annotations

import re
import struct
import zlib
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

Files = dict[str, bytes]
Tensor = tuple[str, tuple[int, ...], bytes]  # a tensor of a checkpoint: type, shape, data


class Invalid(Exception):
    """The file must be refused."""


class Unsure(Exception):
    """This reference cannot judge the file."""


def need(holds: object, rule: str) -> None:
    """Raise Invalid unless a rule holds."""
    if not holds:
        raise Invalid(rule)


def utf8(raw: bytes) -> str:
    """Decode UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("not UTF-8") from None


# ---------------------------------------------------------------- .gguf

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, BOOL, U32 = 8, 9, 7, 4
INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
SPLIT = ("split.no", "split.count", "split.tensors.count")
PARTS = (".kbit_absmax", ".kbit_planes", ".kbit_codebook")
I8, I32, F32, F16 = 24, 26, 0, 1
SIZES = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()} | {
    9: (32, 36),
    42: (64, 18),
}  # Q8_1, for which the package has a wrong size; Q2_0


class Cursor:
    """A position in bytes that are read in order."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.position = raw, 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes; Invalid if there are fewer."""
        need(0 <= size <= len(self.raw) - self.position, "ends too early")
        self.position += size
        return self.raw[self.position - size : self.position]

    def number(self, code: str) -> Any:
        """The next number."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> bytes:
        """The next string of .gguf."""
        return self.take(self.number("<Q"))


def gguf_value(cursor: Cursor, kind: int, nested: bool = False) -> Any:
    """A value of a key: bytes of a string, a number or a list."""
    if kind == STRING:
        return cursor.string()
    if kind == ARRAY:
        need(not nested, "nested arrays")
        inner, count = cursor.number("<I"), cursor.number("<Q")
        need(inner == STRING or inner in SCALARS, "no type of elements")
        need(count <= len(cursor.raw), "more elements than bytes")
        return [gguf_value(cursor, inner, True) for _ in range(count)]
    need(kind in SCALARS, "no type of values")
    if kind == BOOL:
        raw = cursor.take(1)
        need(raw in (b"\0", b"\1"), "a bool of neither 0 nor 1")
        return raw == b"\1"
    return cursor.number(SCALARS[kind])


class Gguf:
    """The content of a .gguf file: keys as (type, value), tensors as (type, shape slowest first, bytes)."""

    def __init__(self, raw: bytes) -> None:
        cursor = Cursor(raw)
        need(cursor.take(4) == b"GGUF", "magic")
        self.version = cursor.number("<I")
        need(self.version in (2, 3), "version")
        tensors, keys = cursor.number("<Q"), cursor.number("<Q")
        need(tensors + keys <= len(raw), "counts")
        self.keys: dict[str, tuple[int, Any]] = {}
        for _ in range(keys):
            name = cursor.string()
            need(0 < len(name) <= 65535 and name.isascii() and b"\0" not in name, "name of a key")
            need(name.decode() not in self.keys, "a key twice")
            kind = cursor.number("<I")
            self.keys[name.decode()] = kind, gguf_value(cursor, kind)
        alignment = self.keys.get("general.alignment", (U32, 32))
        need(alignment[0] == U32 and alignment[1] in [1 << i for i in range(32)], "alignment")
        self.alignment = alignment[1]
        listed = [self._tensor(cursor) for _ in range(tensors)]
        need(len({name for name, *_ in listed}) == len(listed), "a tensor twice")
        self.head = cursor.position
        start = -(-cursor.position // self.alignment) * self.alignment
        self.tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
        end = 0
        for *_, offset, size in sorted(listed, key=lambda entry: entry[3]):
            need(offset % self.alignment == 0 and (offset >= end or not size), "offset")
            end = offset + size if size else end  # an empty tensor has no place
            need(start + end <= len(raw), "data beyond the end")
        for name, kind, shape, offset, size in listed:
            self.tensors[name] = kind, shape, raw[start + offset : start + offset + size]
        self.split = tuple(self._count(key) for key in SPLIT)
        need((self.split[0] or 0) < (self.split[1] or 1), "number of the shard")

    def _tensor(self, cursor: Cursor) -> tuple[str, int, tuple[int, ...], int, int]:
        raw = cursor.string()
        need(len(raw) <= 127 and b"\0" not in raw, "name of a tensor")
        name, dims = utf8(raw), cursor.number("<I")
        need(1 <= dims <= 4, "dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(dims))[::-1]
        kind, offset = cursor.number("<I"), cursor.number("<Q")
        need(kind in SIZES, "type")
        weights, nbytes = SIZES[kind]
        need(shape[-1] % weights == 0, "shape")
        need(0 not in shape or prod(filter(None, shape)) * nbytes <= 2**60, "an empty shape too large for an array")
        return name, kind, shape, offset, prod(shape) // weights * nbytes

    def _count(self, key: str) -> int | None:
        if key not in self.keys:
            return None
        kind, value = self.keys[key]
        need(kind in INTEGERS and value >= 0, "a count")
        return int(value)


def gguf(files: Files, main: str) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """The tensors of a .gguf file with all of its shards; kbit tensors as their parts."""
    first = Gguf(files[main])
    number, count = first.split[0] or 0, first.split[1] or 1
    shards = [first]
    if count > 1:
        stem = main.removesuffix(f"-00001-of-{count:05d}.gguf")
        need(number == 0 and stem != main, "not called as the first shard")
        need(count <= len(files), "shards that are missing")
        for i in range(2, count + 1):
            name = f"{stem}-{i:05d}-of-{count:05d}.gguf"
            need(name in files and files[name], "a shard is missing")
            shards.append(Gguf(files[name]))
            need(((shards[-1].split[0] or 0), (shards[-1].split[1] or 1)) == (i - 1, count), "another shard")
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    for shard in shards:
        need(not tensors.keys() & shard.tensors.keys(), "a tensor in two shards")
        tensors |= shard.tensors
    need(all(shard.split[2] in (None, len(tensors)) for shard in shards), "number of tensors")
    if "qgemm.kbit.version" in first.keys:
        need(first.keys["qgemm.kbit.version"] == (U32, 1), "layout of kbit")
        need(first.keys.get("general.architecture") == (STRING, b"qgemm"), "architecture of kbit")
        kbit({name: (kind, shape, data) for name, (kind, shape, data) in tensors.items()})
    return tensors


def kbit(tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    """Parts of kbit tensors must be whole and fit each other."""
    for name in tensors:
        if not name.endswith(PARTS):
            continue
        whole = re.sub(r"\.kbit_(absmax|planes|codebook)\Z", "", name)
        need(whole not in tensors and all(whole + part in tensors for part in PARTS), "a part alone")
        (absmax, shape, _), (planes, other, _), (codebook, levels, raw) = (tensors[whole + part] for part in PARTS)
        need(codebook == F32 and levels in [(4,), (8,), (16,), (32,)], "codebook")
        need(np.isfinite(np.frombuffer(raw, "<f4")).all(), "codebook that is not finite")
        bits = levels[0].bit_length() - 1
        need(absmax in (I8, F16) and planes == I32, "types of parts")
        need(other == (*shape[:-1], shape[-1] * bits), "shapes of parts")


# ---------------------------------------------------------------- importance matrices


def imatrix(files: Files, main: str) -> None:
    """An importance matrix of either kind."""
    raw = files[main]
    need(raw, "empty")
    means: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        if raw.startswith(b"GGUF"):
            tensors = gguf(files, main)
            for name, (kind, shape, data) in tensors.items():
                need(
                    not name.endswith(".counts") or name.removesuffix(".counts") + ".in_sum2" in tensors, "counts alone"
                )
                if not name.endswith(".in_sum2"):
                    continue
                other = tensors.get(name.removesuffix(".in_sum2") + ".counts")
                need(
                    other is not None and kind == other[0] == F32 and len(shape) <= 2 and all(shape), "sums and counts"
                )
                assert other is not None
                sums = np.frombuffer(data, "<f4").reshape(-1, shape[-1])
                counts = np.frombuffer(other[2], "<f4")
                need(len(counts) == len(sums), "as many counts as sums")
                need(np.isfinite(counts).all() and (counts >= 0).all(), "not a count")
                means[name] = np.array(
                    [s / c if c > 0 else np.ones_like(s) for s, c in zip(sums, counts, strict=True)], np.float32
                )
        else:
            cursor = Cursor(raw)
            for _ in range(cursor.number("<i")):
                name = utf8(cursor.take(cursor.number("<i")))
                need(name not in means, "a name twice")
                calls, count = cursor.number("<i"), cursor.number("<i")
                means[name] = np.frombuffer(cursor.take(4 * count), "<f4") / np.float32(max(calls, 1))
        need(means, "no entries")
        need(all(np.isfinite(mean).all() and (mean >= 0).all() for mean in means.values()), "not an importance")


# ---------------------------------------------------------------- .npy and .npz

NPY_TYPES = {"f2": 2, "f4": 4, "f8": 8, "b1": 1} | {f"{sign}{size}": size for sign in "iu" for size in (1, 2, 4, 8)}
TOKEN = re.compile(r"""[ \t\r\n]*(?:'[^'"\\]*'|"[^'"\\]*"|[A-Za-z_]+|[0-9]+L?|.)""", re.DOTALL)


def npy(raw: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """An array: type without byte order, shape, data."""
    need(raw[:6] == b"\x93NUMPY" and raw[6:8] in (b"\1\0", b"\2\0", b"\3\0"), "magic")
    cursor = Cursor(raw)
    cursor.take(8)
    size = cursor.number("<H" if raw[6] == 1 else "<I")
    need(size <= 10_000, "a long header")
    header = cursor.take(size).decode("latin-1")
    tokens = [match[0].strip(" \t\r\n") for match in TOKEN.finditer(header) if match[0].strip(" \t\r\n")]
    need(tokens[:1] == ["{"] and tokens[-1:] == ["}"], "no dict")
    tokens = tokens[1:-1]
    fields: dict[str, Any] = {}
    while tokens:
        need(len(tokens) >= 3 and tokens[0][:1] in "'\"" and tokens[1] == ":", "no key")
        key, value, tokens = tokens[0][1:-1], tokens[2], tokens[3:]
        need(key not in fields, "a key twice")
        if value in ("True", "False"):
            fields[key] = value == "True"
        elif value[:1] in ("'", '"'):
            fields[key] = value[1:-1]
        else:
            need(value == "(" and ")" in tokens, "no value")
            end = tokens.index(")")
            inner, tokens = tokens[:end], tokens[end + 1 :]
            need(len(inner) != 1, "a number in parentheses")
            need(all(comma == "," for comma in inner[1::2]), "no commas")
            numbers = [digits.removesuffix("L") for digits in inner[::2]]
            need(all(re.fullmatch("0|[1-9][0-9]{0,18}", digits) for digits in numbers), "no numbers")
            fields[key] = tuple(map(int, numbers))
        if tokens:
            need(tokens[0] == ",", "no comma")
            tokens = tokens[1:]
    need(fields.keys() == {"descr", "fortran_order", "shape"}, "other keys")
    descr, shape = fields["descr"], fields["shape"]
    need(isinstance(descr, str) and isinstance(fields["fortran_order"], bool) and isinstance(shape, tuple), "types")
    need(re.fullmatch(r"[<>|]?[a-z][0-9]", descr) and descr[-2:] in NPY_TYPES, "no type of weights")
    need(len(shape) <= 64 and all(n < 2**63 for n in shape), "shape")
    need(not fields["fortran_order"] or len(shape) < 2, "Fortran order")
    data = raw[cursor.position :]
    need(prod(shape) * NPY_TYPES[descr[-2:]] == len(data), "other data")
    return descr[-2:], shape, data


def npz(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The arrays of an archive."""
    ends = [
        i for i in range(max(0, len(raw) - 65557), len(raw) - 21)
        if raw[i : i + 4] == b"PK\5\6" and i + 22 + struct.unpack_from("<H", raw, i + 20)[0] == len(raw)
    ]  # fmt: skip
    need(ends, "no end")
    end = ends[-1]
    disk, first, here, count, size, start = struct.unpack_from("<4H2I", raw, end + 4)
    if end >= 20 and raw[end - 20 : end - 16] == b"PK\6\7":
        i = struct.unpack_from("<Q", raw, end - 12)[0]
        need(i + 76 == end and raw[i : i + 4] == b"PK\6\6", "end of a large archive")
        disk, first, here, count, size, start = struct.unpack_from("<2I4Q", raw, i + 16)
        end = i
    need((disk, first, here) == (0, 0, count) and start + size == end, "directory")
    cursor = Cursor(raw[:end])
    cursor.position = start
    need(count * 46 <= size, "count")
    arrays, ranges = {}, [(start, start)]
    for _ in range(count):
        name, array, place = zip_member(raw, cursor)
        need(name.endswith(".npy") and name not in arrays, "name")
        ranges.append(place)
        arrays[name] = npy(array)
    need(cursor.position == end, "after the directory")
    ranges.sort()
    need(all(a[1] <= b[0] for a, b in pairwise(ranges)), "members overlap")
    return arrays


def zip_member(raw: bytes, cursor: Cursor) -> tuple[str, bytes, tuple[int, int]]:
    """The member of the next directory entry: name, data, range of header and data in the file."""
    need(cursor.take(4) == b"PK\1\2", "entry")
    _, _, flags, method, _, _, crc, packed, size, *lengths, _, _, _, header = (
        cursor.number(f"<{code}") for code in "HHHHHHIIIHHHHHII"
    )
    bare, extra, _ = (cursor.take(length) for length in lengths)
    name = utf8(bare) if flags & 2048 else bare.decode("cp437")
    offset = 0
    while offset + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, offset)
        if kind == 1 and offset + 4 + length <= len(extra):
            wide = [struct.unpack_from("<Q", extra, offset + 4 + 8 * i)[0] for i in range(length // 8)]
            size, packed, header = (wide.pop(0) if n == 0xFFFFFFFF and wide else n for n in (size, packed, header))
            break
        offset += 4 + length
    need(not flags & 1 and method in (0, 8) and b"\0" not in bare, "kind of member")
    local = Cursor(raw)
    local.take(min(header, len(raw)))
    need(local.take(4) == b"PK\3\4", "local header")
    local.take(22)
    length, others = local.number("<H"), local.number("<H")
    need(length == len(bare) and local.take(length) == bare, "name in the local header")
    local.position += others
    data = local.take(packed)
    if method == 0:
        need(packed == size, "size of a stored member")
    else:
        need(size <= 1032 * packed, "more than deflate can hold")
        unpack = zlib.decompressobj(-15)
        try:
            data = unpack.decompress(data)
        except zlib.error:
            raise Invalid("deflate") from None
        need(unpack.eof and not unpack.unused_data, "another end")
        need((len(data), zlib.crc32(data)) == (size, crc), "size or checksum")
    return name, data, (header, local.position)
