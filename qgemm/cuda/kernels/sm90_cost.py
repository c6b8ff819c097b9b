"""Cost model of prefill_sm90: the predicted time of every config for a problem. The fastest config is launched.

    us = fixed + hypot(work, memory) + later tiles + reduction

fixed and the time of a k_block are measured for each format and config. The other constants hold for all
configs. tools/tune_sm90.py measures and fits them (configs/prefill_sm90.json); docs/choosing-a-config.md explains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.layout.tile import K_BLOCK, ROWS, columns, k_blocks, table_bytes, tile_dtype
from qgemm.cuda.problem import Problem

from .choices import fastest
from .sm90_config import Sm90Config
from .sm90_grid import grid_of

DATA = "prefill_sm90"  # the file in configs/
TOKEN_TILES = tuple(sorted({row[0] for rows in read(DATA)["formats"].values() for row in rows}))  # for any format
UNIT_SIZE = 128  # tokens * row_blocks: the unit of a work tile's size in the cost of epilogue and reduction


class Measured(NamedTuple):
    """A config with two times in us: the fixed part of a launch, and a k_block of a CTA's work tile."""

    config: Sm90Config
    fixed_us: float
    k_block_us: float


class Work(NamedTuple):
    """A launch in the terms of the cost model: numbers, or arrays of them in the tuner.

    k_blocks: k_blocks of the busiest CTA. busy: share of SMs that have a CTA. megabytes: of W, read from memory.
    later_tiles: work tiles of a CTA after its first. size: of a work tile. in_cluster, in_memory, stream_k: 1 if CTAs
    share work tiles in clusters of two, through global memory, by stream-K. partials: partials that a CTA adds beyond
    the first.
    """

    k_blocks: Any
    busy: Any
    megabytes: Any
    later_tiles: Any
    size: Any
    in_cluster: Any
    in_memory: Any
    stream_k: Any
    partials: Any


class Model(NamedTuple):
    """Constants of the cost model in us. Pairs are the cost of a work tile and of each UNIT_SIZE of it.

    idle_gain: share by which k_blocks are faster if the other SMs are idle. l2_megabytes: the part of W that stays in
    the L2 cache until the next pass over W.
    """

    idle_gain: float
    megabyte: float
    l2_megabytes: float
    later_tile: tuple[float, float]
    in_cluster: tuple[float, float]
    in_memory: tuple[float, float]
    partial: float
    stream_k: tuple[float, float]

    def us(self, fixed_us: Any, k_block_us: Any, w: Work) -> Any:
        """The time of a launch."""
        work = k_block_us * w.k_blocks * (1 - self.idle_gain * (1 - w.busy))
        shared = w.in_cluster * _linear(self.in_cluster, w.size) + w.in_memory * _linear(self.in_memory, w.size)
        shared = shared + w.partials * self.partial * w.size + w.stream_k * _linear(self.stream_k, w.size)
        memory = self.megabyte * w.megabytes
        return fixed_us + (work**2 + memory**2) ** 0.5 + w.later_tiles * _linear(self.later_tile, w.size) + shared


def _linear(pair: tuple[float, float], size: Any) -> Any:
    return pair[0] + pair[1] * size


def work_of(fmt: Format, config: Sm90Config, m: int, n: int, k: int, sms: int, l2_megabytes: float) -> Work:
    """The work of y [M, N] = x [M, K] @ W.T by a config on `sms` SMs."""
    row_blocks, unit = -(-n // ROWS), config.unit(fmt)
    count, units, unit_k_blocks = config.tiles(m, row_blocks), -(-k // unit), unit // K_BLOCK
    grid = grid_of(count, units, sms, config.single_tile, config.row_blocks * unit_k_blocks)
    split_k, uneven = divmod(grid.ctas, count)
    stream_k = grid.whole < count and bool(uneven or split_k < 2)
    if stream_k:
        k_block_count: float = count * units * unit_k_blocks / grid.ctas
        later, split_k = max(0.0, count / grid.ctas - 1), 1
    elif grid.whole == count:
        waves = -(-count // grid.ctas)
        k_block_count, later, split_k = waves * -(-k // K_BLOCK), waves - 1, 1
    else:
        k_block_count, later = min(-(-k // K_BLOCK), -(-units // split_k) * unit_k_blocks), 0
    partials = 0 if split_k == 1 else split_k - 1 if split_k % 2 else split_k // 2 - 1
    megabytes = row_blocks * -(-k // columns(fmt)) * tile_dtype(fmt).itemsize / 1e6
    passes = 1 + (-(-m // config.tokens) - 1) * (1 - min(1.0, l2_megabytes / megabytes))  # over W in memory, not in L2
    return Work(
        k_block_count, grid.ctas / sms, megabytes * passes, later, config.tokens * config.row_blocks / UNIT_SIZE,
        int(split_k == 2), int(split_k > 2), int(stream_k), partials,
    )  # fmt: skip


@cache
def model() -> Model:
    """The fitted constants."""
    return Model(**read(DATA)["model"])


@cache
def measured(fmt: Format) -> tuple[Measured, ...]:
    """The configs that fit a format; a format that was not tuned has those of the nearest one."""
    formats = read(DATA)["formats"]
    rows = formats[fmt.name if fmt.name in formats else nearest(fmt)]
    configs = (
        Measured(Sm90Config(tokens, row_blocks, wg_split_k, k_blocks_per_stage, bool(single_tile)), *us)
        for tokens, row_blocks, wg_split_k, k_blocks_per_stage, single_tile, *us in rows
    )
    return tuple(row for row in configs if row.config.fits(fmt))


def nearest(fmt: Format) -> str:
    """The tuned format with the most similar tiles: in the computation of levels, k_blocks and size, in this order."""
    facts: dict[str, tuple[int, bool, int]] = read(DATA)["tiles"]
    own = tile_facts(fmt)
    return min(facts, key=lambda name: [abs(a - b) for a, b in zip(facts[name], own, strict=True)])


def tile_facts(fmt: Format) -> tuple[int, int, int]:
    """The computation of levels, k_blocks of a tile, and bytes of a k_block.

    Levels: 0 computed, 1 looked up in a table of pairs, 2 points of a grid, which need the most instructions.
    """
    levels = 2 if fmt.tile.grid is not None else int(table_bytes(fmt) > 0)
    return levels, k_blocks(fmt), tile_dtype(fmt).itemsize // k_blocks(fmt)


def ranked(p: Problem) -> list[tuple[Sm90Config, float]]:
    """Every config that can serve a problem and its predicted us, the fastest first."""
    times = ((row.config, predicted(p, row, p.m)) for row in measured(p.format))
    return sorted((pair for pair in times if pair[1] < inf), key=lambda pair: pair[1])


def chosen(p: Problem, rows: Sequence[int]) -> list[Sm90Config]:
    """The configs that are chosen for any of these numbers of rows of x."""
    candidates = measured(p.format)
    return fastest(((row.config, row.config.tokens, partial(predicted, p, row)) for row in candidates), rows)


def predicted(p: Problem, row: Measured, m: int) -> float:
    """The us of a config for M rows of x, infinite if it cannot serve them."""
    config, constants = row.config, model()
    if not config.serves(m, -(-p.n // ROWS), p.sms):
        return inf
    work = work_of(p.format, config, m, p.n, p.k, p.sms, constants.l2_megabytes)
    return float(constants.us(row.fixed_us, row.k_block_us, work))


def configs(p: Problem) -> list[Sm90Config]:
    """Every config for a format."""
    return [row.config for row in measured(p.format)]
