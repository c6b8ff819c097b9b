"""Words of a device tile for codes of five and six bits, whose low four bits are a field of their own in a block.

Side by side (qgemm/cuda/layout/tile.py) a lane has a word of nibbles for each step, and a word of the bits above them
for as many steps as fill it: both parts of every four codes would have to be masked and joined. In a tile two codes
share a byte, where they overlap, and one mask is enough. With b bits in a code, w the word of a step and f the word of
the remaining bits, rotated right by (2 b - 8) * step, the codes of a lane's columns are in the bytes of

    (w ^ f) & 2^b - 1 for row g,  w >> 8 - b for row g + 8.

In each byte of f, 2 b - 8 bits belong to a step: the bits where the codes overlap, as the difference (xor) of those of
row g and row g + 8. The lower bits of w cancel the other bits of f.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.packing import LaneWords, Words, rotate_left

STEPS = 4
EVERY = np.uint32(0x01010101)  # bit 0 of every byte


def to_tile(words: LaneWords) -> LaneWords:
    """A field [..., 4] of the low four bits and one [..., b - 4] of the rest, side by side -> as they lie in a tile."""
    (low, nibbles), (high, upper) = words.items()
    above = upper.shape[-1]  # bits of a code
    shift, overlap, steps = 4 - above, 2 * above, STEPS // above
    tiled, rest = np.empty_like(nibbles), np.zeros_like(upper)
    rows: list[tuple[Words, Words]] = []
    for step in range(STEPS):
        place = upper[..., step // steps] >> above * (step % steps)
        row, row8 = (nibbles[..., step] >> i & EVERY * 15 | (place >> i & EVERY * (2**above - 1)) << 4 for i in (0, 4))
        needed = (row >> shift ^ row8) & EVERY * (2**overlap - 1)
        rest[..., step // steps] |= rotate_left(needed << shift, overlap * (step % steps))
        rows.append((row, row8))
    for step, (row, row8) in enumerate(rows):
        f = rotate_left(rest[..., step // steps], -overlap * (step % steps))
        tiled[..., step] = row8 << shift | (row ^ f) & EVERY * (2**shift - 1)
    return {low: tiled, high: rest}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    (low, tiled), (high, rest) = words.items()
    above = rest.shape[-1]
    shift, overlap, steps = 4 - above, 2 * above, STEPS // above
    nibbles, upper = np.zeros_like(tiled), np.zeros_like(rest)
    for step in range(STEPS):
        w, f = tiled[..., step], rotate_left(rest[..., step // steps], -overlap * (step % steps))
        for i, row in ((0, w ^ f), (4, w >> shift)):
            nibbles[..., step] |= (row & EVERY * 15) << i
            upper[..., step // steps] |= (row >> 4 & EVERY * (2**above - 1)) << above * (step % steps) + i
    return {low: nibbles, high: upper}
