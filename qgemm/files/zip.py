"""Zip archives as NumPy writes them; the whole directory is checked before a member is read.

    each member     local header (LOCAL), name, extra, data: stored or deflated
    each member     entry of the directory (ENTRY), name, extra, comment
    end             END64 and LOCATOR where counts, sizes or offsets do not fit END; END, comment

Python's zipfile raises many kinds of errors for damaged archives, and trusts every size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .kinds import LONGEST, hint
from .limits import most_names
from .paths import RegularFile, shown, shown_path

LOCAL = struct.Struct("<4s5H3I2H")
ENTRY = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
LOCAL_MAGIC, ENTRY_MAGIC, END_MAGIC = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END64_MAGIC, LOCATOR_MAGIC = b"PK\6\6", b"PK\6\7"
MAX_COMMENT = 0xFFFF

STORED, DEFLATED = 0, 8
ENCRYPTED, UTF_8 = 1, 1 << 11  # flags
EXTRA_64 = 1  # id of the extra field with 64-bit numbers
FULL = 0xFFFFFFFF  # placeholder of a number that does not fit 32 bits

MAX_RATIO = 1032  # unpacked bytes per byte of deflate
PIECE = 1 << 16  # limit of bytes read and inflated at a time


class Member(NamedTuple):
    """A file in an archive: bytes start to start + packed, which unpack to `size` bytes with this CRC-32."""

    name: str
    method: int
    crc: int
    start: int
    packed: int
    size: int


def members(file: RegularFile) -> list[Member]:
    """The members of an archive, in the order of its directory; CheckpointError for any other file."""
    count, start, directory = _directory(file)
    listed: list[Member] = []
    ranges: list[tuple[int, int]] = []  # header and data of each member
    position = 0
    for number in range(count):
        member, header, length = _entry(file, directory, position, number)
        position += length
        listed.append(member)
        ranges.append((header, member.start + member.packed))
    if position != len(directory):
        raise _refusal(file, f"the directory has {len(directory) - position} bytes after its {count} entries")
    ranges = [*sorted(ranges), (start, start)]
    for (_, end), (begin, _) in pairwise(ranges):
        if end > begin:
            raise _refusal(file, f"members overlap at byte {begin}")
    return listed


def inflate(file: RegularFile, member: Member) -> Iterator[bytes]:
    """The unpacked data of a deflated member in pieces; CheckpointError unless size and CRC are the directory's."""
    unpack, crc, size = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
    position, end = member.start, member.start + member.packed
    packed = b""
    while not unpack.eof and (packed or position < end):
        if not packed:
            packed = file.read(position, min(PIECE, end - position)).tobytes()
            position += len(packed)
        try:
            piece = unpack.decompress(packed, PIECE)
        except zlib.error as error:
            raise _refusal(file, f"{shown(member.name)}: {error}") from None
        packed = unpack.unconsumed_tail
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if size > member.size:
            break
        yield piece
    if not unpack.eof or unpack.unused_data or position < end or (size, crc) != (member.size, member.crc):
        raise _refusal(file, f"{shown(member.name)}: is damaged: it does not unpack to what the directory says")


def _refusal(file: RegularFile, rule: str) -> CheckpointError:
    return CheckpointError(f"{shown_path(file.path)}: {rule}")


def _directory(file: RegularFile) -> tuple[int, int, bytes]:
    """The number of entries of the directory, its offset, and its bytes."""
    tail = min(file.size, END.size + MAX_COMMENT)
    raw = file.read(file.size - tail, tail).tobytes()
    position = len(raw)
    while (position := raw.rfind(END_MAGIC, 0, position)) >= 0:
        if len(raw) - position >= END.size and position + END.size + END.unpack_from(raw, position)[-1] == len(raw):
            break
    else:
        start = file.read(0, min(file.size, LONGEST)).tobytes()
        raise _refusal(file, f"is no zip archive: it has no end record{hint(start, LOCAL_MAGIC)}")
    end = file.size - tail + position
    _, disk, first_disk, disk_count, count, size, start, _ = END.unpack_from(raw, position)
    if end >= LOCATOR.size:
        magic, _, end64, _ = LOCATOR.unpack(file.read(end - LOCATOR.size, LOCATOR.size).tobytes())
        if magic == LOCATOR_MAGIC:
            if end64 + END64.size + LOCATOR.size != end:
                raise _refusal(file, f"the end record for large archives is not at byte {end64}")
            end = end64
            magic, _, _, _, disk, first_disk, disk_count, count, size, start = END64.unpack(
                file.read(end64, END64.size).tobytes()
            )
            if magic != END64_MAGIC:
                raise _refusal(file, f"there is no end record for large archives at byte {end64}")
    if disk or first_disk or disk_count != count:
        raise _refusal(file, "is a part of a split archive")
    if start + size != end:
        raise _refusal(file, f"its directory, {size} bytes at {start}, does not end at {end}")
    if count * ENTRY.size > size or count > most_names(file.size):
        raise _refusal(file, f"{count} members are more than {size} bytes of directory and {file.size} in all can list")
    return count, start, file.read(start, size).tobytes()


def _entry(file: RegularFile, directory: bytes, position: int, number: int) -> tuple[Member, int, int]:
    """A member by its entry in the directory, the offset of its local header, and the length of the entry."""
    left = len(directory) - position
    if left < ENTRY.size or directory[position : position + 4] != ENTRY_MAGIC:
        raise _refusal(file, f"entry {number} of the directory is damaged")
    _, _, _, flags, method, _, _, crc, packed, size, *lengths, _, _, _, header = ENTRY.unpack_from(directory, position)
    length = ENTRY.size + sum(lengths)
    if length > left:
        raise _refusal(file, f"entry {number} of the directory is damaged")
    position += ENTRY.size
    raw = directory[position : position + lengths[0]]
    try:
        name = raw.decode("utf-8" if flags & UTF_8 else "cp437")
    except UnicodeDecodeError:
        raise _refusal(file, f"{shown(raw)}: the name is not UTF-8") from None
    if "\0" in name or flags & ENCRYPTED or method not in (STORED, DEFLATED):
        raise _refusal(file, f"{shown(name)}: is encrypted, has NUL in its name, or is neither stored nor deflated")
    extra = directory[position + lengths[0] : position + lengths[0] + lengths[1]]
    size, packed, header = _wide(extra, (size, packed, header))
    if (method == STORED and packed != size) or size > packed * MAX_RATIO:
        raise _refusal(file, f"{shown(name)}: {packed} bytes cannot unpack to {size}")
    start = _data(file, header, raw, name)
    if start + packed > file.size:
        raise _refusal(file, f"{shown(name)}: the file ends within it")
    return Member(name, method, crc, start, packed, size), header, length


def _wide(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Numbers of an entry, with 64-bit values from its extra field; they stay FULL if it lacks them."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == EXTRA_64 and position + length <= len(extra):
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, position))
            first, second, third = (next(wide, n) if n == FULL else n for n in numbers)
            return first, second, third
        position += length
    return numbers


def _data(file: RegularFile, header: int, name: bytes, shown_name: str) -> int:
    """The offset of a member's data, after its local header, which has the same name and other extra fields."""
    size = LOCAL.size + len(name)
    if header + size > file.size:
        raise _refusal(file, f"{shown(shown_name)}: the file ends within its header")
    raw = file.read(header, size).tobytes()
    magic, *_, length, extra = LOCAL.unpack_from(raw)
    if magic != LOCAL_MAGIC or length != len(name) or raw[LOCAL.size :] != name:
        raise _refusal(file, f"{shown(shown_name)}: its header and the directory disagree")
    return header + size + int(extra)
