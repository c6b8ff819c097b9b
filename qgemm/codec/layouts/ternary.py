"""Codes 0, 1, 2 as digits to the base 3, several in a byte: of a block, and of a device tile.

A byte is ceil(256 / 243 * number), the number having the codes as its five digits to the base 3, the first of them the
highest; where there are four codes the last digit is 0. Three times a byte has the next digit above eight bits: nothing
is divided. 13 of the 256 bytes are no such number. They decode like a byte that is: `canonical`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes

POWERS = 3 ** np.arange(4, -1, -1, dtype=np.uint16)  # of the digits of a byte


def to_bytes(digits: Bytes) -> Bytes:
    """Digits [..., up to 5, b] -> bytes [..., b]."""
    numbers = (digits * POWERS[: digits.shape[-2], None]).sum(axis=-2, dtype=np.uint32)
    found: Bytes = ((numbers * 256 + 242) // 243).astype(np.uint8)
    return found


def to_digits(numbers: Bytes, count: int) -> Bytes:
    """Bytes [..., b] -> their first digits [..., count, b]."""
    rests = numbers[..., None, :] * POWERS[::-1][:count, None].astype(np.uint8)  # modulo 256: what later digits say
    found: Bytes = (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8)
    return found


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
        """Those that hold codes."""
        return tuple(dict.fromkeys(part.field for part in self.parts))

    def unpack(self, blocks: NDArray[Any]) -> Bytes:
        """Blocks [n] -> codes [n, weights]."""
        found = []
        for field, first, size, digits, _ in self.parts:
            found.append(to_digits(blocks[field][:, first : first + size], digits).reshape(len(blocks), -1))
        return np.hstack(found)

    def pack(self, codes: Bytes, blocks: NDArray[Any]) -> None:
        """Writes codes [n, weights] into blocks [n]."""
        for field, first, size, digits, weight in self.parts:
            numbers = codes[:, weight : weight + digits * size].reshape(-1, digits, size)
            blocks[field][:, first : first + size] = to_bytes(numbers)

    def canonical(self, blocks: NDArray[Any]) -> NDArray[Any]:
        """Blocks [...] -> those of the same weights whose bytes are numbers, as every encoder writes them."""
        flat: NDArray[Any] = blocks.reshape(-1).copy()
        self.pack(self.unpack(flat), flat)
        return flat.reshape(blocks.shape)
