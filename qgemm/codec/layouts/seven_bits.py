"""Words of a device tile for codes of seven bits, of which four lie in the field qs of a block, two in qh, one in qt.

As those of five and six bits (overlapping.py): two codes lie in a byte, where six of their bits overlap. With w the
word of a step and f that of the rest, the codes of a lane's columns are in the bytes of

    (w ^ f) & 127 for row g,  w >> 1 for row g + 8.

The rests of steps 0, 1 and 2 are bits 1 to 6 of every byte of a word each; bits 0 and 7 of these three words, rotated
left by 2, 4 and 6, are bits 1 to 6 of the rest of step 3. Bit 0 of w makes up for what else is in f.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.packing import LaneWords, Words, rotate_left

STEPS = 4
EVERY: np.uint32 = np.uint32(0x01010101)  # byte
REST, SPARE = EVERY * np.uint32(0x7E), EVERY * np.uint32(0x81)
TWO = [EVERY * np.uint32(6 << 2 * i) for i in range(3)]  # bits of the last rest that a word has to spare


def to_tile(words: LaneWords) -> LaneWords:
    """Fields qs [..., 4], qh [..., 2] and qt [..., 1] side by side -> as they lie in a tile."""
    rows = [_rows(words, step) for step in range(STEPS)]
    needed = [(row ^ row8 << 1) & REST for row, row8 in rows]
    last = needed[3]
    rests = [needed[i] | rotate_left(np.bitwise_and(last, TWO[i]), -2 * (i + 1)) for i in range(3)]
    tiled = [row8 << 1 | (row ^ rest) & EVERY for (row, row8), rest in zip(rows, (*rests, last), strict=True)]
    return {"qs": np.stack(tiled, axis=-1), "qh": np.stack(rests[:2], axis=-1), "qt": rests[2][..., None]}


def from_tile(words: LaneWords) -> LaneWords:
    """The inverse of `to_tile`."""
    rests = [words["qh"][..., 0], words["qh"][..., 1], words["qt"][..., 0]]
    last = rotate_left(rests[0], 2) & TWO[0] | rotate_left(rests[1], 4) & TWO[1] | rotate_left(rests[2], 6) & TWO[2]
    made: LaneWords = {name: np.zeros_like(of) for name, of in words.items()}
    for step, rest in enumerate((*rests, last)):
        w = words["qs"][..., step]
        for i, codes in ((0, (w ^ rest) & EVERY * 127), (4, w >> 1 & EVERY * 127)):
            made["qs"][..., step] |= (codes & EVERY * 15) << i
            made["qh"][..., step // 2] |= (codes >> 4 & EVERY * 3) << 2 * (step % 2) + i
            made["qt"][..., 0] |= (codes >> 6 & EVERY) << step + i
    return made


def _rows(words: LaneWords, step: int) -> tuple[Words, Words]:
    """Codes of rows g and g + 8, one in each byte."""
    low, two, top = words["qs"][..., step], words["qh"][..., step // 2] >> 2 * (step % 2), words["qt"][..., 0] >> step

    def at(i: int) -> Words:
        code: Words = np.bitwise_and(low >> i, EVERY * np.uint32(15))
        code |= (two >> i & EVERY * np.uint32(3)) << 4
        code |= (top >> i & EVERY) << 6
        return code

    return at(0), at(4)
