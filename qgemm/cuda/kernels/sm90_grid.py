"""Grid of prefill_sm90: the number of CTAs, and the tiles of y that are split along K (split-K, stream-K)."""

from __future__ import annotations

from typing import NamedTuple

WASTE = 0.06  # the share of a GPU that whole tiles may leave idle
IDLE, STREAM_K_UNITS = 0.3, 16  # stream-K where split-K leaves more idle, from so many work units of a tile on
PAIR = 2  # CTAs of a cluster: larger ones do not fill an H200, whose partials have different numbers of multiprocessors
# Cost of the reduction by split_k, in units of the time of one k_block of a row_block. On an H200 a pair of CTAs
# exchanges partials in half a microsecond; through global memory the exchange takes two and more.
SPLIT_K_COST = {1: 0, 2: 4, 3: 20, 4: 18, 6: 22, 8: 26}


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y round-robin and split those after them along K.

    cluster_split_k: 0, or the split_k of each such tile, an even number: its CTAs are pairs (clusters), which exchange
    partials through shared memory.
    """

    ctas: int
    whole: int
    cluster_split_k: int = 0


def grid_of(count: int, units: int, max_ctas: int, single_tile: bool = False, k_blocks: int = 1) -> Grid:
    """The grid for `count` tiles of y of `units` work units along K, on a GPU that holds `max_ctas` CTAs at a time.

    Splitting lets all CTAs finish together, but partials are written and read: tiles stay whole unless they would leave
    more than WASTE of the GPU idle. Fewer tiles than CTAs: split-K, of the split_k that makes the time shortest; or
    stream-K, where split-K leaves more than IDLE and a CTA may have several tiles (not `single_tile`). k_blocks: of all
    row_blocks of a tile, in a work unit.
    """
    if count <= max_ctas:
        most = min(max_ctas // count, units)
        if count * most < max_ctas * (1 - IDLE) and units >= max(STREAM_K_UNITS, max_ctas // count) and not single_tile:
            return Grid(max_ctas, 0)
        costs = {
            split_k: -(-units // split_k) * k_blocks + cost for split_k, cost in SPLIT_K_COST.items() if split_k <= most
        }
        split_k = min(costs, key=costs.__getitem__)
        return Grid(count * split_k, count if split_k == 1 else 0, 0 if split_k % PAIR else split_k)
    if -(-count // max_ctas) * max_ctas <= count * (1 + WASTE):
        return Grid(max_ctas, count)
    return Grid(max_ctas, (count // max_ctas - 1) * max_ctas)
