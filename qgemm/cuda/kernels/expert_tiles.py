"""Token tiles of sorted rows on the host: how many there can be, and what they take beside looking each expert up.

Each kernel over token tiles predicts its own us; `best_tile` chooses among the tiles of all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qgemm.codec.format import Format
from qgemm.cuda.layout import tile as tiles

DECODE_TILE = 8  # rows of a token tile of moe_decode_tiles: the columns of an mma

# us. MEGABYTE: of W, read from memory. DECODE_MEGABYTE: of W by moe_decode, which reads the experts of each slot anew;
# DECODE_TILE_MEGABYTE: by moe_decode_tiles, for each token tile. LAUNCHES: of sorting, gathering and adding up.
MEGABYTE = 0.154
DECODE_MEGABYTE = 0.26
DECODE_TILE_MEGABYTE = 0.268
LAUNCHES = 10.0


class Size(NamedTuple):
    """A product of a layer: format, N and K of an expert; gated: N of both matrices together."""

    format: Format
    n: int
    k: int
    gated: bool = False

    @property
    def megabytes(self) -> float:
        """Of the tiles of an expert."""
        row_blocks, along = -(-self.n // tiles.ROWS), -(-self.k // tiles.columns(self.format))
        return row_blocks * along * tiles.tile_dtype(self.format).itemsize / 1e6


def best_tile(times: dict[int, float], sizes: tuple[Size, ...], slots: int, experts: int) -> int:
    """The token tile that takes least time: of a prefill kernel, whose us are given, or DECODE_TILE.

    0 where moe_decode, which sorts nothing, takes less.
    """
    megabytes = sum(size.megabytes for size in sizes)
    _, count = expected_tiles(slots, experts, DECODE_TILE)
    every = {**times, DECODE_TILE: DECODE_TILE_MEGABYTE * count * megabytes}
    best = min(every, key=every.__getitem__)
    return best if every[best] + LAUNCHES < DECODE_MEGABYTE * slots * megabytes else 0


def read_us(size: Size, met: float) -> float:
    """Reading so many experts from memory."""
    return MEGABYTE * met * size.megabytes


@lru_cache(maxsize=4096)
def expected_tiles(slots: int, experts: int, tokens: int) -> tuple[float, float]:
    """Experts that have a token, and their token tiles, where each slot chooses at random."""
    if experts == 1:
        return 1.0, float(-(-slots // tokens))
    counts = np.arange(slots + 1)
    steps = np.log(np.arange(slots, 0, -1) / np.arange(1, slots + 1)) - np.log(experts - 1)
    logs = slots * np.log1p(-1 / experts) + np.concatenate([[0.0], np.cumsum(steps)])
    chances = np.exp(logs)  # of an expert to have so many
    return experts * float(1 - chances[0]), experts * float(chances @ -(-counts // tokens))


def max_token_tiles(slots: int, experts: int, tokens: int) -> int:
    """Token tiles at most, whatever the ids."""
    return (slots + (tokens - 1) * min(slots, experts)) // tokens
