"""prefill_sm90_eight_bits on the host: products on int8 tensor cores, their configs, cost and launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from math import inf

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import by_tensor_map
from qgemm.cuda.driver.workspace import address
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem

from .choices import fastest
from .kernel import Kernel
from .sm90_config import WORK_QUEUE, Sm90Config, pipeline_template, stages_of, type_code, x_workspace_bytes
from .sm90_cost import Measured, model, work_of
from .sm90_grid import PAIR, PARTIALS, Grid, grid_of, stream_k_of, workspace_bytes

NAME = "prefill_sm90_eight_bits"
X_WORKSPACE = f"{NAME}: x in bytes"
X_BATCH = 8 * 8 * COLUMNS  # numbers of x that a CTA quantizes at a time: eight warps, 8 tokens each
# The largest token tile of formats whose weights need more registers. Measured with q4_k: 176 tokens 179 us, 128 tokens
# 170 us.
MAX_TOKENS = 128
# Cost of a k_block relative to other formats: of formats with a minimum or groups of 16, with a table of levels, with a
# grid. Measured (8192x8192): 1024 rows of x: q4_k 170.0, q6_k 172.5, iq4_nl 179, but q4_0 151.0, mxfp4 153.1, q8_0
# 152.4 us; 256 rows, quantized in the kernel: q4_0 43.7, iq3_s 60.4, iq2_xs 70.0 us.
SLOWER, SLOWER_BY_TABLE, SLOWER_BY_GRID, LARGE_GROUP = 1.13, 1.18, 1.35, 32
MIN_STAGES = 3  # q8_0 is slower with two stages than with three and smaller tiles: 124 instead of 94 us


class Pointers(ctypes.Structure):
    """The pointers of a call, besides the tensor map of x."""

    _fields_ = [
        ("partials", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("raw_x", ctypes.c_void_p),
        ("x_queue", ctypes.c_void_p),
        ("epilogue", EpilogueArguments),
    ]


@cache
def measured() -> tuple[Measured, ...]:
    """The configs of all activations with their times, which are the same for all formats."""
    return tuple(
        Measured(Sm90Config(tokens, row_blocks, wg_split_k, stage, bool(single_tile), x_scale=group), *us)
        for group, tokens, row_blocks, wg_split_k, stage, single_tile, *us in read(NAME)["configs"]
    )


TOKEN_TILES = tuple(sorted({row.config.tokens for row in measured()}))


def template(fmt: Format, config: Sm90Config) -> Template:
    """The constants of the kernel."""
    least, greatest = level_range(fmt)
    return {
        **pipeline_template(fmt, config, EIGHT_BITS),
        "LEAST_LEVEL": int(least),
        "GREATEST_LEVEL": int(greatest),
    }


class EightBitLaunch:
    """The kernel for all matrices of one shape and format, and one number of rows of x.

    enter: a call, with a raw stream handle and pointers to the codes of x, or to x that it quantizes itself, w, y,
    bias and residual (0 for none).
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        row_blocks, (output,), constants = -(-p.n // tiles.ROWS), p.outputs, template(p.format, config)
        count, units, grid = _grid(p, config)
        assert not (config.single_tile and count > grid.ctas)
        pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
        partials, w, *x_pointers = (
            ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset)
            for name in ("partials", "w", "x_scales", "raw_x", "x_queue")
        )
        rows = group_activations.rows_of(p.m)
        sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), *map(ctypes.c_int, (p.m, rows, type_code(p.x)))
        stream_k = stream_k_of(grid, count, units, -(-row_blocks // config.row_blocks))
        by_codes = by_tensor_map(
            (EIGHT_BITS, rows, group_activations.columns_of(p.k), config.tokens),
            partial(address, p.device, PARTIALS, workspace_bytes(grid, count, config)),
            load(NAME, p.format, **constants),
            (w, *x_pointers, pointers.epilogue, partials, *sizes, stream_k),
            grid.ctas, config.threads, int(constants["SMEM_BYTES"]), pointers,
            2 + len(x_pointers) + len(Outputs._fields_), PAIR if grid.cluster_split_k else 0,
        )  # fmt: skip
        scales_offset = group_activations.scales_at(p.m, p.k)
        queues, x_bytes = dict[int, int](), x_workspace_bytes(p.m, p.k)  # queues: by stream

        def enter(stream: int, x: int, w: int, *outputs: int) -> None:
            by_codes(stream, x, w, x + scales_offset, 0, 0, *outputs)

        def enter_raw(stream: int, x: int, w: int, *outputs: int) -> None:
            queue = queues.get(stream)
            if queue is None:
                queue = queues[stream] = address(p.device, X_WORKSPACE, x_bytes, stream)
            codes = queue + WORK_QUEUE
            by_codes(stream, codes, w, codes + scales_offset, x, queue, *outputs)

        self.enter, self.grid = enter if p.x == EIGHT_BITS else enter_raw, grid


def quantizes(p: Problem) -> bool:
    """Whether the kernel quantizes x itself: no CTA has more than one batch of it."""
    if p.x not in TYPES:
        return False
    config = ranked(p)[0][0] if p.times is None else PREFILL_SM90_EIGHT_BITS.choose(p)
    *_, grid = _grid(p, config)
    return group_activations.scales_at(p.m, p.k) <= X_BATCH * grid.ctas


def _grid(p: Problem, config: Sm90Config) -> tuple[int, int, Grid]:
    """Tiles of y, work units of a tile along K, and the grid for them."""
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
    return SLOWER if fmt.has_minimum or fmt.group < LARGE_GROUP else 1


def max_tokens(fmt: Format) -> float:
    """The largest token tile: any for formats of scales and zeros with one k_block per tile."""
    return inf if fmt.zero and fmt.codebook is None and tiles.k_blocks(fmt) == 1 else MAX_TOKENS


def fitting(p: Problem) -> list[Measured]:
    """The configs of an activation in which MIN_STAGES of a format fit."""
    largest = max_tokens(p.format)
    rows = (row for row in measured() if row.config.tokens <= largest)
    return [row for row in rows if row.config.fits(p.format) and stages_of(p.format, row.config) >= MIN_STAGES]


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
