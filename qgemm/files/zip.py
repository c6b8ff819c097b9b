"""Zip archives as NumPy writes them: what lies in one, checked whole before a member is looked at.

    each member     local header (LOCAL), name, extra, data: stored or deflated
    each member     entry of the directory (ENTRY), name, extra, comment
    end             END64 and LOCATOR where counts, sizes or offsets do not fit END; END, comment

What Python's zipfile raises for damaged archives is of many kinds, and it believes every size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from qgemm.errors import CheckpointError

from .limits import most_names
from .paths import Opened, shown, shown_path

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
EXTRA_64 = 1  # the id of the extra field that holds what does not fit 32 bits
FULL = 0xFFFFFFFF  # in place of a number that does not

MOST_A_BYTE = 1032  # bytes that one byte of deflate can stand for
PIECE = 1 << 16  # bytes that are inflated at a time, from as many at most


class Member(NamedTuple):
    """A file in an archive: bytes start to start + packed of it, which unpack to `size` of this CRC-32."""

    name: str
    method: int
    crc: int
    start: int
    packed: int
    size: int


def members(file: Opened) -> list[Member]:
    """The members of an archive, in the order of its directory; CheckpointError for what is not one."""
    count, start, directory = _directory(file)
    found: list[Member] = []
    taken: list[tuple[int, int]] = []  # by members, header and data
    at = 0
    for number in range(count):
        member, header, length = _entry(file, directory, at, number)
        at += length
        found.append(member)
        taken.append((header, member.start + member.packed))
    if at != len(directory):
        raise _refusal(file, f"the directory has {len(directory) - at} bytes behind its {count} entries")
    taken = [*sorted(taken), (start, start)]
    for (_, end), (begin, _) in pairwise(taken):
        if end > begin:
            raise _refusal(file, f"members overlap at byte {begin}")
    return found


def inflated(file: Opened, member: Member) -> Iterator[bytes]:
    """What a deflated member unpacks to, a few KiB at a time; CheckpointError unless it is what the directory says."""
    unpack, crc, size = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
    at, end = member.start, member.start + member.packed
    waiting = b""
    while not unpack.eof and (waiting or at < end):
        if not waiting:
            waiting = file.read(at, min(PIECE, end - at)).tobytes()
            at += len(waiting)
        try:
            piece = unpack.decompress(waiting, PIECE)
        except zlib.error as error:
            raise _refusal(file, f"{shown(member.name)}: {error}") from None
        waiting = unpack.unconsumed_tail
        crc, size = zlib.crc32(piece, crc), size + len(piece)
        if size > member.size:
            break
        yield piece
    if not unpack.eof or unpack.unused_data or at < end or (size, crc) != (member.size, member.crc):
        raise _refusal(file, f"{shown(member.name)}: is damaged: it does not unpack to what the directory says")


def _refusal(file: Opened, rule: str) -> CheckpointError:
    return CheckpointError(f"{shown_path(file.path)}: {rule}")


def _directory(file: Opened) -> tuple[int, int, bytes]:
    """How many entries the directory has, where it starts, and its bytes."""
    tail = min(file.size, END.size + MAX_COMMENT)
    raw = file.read(file.size - tail, tail).tobytes()
    at = len(raw)
    while (at := raw.rfind(END_MAGIC, 0, at)) >= 0:
        if len(raw) - at >= END.size and at + END.size + END.unpack_from(raw, at)[-1] == len(raw):
            break
    else:
        raise _refusal(file, "is no zip archive: it has no end record")
    end = file.size - tail + at
    _, disk, first_disk, here, count, size, start, _ = END.unpack_from(raw, at)
    if end >= LOCATOR.size:
        magic, _, at64, _ = LOCATOR.unpack(file.read(end - LOCATOR.size, LOCATOR.size).tobytes())
        if magic == LOCATOR_MAGIC:
            if at64 + END64.size + LOCATOR.size != end:
                raise _refusal(file, f"the end record for large archives is not at byte {at64}")
            end = at64
            magic, _, _, _, disk, first_disk, here, count, size, start = END64.unpack(
                file.read(at64, END64.size).tobytes()
            )
            if magic != END64_MAGIC:
                raise _refusal(file, f"there is no end record for large archives at byte {at64}")
    if disk or first_disk or here != count:
        raise _refusal(file, "is a part of a split archive")
    if start + size != end:
        raise _refusal(file, f"its directory, {size} bytes at {start}, does not end at {end}")
    if count * ENTRY.size > size or count > most_names(file.size):
        raise _refusal(file, f"{count} members are more than {size} bytes of directory and {file.size} in all can list")
    return count, start, file.read(start, size).tobytes()


def _entry(file: Opened, directory: bytes, at: int, number: int) -> tuple[Member, int, int]:
    """A member by its entry in the directory, where its local header is, and the length of the entry."""
    left = len(directory) - at
    if left < ENTRY.size or directory[at : at + 4] != ENTRY_MAGIC:
        raise _refusal(file, f"entry {number} of the directory is damaged")
    _, _, _, flags, method, _, _, crc, packed, size, *lengths, _, _, _, header = ENTRY.unpack_from(directory, at)
    length = ENTRY.size + sum(lengths)
    if length > left:
        raise _refusal(file, f"entry {number} of the directory is damaged")
    at += ENTRY.size
    raw = directory[at : at + lengths[0]]
    try:
        name = raw.decode("utf-8" if flags & UTF_8 else "cp437")
    except UnicodeDecodeError:
        raise _refusal(file, f"{shown(raw)}: the name is not UTF-8") from None
    if "\0" in name or flags & ENCRYPTED or method not in (STORED, DEFLATED):
        raise _refusal(file, f"{shown(name)}: is encrypted, has NUL in its name, or is neither stored nor deflated")
    extra = directory[at + lengths[0] : at + lengths[0] + lengths[1]]
    size, packed, header = _wide(extra, (size, packed, header))
    if (method == STORED and packed != size) or size > packed * MOST_A_BYTE:
        raise _refusal(file, f"{shown(name)}: {packed} bytes cannot unpack to {size}")
    start = _data(file, header, raw, name)
    if start + packed > file.size:
        raise _refusal(file, f"{shown(name)}: the file ends within it")
    return Member(name, method, crc, start, packed, size), header, length


def _wide(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Numbers of an entry, those that do not fit from its extra fields; they stay FULL where those lack them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == EXTRA_64 and at + length <= len(extra):
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at))
            first, second, third = (next(wide, n) if n == FULL else n for n in numbers)
            return first, second, third
        at += length
    return numbers


def _data(file: Opened, header: int, name: bytes, shown_name: str) -> int:
    """Where the data of a member starts: behind its local header, of the same name and with other extra fields."""
    size = LOCAL.size + len(name)
    if header + size > file.size:
        raise _refusal(file, f"{shown(shown_name)}: the file ends within its header")
    raw = file.read(header, size).tobytes()
    magic, *_, length, extra = LOCAL.unpack_from(raw)
    if magic != LOCAL_MAGIC or length != len(name) or raw[LOCAL.size :] != name:
        raise _refusal(file, f"{shown(shown_name)}: its header and the directory disagree")
    return header + size + int(extra)
