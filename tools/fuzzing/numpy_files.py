"""NumPy's files as tokens, members and fields that can be changed."""

from __future__ import annotations

import re
import struct
import zlib
from random import Random
from typing import Any

from .mutate import WIDTHS, junk, name, number, shuffled

TOKENS = (
    b"'descr'", b"'fortran_order'", b"'shape'", b"'x'", b"'<f4'", b"'>f2'", b"'|b1'", b"'|u1'", b"'<U1'", b"'|O'",
    b"True", b"False", b"None", b"(", b")", b",", b":", b"{", b"}", b"-1", b"0", b"2", b"2L", b"03", b"1e3", b"[", b"]",
    b"+", b"#", b"\\", b"'", b'"', b" ", b"\n", b"\t", b"\x0c", b"\0", b"9223372036854775807", b"9223372036854775808",
    b"lambda: 0",
)  # fmt: skip
PARTS = re.compile(rb"'[^']*'|\w+|\s+|.", re.DOTALL)


class Npy:
    """A .npy file."""

    def __init__(self, version: int, header: bytes, data: bytes) -> None:
        self.version, self.header, self.data = version, header, data

    def changed(self, rng: Random) -> Npy:
        """A copy with one token of the header or another part changed."""
        pick = rng.random()
        if pick < 0.1:
            return Npy(rng.choice((0, 1, 2, 3, 4)), self.header, self.data)
        if pick < 0.2:
            return Npy(self.version, self.header, junk(rng, self.data))
        if pick < 0.3:
            return Npy(self.version, junk(rng, self.header), self.data)
        tokens = PARTS.findall(self.header)
        if pick < 0.5 or not tokens:
            return Npy(self.version, b"".join(shuffled(rng, tokens)), self.data)
        tokens[rng.randrange(len(tokens))] = rng.choice(TOKENS)
        return Npy(self.version, b"".join(tokens), self.data)

    def raw(self, rng: Random) -> bytes:
        """The file."""
        code = "H" if self.version == 1 else "I"
        size = len(self.header) if rng.random() < 0.97 else number(rng, len(self.header))
        start = b"\x93NUMPY" + bytes((self.version, 0)) + struct.pack(f"<{code}", size % (1 << WIDTHS[code]))
        return start + self.header + self.data


class Npz:
    """An archive: members (name, Npy, deflated or not), and changes to fields, as (record, field, value)."""

    def __init__(self, members: list[tuple[bytes, Npy, bool]], changes: tuple[Any, ...] = ()) -> None:
        self.members, self.changes = members, changes

    def changed(self, rng: Random) -> Npz:
        """A copy with one member or one field changed."""
        pick = rng.random()
        if pick < 0.15:
            return Npz(shuffled(rng, self.members), self.changes)
        if pick < 0.5 and self.members:
            members = list(self.members)
            index = rng.randrange(len(members))
            key, array, deflated = members[index]
            if pick < 0.25:
                key = name(rng, key, [other for other, *_ in members]) + rng.choice((b".npy", b".npy", b""))
            elif pick < 0.45:
                array = array.changed(rng)
            else:
                deflated = not deflated
            members[index] = key, array, deflated
            return Npz(members, self.changes)
        record = rng.randrange(2 * len(self.members) + 1)
        return Npz(self.members, (*self.changes, (record, rng.randrange(17), rng.choice((None, number(rng))))))

    def raw(self, rng: Random) -> bytes:
        """The file."""
        body, entries = b"", b""
        changes = [(record, field, rng if value is None else value) for record, field, value in self.changes]
        for i, (key, array, deflated) in enumerate(self.members):
            data = array.raw(rng)
            pack = zlib.compressobj(rng.choice((0, 1, 9)), zlib.DEFLATED, -15)
            stored = pack.compress(data) + pack.flush() if deflated else data
            if rng.random() < 0.03:
                stored = junk(rng, stored)
            crc, method, flags = zlib.crc32(data), 8 * deflated, 0 if key.isascii() else 2048
            local = [0x04034B50, 20, flags, method, 0, 0, crc, len(stored), len(data), len(key), 0]
            entry = [
                0x02014B50,
                20,
                20,
                flags,
                method,
                0,
                0,
                crc,
                len(stored),
                len(data),
                len(key),
                0,
                0,
                0,
                0,
                0,
                len(body),
            ]
            entries += _fields("I6H3I5H2I", entry, changes, 2 * i + 1) + key
            body += _fields("I5H3I2H", local, changes, 2 * i) + key + stored
        end = [0x06054B50, 0, 0, len(self.members), len(self.members), len(entries), len(body), 0]
        return body + entries + _fields("I4H2IH", end, changes, 2 * len(self.members))


def _fields(codes: str, values: list[int], changes: list[Any], record: int) -> bytes:
    flat = re.sub(r"(\d)(\w)", lambda match: match[2] * int(match[1]), codes)
    for changed_record, field, value in changes:
        if changed_record == record and field < len(values):
            values[field] = number(value, values[field]) if isinstance(value, Random) else value
    return struct.pack(f"<{flat}", *(value % (1 << WIDTHS[code]) for code, value in zip(flat, values, strict=True)))
