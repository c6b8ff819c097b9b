"""Prefill on int8 tensor cores on the host: configs and their cost, the template, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from math import inf

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUPS
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import by_tensor_map
from qgemm.cuda.driver.workspace import address
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import TYPE_CODES, EpilogueArguments, Outputs, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, EIGHT_BITS, TYPES, Problem

from .choices import fastest
from .kernel import Kernel
from .prefill_sm90 import PARTIALS, stream_k_of, workspace_bytes
from .sm90_config import Sm90Config, pipeline_template, stages_of
from .sm90_cost import Measured, model, work_of
from .sm90_grid import PAIR, Grid, grid_of

NAME, QUANTIZED = "prefill_sm90_eight_bits", "x in eight bits"
TURN = 8 * 8 * COLUMNS  # numbers of x that a CTA quantizes at a time: a warp has 8 tokens
MOST_TOKENS = 128  # but for formats whose weights take few registers: with 176 q4_k takes 179 us where 128 take 170
# k_blocks of formats with a minimum or groups of 16, of those whose levels lie in a table, and of grids by those of the
# others: with 1024 rows of x q4_k takes 170.0, q6_k 172.5 and iq4_nl 179 us, q4_0 151.0, mxfp4 153.1, q8_0 152.4; with
# 256 rows, x quantized within, q4_0 takes 43.7, iq3_s 60.4 and iq2_xs 70.0 us (8192x8192).
SLOWER, SLOWER_BY_TABLE, SLOWER_BY_GRID, GROUP_OF_MOST = 1.13, 1.18, 1.35, 32
LEAST_STAGES = 3  # with two q8_0 takes 124 us where it takes 94 with three and smaller tiles


class Pointers(ctypes.Structure):
    """What changes from call to call, besides the tensor map of x."""

    _fields_ = [
        ("partials", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("x_units", ctypes.c_void_p),
        ("epilogue", EpilogueArguments),
    ]


@cache
def measured() -> tuple[Measured, ...]:
    """The configs of both groups with their time, the same for all formats."""
    return tuple(
        Measured(Sm90Config(tokens, row_blocks, wg_split_k, stage, bool(single_tile), x_scale=group), *us)
        for group, tokens, row_blocks, wg_split_k, stage, single_tile, *us in read(NAME)["configs"]
    )


def tokens_of(activation: str) -> tuple[int, ...]:
    """The token tiles of an activation's configs."""
    return tuple(sorted({row.config.tokens for row in measured() if row.config.x_scale == GROUPS[activation]}))


def template(fmt: Format, config: Sm90Config) -> Template:
    """What the kernel is compiled with."""
    least, greatest = level_range(fmt)
    return {
        **pipeline_template(fmt, config, EIGHT_BITS),
        "LEAST_LEVEL": int(least),
        "GREATEST_LEVEL": int(greatest),
        "X_GROUP": config.x_scale,
    }


