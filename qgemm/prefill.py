"""The prefill kernel on the host: its tiling of y, the tensor map of x, the workspace of tiles that CTAs share."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

from . import jit, tiles
from .block import Format
from .launch import Launch
from .routes import FLAGS, Tiling, prefill_template, tiling_of
from .tensor_map import TensorMap

ITEMSIZE = 4  # bytes of a partial sum


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y in turn; those after them are cut along K, a piece a CTA."""

    ctas: int
    whole: int


def grid_of(tiles: int, units: int, slots: int) -> Grid:
    """For so many tiles of y, each so many units along K, on a GPU that holds `slots` CTAs at a time.

    Cutting makes all CTAs finish together, but costs writing and reading sums: it is for where whole tiles would leave
    more than WASTE of the GPU idle.
    """
    if tiles <= slots:
        pieces = min(slots // tiles, units)
        return Grid(tiles * pieces, tiles if pieces == 1 else 0)
    waves = tiles / slots
    if -(-tiles // slots) <= waves * (1 + WASTE):
        return Grid(slots, tiles)
    return Grid(slots, (tiles // slots - 1) * slots)


WASTE = 0.06


class Units(ctypes.Structure):
    """Powers of two that bring a tensor into the range of half: see Units in kernels/prefill.cu."""

    _fields_ = [(name, ctypes.c_float) for name in ("scale", "minimum", "level", "sum")]


LEVEL = -9  # of the unit of levels: 128 and more of them are normal halves, and so is a code times it and 2^24
HEADROOM = 3  # scales in units of levels then stay below 2^15


def units_of(exponent: int) -> Units:
    """Of a tensor whose weights times 2^-exponent are below 2^15."""
    weight = max(-110, min(exponent + HEADROOM, 110))  # float32 holds them all, and no weight overflows half
    return Units(2.0 ** (-weight - LEVEL), 2.0**-weight, 2.0**LEVEL, 2.0**weight)


class PrefillLaunch:
    """The prefill kernel for every matrix of one shape and format and so many rows of x."""

    def __init__(
        self, device: int, sms: int, fmt: Format, shape: tuple[int, int], m: int, source: str, out: str,
        exponent: int, tiling: Tiling | None = None,
    ) -> None:  # fmt: skip
        (n, k), strips = shape, -(-shape[0] // tiles.ROWS)
        tiling = tiling or tiling_of(m, strips)
        template = prefill_template(fmt, tiling, source, out)
        unit = max(tiling.stage, tiles.spans(fmt)) * tiles.SPAN
        of_y = -(-strips // tiling.strips) * -(-m // tiling.tokens)
        grid = grid_of(of_y, -(-k // unit), tiling.ctas * sms)
        self.grid, self.tiling, self.template = grid, tiling, template
        self._workspace = 0
        if grid.whole < of_y:
            size = grid.ctas * tiling.strips * tiles.ROWS * tiling.tokens * ITEMSIZE
            self._workspace = 1 << (size - 1).bit_length()  # of few sizes: they are kept
        self._map, self._box = TensorMap.aligned(), (source, m, k, min(m, tiling.tokens))
        self._x, self._device = 0, device
        self._lock = threading.Lock()  # from the map of an x to the launch that takes it
        self._launch = Launch(
            jit.load("prefill", fmt, **template), grid.ctas, tiling.threads, int(template["SHARED"]), 3,
            self._map, ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int(m), ctypes.c_int(grid.whole),
            units_of(exponent),
        )  # fmt: skip

    def __call__(self, stream: int, w: int, x: int, y: int) -> None:
        """Launch on a raw stream handle; x is aligned to 16 bytes."""
        parts = _workspace(self._device, stream, self._workspace).data.ptr if self._workspace else 0
        with self._lock:
            if x != self._x:
                self._map.encode(x, *self._box)
                self._x = x
            self._launch(stream, w, y, parts)


@cache
def _workspace(device: int, stream: int, size: int) -> Any:
    """Where a stream's products keep parts of tiles that CTAs share. Never freed, see cuda._workspace."""
    import cupy

    return cupy.zeros(4 * FLAGS + size, cupy.uint8)
