"""A .gguf file as records that can be changed."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from .mutate import junk, name, number, shuffled

KEYS = (
    (b"general.alignment", 4, (1, 2, 8, 32, 64, 3, 0, 2**31)),
    (b"split.no", 2, (0, 1, 2, 65535)),
    (b"split.count", 2, (0, 1, 2, 3, 65535)),
    (b"split.count", 10, (30_000_000, 2**60, 2**64 - 1)),
    (b"split.tensors.count", 5, (0, 1, 2, 3, 4, 5)),
    (b"qgemm.kbit.version", 4, (1, 0, 2)),
)
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def text(raw: bytes) -> bytes:
    """A string of .gguf."""
    return struct.pack("<Q", len(raw)) + raw


class Gguf:
    """A .gguf file as records: keys [name, kind, bytes of the value], tensors [name, ne, kind, offset], the data."""

    def __init__(self, version: int, keys: list[Any], tensors: list[Any], data: bytes, alignment: int = 32) -> None:
        self.version, self.keys, self.tensors, self.data, self.alignment = version, keys, tensors, data, alignment
        self.extra = [0, 0]  # added to the counts of tensors and keys

    def raw(self) -> bytes:
        """The file."""
        head = b"GGUF" + struct.pack(
            "<I2Q", self.version, (len(self.tensors) + self.extra[0]) % 2**64, (len(self.keys) + self.extra[1]) % 2**64
        )
        head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in self.keys)
        for key, ne, kind, offset in self.tensors:
            head += text(key) + struct.pack("<I", len(ne)) + b"".join(struct.pack("<Q", n) for n in ne)
            head += struct.pack("<IQ", kind, offset)
        return head + bytes(-len(head) % self.alignment) + self.data

    def changed(self, rng: Random) -> Gguf:
        """A copy with one record or field changed."""
        new = Gguf(self.version, list(self.keys), [list(tensor) for tensor in self.tensors], self.data, self.alignment)
        pick = rng.randrange(16)
        if pick == 0:
            new.version = number(rng, self.version) % 2**32
        elif pick == 1:
            new.extra[rng.randrange(2)] = number(rng)
        elif pick == 2:
            new.keys = shuffled(rng, new.keys)
        elif pick == 3:
            new.tensors = shuffled(rng, new.tensors)
        elif pick == 4:
            new.data = junk(rng, new.data)
        elif pick == 5:
            key, kind, values = rng.choice(KEYS)
            new.keys.insert(
                rng.randrange(len(new.keys) + 1), (key, kind, struct.pack(f"<{CODES[kind]}", rng.choice(values)))
            )
        elif pick <= 8 and new.keys:
            index = rng.randrange(len(new.keys))
            key, kind, value = new.keys[index]
            if pick == 6:
                key = name(rng, key, [other for other, *_ in new.keys])
            elif pick == 7:
                kind = rng.choice((rng.randrange(14), number(rng, kind) % 2**32))
            else:
                value = junk(rng, value)
            new.keys[index] = key, kind, value
        elif new.tensors:
            self._tensor(rng, rng.choice(new.tensors), pick)
        return new

    def _tensor(self, rng: Random, tensor: list[Any], pick: int) -> None:
        if pick == 9:
            tensor[0] = name(rng, tensor[0], [other for other, *_ in self.tensors])
        elif pick == 10 and tensor[1]:
            ne = list(tensor[1])
            axis = rng.randrange(len(ne))
            ne[axis] = number(rng, ne[axis]) % 2**64
            tensor[1] = ne
        elif pick == 11:
            tensor[1] = rng.choice(([*tensor[1], 1], list(tensor[1])[:-1], list(tensor[1])[::-1]))
        elif pick == 12:
            tensor[2] = rng.choice((rng.randrange(42), number(rng, tensor[2]) % 2**32))
        elif pick == 13:
            tensor[3] = rng.choice((tensor[3] + self.alignment, number(rng, tensor[3]))) % 2**64
        else:
            tensor[3] = (tensor[3] + rng.choice((-1, 1)) * self.alignment) % 2**64
