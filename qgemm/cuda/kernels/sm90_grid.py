"""The grid of the prefill kernels of sm_90: number of CTAs, tiles of y split along K (split-K, stream-K), workspace."""

from __future__ import annotations

from typing import NamedTuple

from qgemm.cuda.jit.twins import Divisor, StreamK
from qgemm.cuda.layout import tile as tiles

from .sm90_config import FLAG, MAX_PARTIALS, SUM, Sm90Config

WASTE = 0.06  # the share of a GPU that whole tiles may leave idle
# Stream-K serves tiles of at least STREAM_K_UNITS work units if split-K would leave more than IDLE of the GPU idle.
IDLE, STREAM_K_UNITS = 0.3, 16
PAIR = 2  # CTAs of a cluster; larger clusters do not fill an H200, whose GPCs have different numbers of SMs
# Cost of the reduction by split_k, in units of the time of one k_block of a row_block. On an H200 a pair of CTAs
# exchanges partials in half a microsecond; through global memory the exchange costs two and more.
SPLIT_K_COST = {1: 0, 2: 4, 3: 20, 4: 18, 6: 22, 8: 26}
PARTIALS = "sm90 partials"  # name of the stream-K workspace


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y round-robin and split the tiles after them along K.

    cluster_split_k: 0, or the split_k of each split tile, an even number: its CTAs are pairs (clusters), which exchange
    partials through shared memory.
    """

    ctas: int
    whole: int
    cluster_split_k: int = 0


def grid_of(count: int, units: int, max_ctas: int, single_tile: bool = False, k_blocks: int = 1) -> Grid:
    """The grid for `count` tiles of y of `units` work units along K, on a GPU that holds `max_ctas` CTAs at a time.

    Splitting lets all CTAs finish together, but partials are written and read: tiles stay whole unless they would leave
    more than WASTE of the GPU idle. Fewer tiles than CTAs: split-K with the fastest split_k; or stream-K, if split-K
    leaves more than IDLE of the GPU idle and a CTA may have several tiles (not `single_tile`). k_blocks: of a work
    unit, over all row_blocks of a tile.
    """
    if count <= max_ctas:
        max_split_k = min(max_ctas // count, units)
        idle = count * max_split_k < max_ctas * (1 - IDLE)
        if idle and units >= max(STREAM_K_UNITS, max_ctas // count) and not single_tile:
            return Grid(max_ctas, 0)
        costs = {
            split_k: -(-units // split_k) * k_blocks + cost
            for split_k, cost in SPLIT_K_COST.items()
            if split_k <= max_split_k
        }
        split_k = min(costs, key=costs.__getitem__)
        return Grid(count * split_k, count if split_k == 1 else 0, 0 if split_k % PAIR else split_k)
    if -(-count // max_ctas) * max_ctas <= count * (1 + WASTE):
        return Grid(max_ctas, count)
    return Grid(max_ctas, (count // max_ctas - 1) * max_ctas)


def stream_k_of(grid: Grid, count: int, units: int, row_tiles: int) -> StreamK:
    """The schedule of `count` tiles of y with `units` work units along K each, `row_tiles` of them along N."""
    units_per_cta, remainder = divmod((count - grid.whole) * units, grid.ctas)
    return StreamK(
        whole_tiles=grid.whole,
        cluster_split_k=grid.cluster_split_k,
        units_per_cta=units_per_cta,
        remainder=remainder,
        ctas=Divisor.by(grid.ctas),
        work_units=Divisor.by(units),
        row_tiles=Divisor.by(row_tiles),
    )


def workspace_bytes(grid: Grid, count: int, config: Sm90Config) -> int:
    """Global memory for the partials of CTAs that share some of `count` tiles of y."""
    if grid.whole == count or grid.cluster_split_k == PAIR:
        return 0
    return partials_bytes(grid.ctas, config)


def partials_bytes(ctas: int, config: Sm90Config) -> int:
    """Flags and partials of `ctas` CTAs: Workspace of kernels/gemm/sm90/reduce.cuh. Workspaces are kept: few sizes."""
    size = ctas * config.row_blocks * tiles.ROWS * config.tokens * SUM
    return FLAG * MAX_PARTIALS + (1 << (size - 1).bit_length())
