"""Codes 0, 1, 2 as digits to the base 3, several in a byte of a block or of a device tile.

A byte is ceil(256 / 243 * number). The codes are the five digits of the number to the base 3, the first the highest;
with four codes the last digit is 0. Three times a byte has its next digit above bit 7, so decoding needs no division.
13 bytes stand for no number and decode like another byte; `canonical` replaces them by it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes

POWERS = 3 ** np.arange(4, -1, -1, dtype=np.uint16)  # by digit of a byte


def to_bytes(digits: Bytes) -> Bytes:
    """Digits [..., up to 5, b] -> bytes [..., b]."""
    numbers = (digits * POWERS[: digits.shape[-2], None]).sum(axis=-2, dtype=np.uint32)
    packed: Bytes = ((numbers * 256 + 242) // 243).astype(np.uint8)
    return packed


def to_digits(numbers: Bytes, count: int) -> Bytes:
    """Bytes [..., b] -> their first digits [..., count, b]."""
    rests = numbers[..., None, :] * POWERS[::-1][:count, None].astype(np.uint8)  # modulo 256 later digits remain
    digits: Bytes = (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return digits


class Part(NamedTuple):
    """Bytes `first` to `first + size - 1` of a field: digit i of byte j is weight `weight + size * i + j`."""

    field: str
    first: int
    size: int
    digits: int
    weight: int


class Ternary(NamedTuple):
    """How the codes of a block lie in its bytes."""

    parts: tuple[Part, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that hold codes."""
        return tuple(dict.fromkeys(part.field for part in self.parts))

    def unpack(self, blocks: NDArray[Any]) -> Bytes:
        """Blocks [n] -> codes [n, weights]."""
        parts = []
        for field, first, size, digits, _ in self.parts:
            parts.append(to_digits(blocks[field][:, first : first + size], digits).reshape(len(blocks), digits * size))
        return np.hstack(parts)

    def pack(self, codes: Bytes, blocks: NDArray[Any]) -> None:
        """Writes codes [n, weights] into blocks [n]."""
        for field, first, size, digits, weight in self.parts:
            numbers = codes[:, weight : weight + digits * size].reshape(-1, digits, size)
            blocks[field][:, first : first + size] = to_bytes(numbers)

    def canonical(self, blocks: NDArray[Any]) -> NDArray[Any]:
        """Blocks [...] -> blocks of the same weights whose bytes all stand for numbers, as encoders write them."""
        flat: NDArray[Any] = blocks.reshape(-1).copy()
        self.pack(self.unpack(flat), flat)
        return flat.reshape(blocks.shape)
