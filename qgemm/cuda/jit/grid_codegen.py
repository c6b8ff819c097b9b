"""C++ of formats whose weights are points of a grid: their table, the codes of a tile, the bits of their blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from qgemm.codec.format import Format
from qgemm.codec.layouts.grid import BlockField, Grid, LaneField
from qgemm.cuda.layout import grid as layout
from qgemm.cuda.layout.tile import tile_dtype

from .cxx import C_TYPES, listed, offset_of, struct_members

MAX_BITS = 8  # in a run
COLUMNS = (0, 4, 2, 6, 1, 5, 3, 7)  # the order of a point's columns in decode_slices


class Run(NamedTuple):
    """Bits `to` to `to + bits - 1` of a number are bits `first` to `first + bits - 1` of a row's block."""

    to: int
    row: int
    first: int
    bits: int


def runs(rows: tuple[int, ...], bits: tuple[int, ...]) -> list[Run]:
    """The fewest runs of at most MAX_BITS that copy these bits of blocks to a number."""
    merged: list[Run] = []
    for to, (row, bit) in enumerate(zip(rows, bits, strict=True)):
        last = merged[-1] if merged else None
        if last is not None and last.bits < MAX_BITS and (row, bit) == (last.row, last.first + last.bits):
            merged[-1] = last._replace(bits=last.bits + 1)
        else:
            merged.append(Run(to, row, bit, 1))
    assert all(a.to + a.bits == b.to for a, b in pairwise(merged))
    return merged


def codebook(fmt: Format) -> str:
    """NAME_grid, over which kernels/codes/grid.cuh is a template."""
    grid = _grid(fmt)
    words = np.ascontiguousarray(grid.points()).view("<u4").reshape(-1)
    table = layout.table(grid)
    return f"""
__device__ const u32 {fmt.name}_points[] = {listed(words.tolist())};
struct {fmt.name}_grid {{
    static constexpr int WEIGHTS = {grid.weights}, POINTS = {table.points}, HIGH = {grid.high}, SIGNS = {grid.signs};
    static constexpr int COPIES = {table.copies};
    static __device__ u32 levels(u32 i) {{ return __ldg({fmt.name}_points + i); }}
{_selectors(fmt)}}};
"""


def _selectors(fmt: Format) -> str:
    """Points of eight weights for decode_slices: up to eight levels as bytes in two words, and selectors of each point.

    Where signs are stored beside points, the second word has the negative levels. Selectors are the numbers of the
    levels of a point's weights, four bits each, in the order COLUMNS.
    """
    grid = _grid(fmt)
    if grid.weights != len(COLUMNS):
        return ""
    points = grid.points()
    levels = np.unique(points)
    words = ((np.searchsorted(levels, points[:, COLUMNS]) << np.arange(0, 32, 4)).sum(axis=1)).astype(np.uint32)
    both = np.zeros(8, np.int8)
    both[: len(levels)] = levels
    if grid.signs:
        both[4:] = -both[:4]
    low, high = both.view("<u4").tolist()
    return f"""    static constexpr u32 LEVELS[] = {{{low}u, {high}u}};
    static __device__ u32 selectors(u32 i) {{
        static __device__ const u32 of[] = {listed(words.tolist())};
        return __ldg(of + i);
    }}
"""


def k_block(fmt: Format) -> str:
    """NAME_codes, NAME_k_block<M16_TILES>: see `tile_structs` of codegen.py."""
    dtype = tile_dtype(fmt)["k_blocks"].base
    return f"""
using {fmt.name}_codes = GridCodes;
template <int M16_TILES>
struct alignas(16) {fmt.name}_k_block {{
    {struct_members([(name, dtype[name]) for name in dtype.names or ()])}
    __device__ GridCodes codes(int m16, int lane) const {{ return grid_codes<{fmt.name}_grid>(*this, m16, lane); }}
    __device__ OwnedGridCodes owned(int m16, int lane) const {{
        return owned_grid_codes<{fmt.name}_grid>(*this, m16, lane);
    }}
}};
"""


def block_structs(fmt: Format) -> str:
    """NAME_blocks, whose for_numbers(visit) and for_words(visit) pass a struct of each field to visit.

    Numbers of a k_block: TO, their offset in it, Type, OWNERS in a quad, and RUNS runs; run(i) begins at the block's
    bit base(k_block, owner) + run(i).at. Words per block: WORDS, TO, their offset in a tile's fields, and at(bit), the
    block's bit that each of their bits comes from.
    """
    grid, tile = _grid(fmt), tile_dtype(fmt)
    lanes = "\n".join(_lane_field(fmt, field, offset_of(tile["k_blocks"].base, field.name)) for field in grid.lanes)
    to = tile["k_blocks"].itemsize
    words = "\n".join(_block_field(fmt, field, offset_of(tile, field.name) - to) for field in grid.per_block)
    visitors = "\n".join(
        f"    template <class Visit> static void for_{kind}(Visit visit) {{ {calls}}}"
        for kind, calls in (
            ("numbers", "".join(f"visit({fmt.name}_block_{field.name}()); " for field in grid.lanes)),
            ("words", "".join(f"visit({fmt.name}_block_{field.name}()); " for field in grid.per_block)),
        )
    )
    return f"""{lanes}
{words}
struct {fmt.name}_blocks {{
    static constexpr int BYTES = {fmt.block_bytes}, WEIGHTS = {fmt.weights};
    static constexpr bool GRID = true, TERNARY = false;
{visitors}
}};"""


def _lane_field(fmt: Format, field: LaneField, to: int) -> str:
    bit_runs = runs(field.rows, field.bits)
    runs_of = listed(listed(run) for run in bit_runs)
    return f"""struct {fmt.name}_block_{field.name} {{
    using Type = {C_TYPES[field.dtype.str]};
    static constexpr int OWNERS = {field.owners}, RUNS = {len(bit_runs)}, TO = {to};
    static int base(int k_block, int owner) {{ return {field.along} * k_block + {field.apart} * owner; }}
    static constexpr BitRun run(int i) {{ constexpr BitRun of[] = {runs_of}; return of[i]; }}
}};"""


def _block_field(fmt: Format, field: BlockField, to: int) -> str:
    name = f"{fmt.name}_block_{field.name}"
    return f"""__constant__ u16 {name}_at[] = {listed(field.bits)};
struct {name} {{
    static constexpr int WORDS = {len(field.bits) // 16}, TO = {to};
    static int at(int bit) {{ return {name}_at[bit]; }}
}};"""


def _grid(fmt: Format) -> Grid:
    assert fmt.tile.grid is not None
    return fmt.tile.grid
