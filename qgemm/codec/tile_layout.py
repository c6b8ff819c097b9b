"""TileLayout, the part of a format's record that only device tiles and kernels read: where codes lie, in which form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .layouts.grid import Grid
from .layouts.ternary import Ternary
from .packing import LaneWords


@dataclass(frozen=True, eq=False)
class TileLayout:
    """How the codes of a format lie in blocks and in device tiles (qgemm/cuda/layout/tile.py).

    A format can be packed into tiles if it has slots, a grid or digits; at most one of the three is given.

    slots: for each field that holds codes, the weight in each of its slots (little-endian bit order), the field of the
    lowest bits first. Other fields are per block.
    grid: the layout of codes that are points of a grid (layouts/grid.py).
    digits: the layout of codes that are digits to the base 3 (layouts/ternary.py).
    bit_planes: the field of codes has a word for each bit of a code, and a slot is a bit of every word.
    to_tile, from_tile: words of codes side by side, uint32 [..., words of a lane] by field, -> the words of a device
    tile, and back; None if they are the same. The format's header has the twins.
    code_exponent: tiles, or a table, hold codes as halves, and halves times 2^code_exponent are the levels; None where
    kernels read integers, or indices of a tensor's own codebook.
    bytes_are_levels: whether bytes() of the format's header subtract the zero; else they return codes, and products
    subtract the zero times the sum of x. Without a zero both are the same.
    pair_lookup: kernels look up two levels of a fixed codebook at a time, in a table in shared memory; the codes of
    adjacent columns share a byte of the tile.
    number_bytes: fields of unsigned integers that are numbers, E4M4, bfloat16 or integers, which kernels decode in an
    instruction or two. Decoding other such fields, exponents and 6-bit scales, costs more.
    """

    slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    grid: Grid | None = None
    digits: Ternary | None = None
    bit_planes: bool = False
    to_tile: Callable[[LaneWords], LaneWords] | None = None
    from_tile: Callable[[LaneWords], LaneWords] | None = None
    code_exponent: int | None = None
    bytes_are_levels: bool = False
    pair_lookup: bool = False
    number_bytes: tuple[str, ...] = ()

    @property
    def code_fields(self) -> tuple[str, ...]:
        """The fields that hold codes; none of a grid, whose fields hold bits of points."""
        return tuple(self.slots) if self.digits is None else self.digits.fields
