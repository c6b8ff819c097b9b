"""Device tiles of the IQ types, whose weights are points of a grid: bits of blocks, rearranged.

A step of 16 columns has two points of eight weights in a row, or four of four. In a k_block (qgemm/cuda/layout/tile.py)
the quad of lanes that has rows g and g + 8 has a number of each field from each of its owners: the two halves of a
step, or its four quarters, which are the lanes. Such a number counts points by n = 2 step + row, row 1 being g + 8.

    qs      8 bits of each point's index, from the lowest on, at 8 n
    qh, qt  those above them, at (how many there are) * n; of iq1_s two in qh, one in qt
    signs   of a quarter's weights 2 q + e bit 16 e + 8 q + n says whether it is negative
    s4 s2 s1  of a half, where the eighth of eight signs makes the minuses even: the same word of its first quarter,
            then 16 and 8 bits of that of its second, whose highest 8 are left out

The fields per block, d first, are 16-bit words as everywhere. No bit is stored twice, none is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS, ROWS, K_BLOCKS = 4, 2, 4
Place = Callable[[int, int, int], int]  # k_block, step, owner -> a bit of the block


class LaneField(NamedTuple):
    """A field of a k_block: a number of each owner, `owners` to a quad.

    Bit i of owner o's in k_block k is, of row g + 8 rows[i], the block's bit along * k + apart * o + at[i].
    """

    name: str
    owners: int
    along: int
    apart: int
    rows: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of the number."""
        return np.dtype(f"<u{len(self.at) // 8}")


class BlockField(NamedTuple):
    """A field per block: the block's bits `at`, 16 a word; half: whether it is a float16."""

    name: str
    at: tuple[int, ...]
    half: bool = False


class Grid(NamedTuple):
    """What kernels need beside the dtype of blocks.

    points: () -> levels int8 [points, weights of a point]. weights: of a point. high: bits of an index above the
    eighth. signs: how many of eight weights have one: 8, 7, or 0 where levels have their own.
    """

    points: Callable[[], NDArray[np.int8]]
    weights: int
    high: int
    signs: int
    lanes: tuple[LaneField, ...]
    per_block: tuple[BlockField, ...]

    @property
    def largest(self) -> int:
        """The largest magnitude of a level."""
        return int(np.abs(self.points().astype(int)).max())


def points(name: str, owners: int, bits: int, place: Place) -> LaneField:
    """The field of so many bits of each point, from `place` on."""
    return _field(name, owners, lambda k, o: ((r, place(k, s, o) + b) for s, r in _points() for b in range(bits)))


def signs(place: Place) -> tuple[LaneField, ...]:
    """The field of all signs; place: of the first of a quarter's."""
    return (_signs("signs", 4, place, tuple((q, e) for e in range(2) for q in range(2))),)


def paired_signs(place: Place) -> tuple[LaneField, ...]:
    """The fields of seven of eight signs; place: of the first of a half's."""
    return (
        _signs("s4", 2, place, ((0, 0), (1, 0), (0, 1), (1, 1))),
        _signs("s2", 2, place, ((2, 0), (3, 0))),
        _signs("s1", 2, place, ((2, 1),)),
    )


def bits(first: int, count: int) -> tuple[int, ...]:
    """So many bits of a block, in order."""
    return tuple(range(first, first + count))


def _points() -> Iterator[tuple[int, int]]:
    return ((s, r) for s in range(STEPS) for r in range(ROWS))


def _signs(name: str, owners: int, place: Place, pairs: tuple[tuple[int, int], ...]) -> LaneField:
    return _field(name, owners, lambda k, o: ((r, place(k, s, o) + 2 * q + e) for q, e in pairs for s, r in _points()))


def _field(name: str, owners: int, number: Callable[[int, int], Iterator[tuple[int, int]]]) -> LaneField:
    """number: k_block, owner -> (row, bit) of each of its bits."""
    all_bits = np.array([[list(number(k, o)) for o in range(owners)] for k in range(K_BLOCKS)])
    rows, at = (tuple(map(int, all_bits[0, 0, :, i])) for i in range(2))
    along, apart = (int(all_bits[i][0, 1] - at[0]) for i in ((1, 0), (0, 1)))
    shift = along * np.arange(K_BLOCKS)[:, None] + apart * np.arange(owners)
    assert (all_bits[..., 1] == shift[..., None] + at).all(), f"{name}: owners differ by more than a shift"
    return LaneField(name, owners, along, apart, rows, at)
