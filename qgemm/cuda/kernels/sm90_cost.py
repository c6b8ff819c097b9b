"""Cost model of prefill_sm90: the time of every config for a problem, of which the least is launched.

    us = fixed + hypot(work, memory) + later tiles + reduction

fixed and the time of a k_block are measured for each format, type of x and config; the constants of the rest hold for
all. tools/tune_sm90.py measures and fits them (configs/prefill_sm90.json); docs/choosing-a-config.md explains them.
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

DATA = "prefill_sm90"  # its file in configs/
TOKENS = tuple(sorted({row[1] for rows in read(DATA)["formats"].values() for row in rows}))  # token tiles of any format
UNIT_SIZE = 128  # tokens times row_blocks of a work tile in whose size epilogue and reduction are counted


class Measured(NamedTuple):
    """A config, what a launch of it takes at least, and what a CTA takes for a k_block of its work tile; in us."""

    config: Sm90Config
    fixed_us: float
    k_block_us: float


class Work(NamedTuple):
    """What a launch consists of, in the terms of the cost model. The tuner has arrays of each.

    k_blocks: that the busiest CTA multiplies. busy: the share of SMs that have a CTA. megabytes: of W, read from
    memory. later_tiles: after a CTA's first. size: of a work tile. in_cluster, in_memory, stream_k: 1 where CTAs share
    work tiles in clusters of two, through global memory, or by stream-K. partials: that a CTA adds up beyond the first.
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
    """Constants of the cost model, in us; pairs: of any work tile, and for each UNIT_SIZE of it.

    idle_gain: the share by which k_blocks are faster on a GPU whose other SMs are idle. l2_megabytes: of W that stay
    in the L2 cache until its next pass.
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
        shared = w.in_cluster * _at(self.in_cluster, w.size) + w.in_memory * _at(self.in_memory, w.size)
        shared = shared + w.partials * self.partial * w.size + w.stream_k * _at(self.stream_k, w.size)
        memory = self.megabyte * w.megabytes
        return fixed_us + (work**2 + memory**2) ** 0.5 + w.later_tiles * _at(self.later_tile, w.size) + shared


def _at(pair: tuple[float, float], size: Any) -> Any:
    return pair[0] + pair[1] * size


def work_of(fmt: Format, config: Sm90Config, m: int, n: int, k: int, sms: int, l2_megabytes: float) -> Work:
    """What y [M, N] = x [M, K] @ W.T by a config costs on `sms` SMs."""
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
    again = (-(-m // config.tokens) - 1) * (1 - min(1.0, l2_megabytes / megabytes))  # passes that L2 does not serve
    return Work(
        k_block_count, grid.ctas / sms, megabytes * (1 + again), later, config.tokens * config.row_blocks / UNIT_SIZE,
        int(split_k == 2), int(split_k > 2), int(stream_k), partials,
    )  # fmt: skip


@cache
def model() -> Model:
    """The constants as measured."""
    return Model(**read(DATA)["model"])


@cache
def measured(fmt: Format, x: str) -> tuple[Measured, ...]:
    """The configs of a format for x of this type, of which all fit; of a format that was not tuned the nearest's."""
    formats = read(DATA)["formats"]
    rows = formats[fmt.name if fmt.name in formats else nearest(fmt)]
    made = (
        Measured(Sm90Config(tokens, row_blocks, wg_split_k, k_blocks_per_stage, bool(single_tile)), *us)
        for of_x, tokens, row_blocks, wg_split_k, k_blocks_per_stage, single_tile, *us in rows
        if of_x == x
    )
    return tuple(row for row in made if row.config.fits(fmt))


def nearest(fmt: Format) -> str:
    """The tuned format whose tiles are most like this one's: in how levels are found, in k_blocks, in size."""
    facts: dict[str, tuple[int, bool, int]] = read(DATA)["tiles"]
    own = tile_facts(fmt)
    return min(facts, key=lambda name: [abs(a - b) for a, b in zip(facts[name], own, strict=True)])


def tile_facts(fmt: Format) -> tuple[int, int, int]:
    """How levels are found, k_blocks of a tile, and bytes of a k_block.

    Levels: 0 computed, 1 looked up in a table of pairs, 2 points of a grid, which take most instructions.
    """
    levels = 2 if fmt.tile.grid is not None else int(table_bytes(fmt) > 0)
    return levels, k_blocks(fmt), tile_dtype(fmt).itemsize // k_blocks(fmt)


def ranked(p: Problem) -> list[tuple[Sm90Config, float]]:
    """Every config that can serve a problem and its predicted us, the fastest first."""
    times = ((row.config, predicted(p, row, p.m)) for row in measured(p.format, p.x))
    return sorted((pair for pair in times if pair[1] < inf), key=lambda pair: pair[1])


def chosen(p: Problem, rows: Sequence[int]) -> list[Sm90Config]:
    """The configs that are chosen for any of these numbers of rows of x."""
    found = measured(p.format, p.x)
    return fastest(((row.config, row.config.tokens, partial(predicted, p, row)) for row in found), rows)


def predicted(p: Problem, row: Measured, m: int) -> float:
    """The us of a config for M rows of x, infinite if it cannot serve them."""
    config, constants = row.config, model()
    if not config.serves(m, -(-p.n // ROWS), p.sms):
        return inf
    work = work_of(p.format, config, m, p.n, p.k, p.sms, constants.l2_megabytes)
    return float(constants.us(row.fixed_us, row.k_block_us, work))


def configs(p: Problem) -> list[Sm90Config]:
    """Every config for a format and type of x."""
    return [row.config for row in measured(p.format, p.x)]
