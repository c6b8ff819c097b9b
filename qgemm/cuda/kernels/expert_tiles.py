"""Token tiles of sorted rows: how many there can be, and their time compared with looking up the expert of each slot.

Each kernel over token tiles predicts its own us; `best_tile` chooses among the token tiles of all kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qgemm.codec.format import Format
from qgemm.cuda.layout import tile as tiles

DECODE_TILE = 8  # rows of a token tile of moe_decode_tiles, the columns of an mma

# us for a megabyte of W. MEGABYTE: read from memory. DECODE_MEGABYTE: by moe_decode, which reads W again for each slot.
# DECODE_TILE_MEGABYTE: by moe_decode_tiles, which reads W for each token tile. LAUNCHES: us of the launches that sort,
# and that add products up.
MEGABYTE = 0.154
DECODE_MEGABYTE = 0.26
DECODE_TILE_MEGABYTE = 0.268
LAUNCHES = 10.0


class Size(NamedTuple):
    """A product of a layer: format, N and K of an expert. gated: whether N counts the rows of gate and up together."""

    format: Format
    n: int
    k: int
    gated: bool = False

    @property
    def megabytes(self) -> float:
        """Megabytes of the tiles of an expert."""
        row_blocks, along = -(-self.n // tiles.ROWS), -(-self.k // tiles.columns(self.format))
        return row_blocks * along * tiles.tile_dtype(self.format).itemsize / 1e6


def best_tile(times: dict[int, float], sizes: tuple[Size, ...], slots: int, experts: int) -> int:
    """The fastest token tile: DECODE_TILE, or one of a prefill kernel, whose us are `times`.

    0 if moe_decode, which does not sort, is faster.
    """
    megabytes = sum(size.megabytes for size in sizes)
    _, count = expected_tiles(slots, experts, DECODE_TILE)
    us = {**times, DECODE_TILE: DECODE_TILE_MEGABYTE * count * megabytes}
    best = min(us, key=us.__getitem__)
    return best if us[best] + LAUNCHES < DECODE_MEGABYTE * slots * megabytes else 0


def read_us(size: Size, experts: float) -> float:
    """The us in which this number of experts is read from memory."""
    return MEGABYTE * experts * size.megabytes


@lru_cache(maxsize=4096)
def expected_tiles(slots: int, experts: int, tokens: int) -> tuple[float, float]:
    """The expected number of experts that have a token, and of their token tiles, if each slot chooses at random."""
    if experts == 1:
        return 1.0, float(-(-slots // tokens))
    counts = np.arange(slots + 1)
    steps = np.log(np.arange(slots, 0, -1) / np.arange(1, slots + 1)) - np.log(experts - 1)
    logs = slots * np.log1p(-1 / experts) + np.concatenate([[0.0], np.cumsum(steps)])
    chances = np.exp(logs)  # [slots + 1]: the chance that an expert has this number of slots
    return experts * float(1 - chances[0]), experts * float(chances @ -(-counts // tokens))


def max_token_tiles(slots: int, experts: int, tokens: int) -> int:
    """The maximum number of token tiles for any ids."""
    return (slots + (tokens - 1) * min(slots, experts)) // tokens