class EightBitLaunch:
    """The kernel for all matrices of one shape and format, and so many rows of x.

    enter: a call, with a raw stream handle and pointers to the codes of x, or to x that it quantizes itself, w, y,
    bias and residual (0 for none).
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        row_blocks, (output,), constants = -(-p.n // tiles.ROWS), p.outputs, template(p.format, config)
        count, units, grid = _grid(p, config)
        assert not (config.single_tile and count > grid.ctas)
        function = load(NAME, p.format, **constants)
        pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
        partials, w, *x = (
            ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset)
            for name in ("partials", "w", "x_scales", "given", "x_units")
        )
        rows = group_activations.rows_of(p.m)
        sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), *map(ctypes.c_int, (p.m, rows, x_type(p)))
        stream_k = stream_k_of(grid, count, units, -(-row_blocks // config.row_blocks))
        cluster = PAIR if grid.cluster_split_k else 0

        arguments = (w, *x, pointers.epilogue, partials, *sizes, stream_k)
        shared, count_of_pointers = int(constants["SMEM_BYTES"]), 2 + len(x) + len(Outputs._fields_)
        box = EIGHT_BITS, rows, group_activations.columns_of(p.k), config.tokens
        scales_at = group_activations.scales_at(p.m, p.k)
        room = partial(address, p.device, PARTIALS, workspace_bytes(grid, count, config))
        of_launch = grid.ctas, config.threads, shared, pointers, count_of_pointers, cluster
        by_codes, kept = by_tensor_map(box, room, function, arguments, *of_launch), dict[int, int]()
        of_x = group_activations.room_within(p.m, p.k, config.x_scale)

        def prepared(stream: int, x: int, w: int, *of_y: int) -> None:
            by_codes(stream, x, w, x + scales_at, 0, 0, *of_y)

        def quantizing(stream: int, x: int, w: int, *of_y: int) -> None:
            room = kept.get(stream)
            if room is None:
                room = kept[stream] = address(p.device, QUANTIZED, of_x, stream)
            codes = room + group_activations.UNITS
            by_codes(stream, codes, w, codes + scales_at, x, room, *of_y)

        self.enter, self.grid = prepared if p.x == EIGHT_BITS else quantizing, grid


def quantizes(p: Problem) -> bool:
    """Whether a product takes x as it is: where no CTA has more than one turn of it."""
    if p.x not in TYPES:
        return False
    *_, grid = _grid(p, ranked(p)[0][0])
    return group_activations.scales_at(p.m, p.k) <= TURN * grid.ctas


def x_type(p: Problem) -> int:
    """The TYPE_CODES of x that a kernel quantizes itself, 0 of x in eight bits."""
    return next((TYPE_CODES[name] for name, kind in C_TYPES.items() if kind == p.x), 0)


def _grid(p: Problem, config: Sm90Config) -> tuple[int, int, Grid]:
    """Tiles of y, work units of each along K, and the grid that has them."""
    count, unit = config.tiles(p.m, -(-p.n // tiles.ROWS)), config.unit(p.format)
    units = -(-p.k // unit)
    return count, units, grid_of(count, units, p.sms, config.single_tile, config.row_blocks * unit // tiles.K_BLOCK)


def predicted(p: Problem, row: Measured, m: int) -> float:
    """The us of a config for M rows of x, infinite if it cannot serve them."""
    config, constants = row.config, model()
    if config.tokens > group_activations.rows_of(m):
        return inf
    if config.single_tile and config.tiles(m, -(-p.n // tiles.ROWS)) > p.sms:
        return inf
    work = work_of(p.format, config, m, p.n, p.k, p.sms, constants.l2_megabytes)
    return float(constants.us(row.fixed_us, row.k_block_us * _slower(p.format), work))


def _slower(fmt: Format) -> float:
    if fmt.tile.grid is not None:
        return SLOWER_BY_GRID
    if tiles.table_bytes(fmt):
        return SLOWER_BY_TABLE
    return SLOWER if fmt.has_minimum or fmt.group < GROUP_OF_MOST else 1


def most_tokens(fmt: Format) -> float:
    """The largest token tile: any where a weight is a scale times a code less a zero, of tiles of one k_block."""
    return inf if fmt.zero and fmt.codebook is None and tiles.k_blocks(fmt) == 1 else MOST_TOKENS


def fitting(p: Problem) -> list[Measured]:
    """The configs for the groups of an activation that a format's tiles fit in LEAST_STAGES."""
    most = most_tokens(p.format)
    rows = (row for row in measured() if row.config.x_scale == GROUPS[p.activation] and row.config.tokens <= most)
    return [row for row in rows if row.config.fits(p.format) and stages_of(p.format, row.config) >= LEAST_STAGES]


def configs(p: Problem) -> list[Sm90Config]:
    """Every config for a format."""
    return [row.config for row in fitting(p)]


def ranked(p: Problem) -> list[tuple[Sm90Config, float]]:
    """Every config that can serve a problem and its predicted us, the fastest first."""
    times = ((row.config, predicted(p, row, p.m)) for row in fitting(p))
    return sorted((pair for pair in times if pair[1] < inf), key=lambda pair: pair[1])


def chosen(p: Problem, rows: Sequence[int]) -> list[Sm90Config]:
    """The configs that are chosen for any of these numbers of rows of x."""
    return fastest(((row.config, row.config.tokens, partial(predicted, p, row)) for row in fitting(p)), rows)


PREFILL_SM90_EIGHT_BITS = Kernel(
    NAME, configs, ranked, chosen, lambda p, config: template(p.format, config),
    lambda p, config: EightBitLaunch(p, config).enter, reads=lambda p: (EIGHT_BITS,), adds=True, quantizes=quantizes,
)  # fmt: skip
