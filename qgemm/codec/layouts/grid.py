"""Device tiles of the IQ types, whose weights are points of a grid: bits of blocks, rearranged.

In each row a step of 16 columns has two points of eight weights, or four points of four. A quad of lanes has rows g and
g + 8 of a k_block (qgemm/cuda/layout/tile.py). Its owners are the two halves of a step, or its four quarters, which are
the lanes. Each owner has one number of each field, which counts points by n = 2 step + row, row 1 being g + 8.

    qs      the low 8 bits of the index of point n, at bit 8 n
    qh, qt  the b bits above them, at bit b n; iq1_s has two bits in qh and one in qt
    signs   bit 16 e + 8 q + n tells whether weight 2 q + e of a quarter is negative
    s4 s2 s1  where the eighth of eight signs makes the number of minuses even: signs of the first quarter of a half,
            then 16 and 8 bits of the signs of its second quarter, whose highest 8 bits are left out

Fields per block, d first, are 16-bit words as in every tile. No bit is stored twice or added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS, ROWS, K_BLOCKS = 4, 2, 4
Place = Callable[[int, int, int], int]  # k_block, step, owner -> a bit of the block


class LaneField(NamedTuple):
    """A field of a k_block: a number for each owner, `owners` to a quad.

    Bit i of the number of owner o in k_block k is bit along * k + apart * o + bits[i] of the block of row
    g + 8 rows[i].
    """

    name: str
    owners: int
    along: int
    apart: int
    rows: tuple[int, ...]
    bits: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of a number."""
        return np.dtype(f"<u{len(self.bits) // 8}")


class BlockField(NamedTuple):
    """A field per block: these bits of the block, 16 in a word. half: whether it is a float16."""

    name: str
    bits: tuple[int, ...]
    half: bool = False


class Grid(NamedTuple):
    """The layout of a format whose weights are points of a grid.

    points: () -> levels int8 [points, weights of a point]. weights: weights of a point. high: bits of an index above
    the eighth. signs: stored signs of eight weights: 8, 7, or 0 where levels have signs.
    """

    points: Callable[[], NDArray[np.int8]]
    weights: int
    high: int
    signs: int
    lanes: tuple[LaneField, ...]
    per_block: tuple[BlockField, ...]

    @property
    def max_level(self) -> int:
        """The largest magnitude of a level."""
        return int(np.abs(self.points().astype(int)).max())


def points(name: str, owners: int, bits: int, place: Place) -> LaneField:
    """The field with `bits` bits of the index of each point, from bit `place` of the block on."""
    return _field(name, owners, lambda k, o: ((r, place(k, s, o) + b) for s, r in _points() for b in range(bits)))


def signs(place: Place) -> tuple[LaneField, ...]:
    """The field of all signs. place: the bit of the first sign of a quarter."""
    return (_signs("signs", 4, place, tuple((q, e) for e in range(2) for q in range(2))),)


def paired_signs(place: Place) -> tuple[LaneField, ...]:
    """The fields of seven of eight signs. place: the bit of the first sign of a half."""
    return (
        _signs("s4", 2, place, ((0, 0), (1, 0), (0, 1), (1, 1))),
        _signs("s2", 2, place, ((2, 0), (3, 0))),
        _signs("s1", 2, place, ((2, 1),)),
    )


def bits(first: int, count: int) -> tuple[int, ...]:
    """The numbers of `count` bits of a block, from `first` on."""
    return tuple(range(first, first + count))


def _points() -> Iterator[tuple[int, int]]:
    return ((s, r) for s in range(STEPS) for r in range(ROWS))


def _signs(name: str, owners: int, place: Place, pairs: tuple[tuple[int, int], ...]) -> LaneField:
    return _field(name, owners, lambda k, o: ((r, place(k, s, o) + 2 * q + e) for q, e in pairs for s, r in _points()))


def _field(name: str, owners: int, number: Callable[[int, int], Iterator[tuple[int, int]]]) -> LaneField:
    """number: (k_block, owner) -> the (row, bit) that each bit of its number comes from."""
    all_bits = np.array([[list(number(k, o)) for o in range(owners)] for k in range(K_BLOCKS)])
    rows, bits_of_owner = (tuple(map(int, all_bits[0, 0, :, i])) for i in range(2))
    along, apart = (int(all_bits[i][0, 1] - bits_of_owner[0]) for i in ((1, 0), (0, 1)))
    shift = along * np.arange(K_BLOCKS)[:, None] + apart * np.arange(owners)
    assert (all_bits[..., 1] == shift[..., None] + bits_of_owner).all(), f"{name}: owners differ by more than a shift"
    return LaneField(name, owners, along, apart, rows, bits_of_owner)
