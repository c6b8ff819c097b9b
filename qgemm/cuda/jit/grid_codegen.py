"""C++ for formats whose weights are points of a grid: their table, the codes of a tile, the bits of their blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from qgemm.codec.format import Format
from qgemm.codec.layouts.grid import BlockField, Grid, LaneField
from qgemm.cuda.layout import grid as layout
from qgemm.cuda.layout.tile import tile_dtype

from .cxx import C_TYPES, listed, offset_of, struct_members

MOST = 8  # bits of a run
COLUMNS = (0, 4, 2, 6, 1, 5, 3, 7)  # of a point, where decode_slices has them


class Run(NamedTuple):
    """Bits `to` to `to + bits - 1` of a number are those of a row's block from `at` on."""

    to: int
    row: int
    at: int
    bits: int


def runs(rows: tuple[int, ...], at: tuple[int, ...]) -> list[Run]:
    """The bits of a number in as few runs as can be, of at most MOST."""
    found: list[Run] = []
    for to, (row, bit) in enumerate(zip(rows, at, strict=True)):
        last = found[-1] if found else None
        if last is not None and last.bits < MOST and (row, bit) == (last.row, last.at + last.bits):
            found[-1] = last._replace(bits=last.bits + 1)
        else:
            found.append(Run(to, row, bit, 1))
    assert all(a.to + a.bits == b.to for a, b in pairwise(found))
    return found


def codebook(fmt: Format) -> str:
    """NAME_grid, over which kernels/codes/grid.cuh is a template."""
    grid = _grid(fmt)
    words = np.ascontiguousarray(grid.points()).view("<u4").reshape(-1)
    found = layout.table(grid)
    return f"""
__device__ const u32 {fmt.name}_points[] = {listed(words.tolist())};
struct {fmt.name}_grid {{
    static constexpr int WEIGHTS = {grid.weights}, POINTS = {found.points}, HIGH = {grid.high}, SIGNS = {grid.signs};
    static constexpr int COPIES = {found.copies};
    static __device__ u32 levels(u32 i) {{ return __ldg({fmt.name}_points + i); }}
{_selectors(fmt)}}};
"""


def _selectors(fmt: Format) -> str:
    """What decode_slices has of points of eight weights: up to eight levels, four bytes in each of two words.

    Where signs lie beside points negative levels are in the second. Of a point the numbers of its weights' levels, four
    bits each, in the order COLUMNS.
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
    """NAME_blocks, whose for_numbers(visit) and for_words(visit) hand a struct of each field to visit.

    Numbers of a k_block, TO bytes into it: Type, of OWNERS to a quad; run(i) of RUNS begins at the block's bit
    base(k_block, owner) + at. Words per block, WORDS of them, TO bytes into a tile's fields; `at` of each bit.
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
    found = runs(field.rows, field.at)
    runs_of = listed(listed(each) for each in found)
    return f"""struct {fmt.name}_block_{field.name} {{
    using Type = {C_TYPES[field.dtype.str]};
    static constexpr int OWNERS = {field.owners}, RUNS = {len(found)}, TO = {to};
    static int base(int k_block, int owner) {{ return {field.along} * k_block + {field.apart} * owner; }}
    static constexpr BitRun run(int i) {{ constexpr BitRun of[] = {runs_of}; return of[i]; }}
}};"""


def _block_field(fmt: Format, field: BlockField, to: int) -> str:
    name = f"{fmt.name}_block_{field.name}"
    return f"""__constant__ u16 {name}_at[] = {listed(field.at)};
struct {name} {{
    static constexpr int WORDS = {len(field.at) // 16}, TO = {to};
    static int at(int bit) {{ return {name}_at[bit]; }}
}};"""


def _grid(fmt: Format) -> Grid:
    assert fmt.grid is not None
    return fmt.grid
