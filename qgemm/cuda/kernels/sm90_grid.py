"""Grid of prefill_sm90: how many CTAs, and which work tiles are cut along K (split-K, stream-K)."""

from __future__ import annotations

from typing import NamedTuple

WASTE = 0.06  # the share of a GPU that whole tiles may leave idle
IDLE, CUT_UNITS = 0.3, 16  # that equal pieces of few tiles may leave idle, if a tile has so many units along K
PAIR = 2  # CTAs of a cluster: larger ones do not fill an H200, whose partials have different numbers of multiprocessors
# Pieces of a tile, and the time it takes to add up their sums in that of a k_block of 64 columns of a row_block. On an
# H200 a pair exchanges them in half a microsecond; through global memory it takes two and more.
SPLIT_K_COST = {1: 0, 2: 4, 3: 20, 4: 18, 6: 22, 8: 26}


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y in turn; those after them are cut along K, a piece a CTA.

    cluster_split_k: into so many pieces each, an even number, for pairs of CTAs that exchange sums through shared
    memory, or 0.
    """

    ctas: int
    whole: int
    cluster_split_k: int = 0


def grid_of(count: int, units: int, max_ctas: int, single_tile: bool = False, k_blocks: int = 1) -> Grid:
    """For so many tiles of y, each of so many units along K, on a GPU that holds `max_ctas` CTAs at a time.

    Cutting makes all CTAs finish together, but costs writing and reading sums: it is for where whole tiles would leave
    more than WASTE of the GPU idle. Few tiles are cut into equal pieces, as many as make the time shortest, unless they
    leave more than IDLE and a CTA may have several (not `single_tile`). k_blocks: of all row_blocks of a tile, in a
    unit.
    """
    if count <= max_ctas:
        most = min(max_ctas // count, units)
        if count * most < max_ctas * (1 - IDLE) and units >= max(CUT_UNITS, max_ctas // count) and not single_tile:
            return Grid(max_ctas, 0)
        costs = {
            split_k: -(-units // split_k) * k_blocks + sums for split_k, sums in SPLIT_K_COST.items() if split_k <= most
        }
        split_k = min(costs, key=costs.__getitem__)
        return Grid(count * split_k, count if split_k == 1 else 0, 0 if split_k % PAIR else split_k)
    if -(-count // max_ctas) * max_ctas <= count * (1 + WASTE):
        return Grid(max_ctas, count)
    return Grid(max_ctas, (count // max_ctas - 1) * max_ctas)
