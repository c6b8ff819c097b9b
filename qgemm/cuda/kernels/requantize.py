"""requantize: the launch that converts W to bytes in a workspace, for gemm_sm90_s8."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

NAME = "requantize"
# row_blocks of a CTA that fills a table of levels first, so that all warps of an SM share one. With 64 KB of levels,
# CTAs of one row_block took 51 to 71 us, CTAs of eight about 26 (8192x8192).
TABLE_ROW_BLOCKS = 8


def template(fmt: Format, activation: str) -> Template:
    """The constants of the kernel."""
    return {**weights_template(fmt, activation), "ROW_BLOCKS": row_blocks_of(fmt)}


def weights_template(fmt: Format, activation: str) -> Template:
    """The constants of a kernel that converts W to bytes."""
    least, greatest = level_range(fmt)
    return {**group_activations.byte_template(activation), "LEAST_LEVEL": int(least), "GREATEST_LEVEL": int(greatest)}


def table_bytes(fmt: Format) -> int:
    """Bytes of shared memory for the table of levels, RequantizeConfig's; pair lookup needs no table."""
    return 0 if fmt.tile.pair_lookup else tiles.table_bytes(fmt)


def row_blocks_of(fmt: Format) -> int:
    """row_blocks of a CTA."""
    return TABLE_ROW_BLOCKS if table_bytes(fmt) else 1


def threads(fmt: Format) -> int:
    """Threads of a CTA."""
    return row_blocks_of(fmt) * tiles.WARPS * tiles.LANES


def smem_bytes(fmt: Format) -> int:
    """Shared memory of a CTA: the table, and a stage of each row_block."""
    return table_bytes(fmt) + row_blocks_of(fmt) * tiles.ROWS * COLUMNS


def grid(fmt: Format, row_blocks: int, stages: int, sms: int) -> tuple[int, int]:
    """CTAs along K and along N. With a table they are one wave, so that each SM fills the table once."""
    along_n = -(-row_blocks // row_blocks_of(fmt))
    return min(max(sms // along_n, 1), stages) if table_bytes(fmt) else stages, along_n


def launch(p: Problem, row_blocks: int, pairs: int) -> Callable[[int, int, int], None]:
    """The launch for `row_blocks` of W; a call has a stream and pointers to W and to the workspace.

    pairs: pairs of row_blocks that the workspace holds.
    """
    fmt, stages = p.format, -(-p.k // COLUMNS)
    pointers = (ctypes.c_void_p * 2)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, ctypes.sizeof(ctypes.c_void_p)))
    sizes = -(-p.k // tiles.columns(fmt)), stages, row_blocks, pairs
    arguments = *arrays, *map(ctypes.c_int, sizes)
    ctas = grid(fmt, row_blocks, stages, p.sms)
    function = load(NAME, fmt, **template(fmt, p.activation))
    return Launch(function, ctas, threads(fmt), smem_bytes(fmt), arguments, pointers, len(pointers)).enter
