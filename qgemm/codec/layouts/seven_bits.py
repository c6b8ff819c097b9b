"""Words of a device tile for codes of seven bits, whose low four, next two and highest bits are fields of a block.

Two codes share a byte, as in overlapping.py; here six of their bits overlap. A step has a word w and a word f with the
remaining bits, and the codes of a lane's columns are in the bytes of

    (w ^ f) & 127 for row g,  w >> 1 for row g + 8.

The words f of steps 0, 1 and 2 are stored, and use bits 1 to 6 of every byte; bits 0 and 7 of these three words,
rotated left by 2, 4 and 6, are bits 1 to 6 of f of step 3. Bit 0 of w cancels the other bits of f.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.packing import LaneWords, Words, rotate_left

STEPS = 4
EVERY: np.uint32 = np.uint32(0x01010101)  # bit 0 of every byte
REST = EVERY * np.uint32(0x7E)
PARTS = [EVERY * np.uint32(6 << 2 * i) for i in range(3)]  # the bits of f of step 3 that each stored word has


def to_tile(words: LaneWords) -> LaneWords:
    """Fields [..., 4], [..., 2] and [..., 1] of four, two and one bits, side by side -> as they lie in a tile."""
    low, middle, top = words
    rows = [_rows(words, step) for step in range(STEPS)]
    needed = [(row ^ row8 << 1) & REST for row, row8 in rows]
    last = needed[3]
    rests = [needed[i] | rotate_left(np.bitwise_and(last, PARTS[i]), -2 * (i + 1)) for i in range(3)]
    tiled = [row8 << 1 | (row ^ rest) & EVERY for (row, row8), rest in zip(rows, (*rests, last), strict=True)]
    return {low: np.stack(tiled, axis=-1), middle: np.stack(rests[:2], axis=-1), top: rests[2][..., None]}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    low, middle, top = words
    rests = [words[middle][..., 0], words[middle][..., 1], words[top][..., 0]]
    last = (
        rotate_left(rests[0], 2) & PARTS[0] | rotate_left(rests[1], 4) & PARTS[1] | rotate_left(rests[2], 6) & PARTS[2]
    )
    blocks: LaneWords = {name: np.zeros_like(field) for name, field in words.items()}
    for step, rest in enumerate((*rests, last)):
        w = words[low][..., step]
        for i, codes in ((0, (w ^ rest) & EVERY * 127), (4, w >> 1 & EVERY * 127)):
            blocks[low][..., step] |= (codes & EVERY * 15) << i
            blocks[middle][..., step // 2] |= (codes >> 4 & EVERY * 3) << 2 * (step % 2) + i
            blocks[top][..., 0] |= (codes >> 6 & EVERY) << step + i
    return blocks


def _rows(words: LaneWords, step: int) -> tuple[Words, Words]:
    """Codes of rows g and g + 8, each code in a byte."""
    low, middle, top = words.values()
    nibbles, pairs, bits = low[..., step], middle[..., step // 2] >> 2 * (step % 2), top[..., 0] >> step

    def codes(shift: int) -> Words:
        code: Words = np.bitwise_and(nibbles >> shift, EVERY * np.uint32(15))
        code |= (pairs >> shift & EVERY * np.uint32(3)) << 4
        code |= (bits >> shift & EVERY) << 6
        return code

    return codes(0), codes(4)
