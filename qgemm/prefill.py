"""The prefill kernel on the host: its grid, the tensor map of x, the workspace of tiles that CTAs share."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

from . import jit, tiles
from .block import Format
from .device import DeviceTensor
from .launch import Launch
from .routes import FLAGS, Route, Tiling, c_type, prefill_template, prefill_unit, tiling_of
from .tensor_map import TensorMap

WASTE = 0.06  # the share of a GPU that whole tiles may leave idle
PARTIAL = 4  # bytes of a partial sum
LEVEL = -9  # 2^LEVEL is the unit of levels: up to 128 of them are normal halves, and so is 2^(24 + LEVEL)
HEADROOM = 3  # so that scales in these units stay below 2^15


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y in turn; those after them are cut along K, a piece a CTA."""

    ctas: int
    whole: int


def grid_of(count: int, units: int, slots: int) -> Grid:
    """For so many tiles of y, each of so many units along K, on a GPU that holds `slots` CTAs at a time.

    Cutting makes all CTAs finish together, but costs writing and reading sums: it is for where whole tiles would leave
    more than WASTE of the GPU idle. Few tiles are cut into equal pieces.
    """
    if count <= slots:
        pieces = min(slots // count, units)
        return Grid(count * pieces, count if pieces == 1 else 0)
    if -(-count // slots) * slots <= count * (1 + WASTE):
        return Grid(slots, count)
    return Grid(slots, (count // slots - 1) * slots)


class Units(ctypes.Structure):
    """Powers of two that bring a tensor into the range of half: see Units in kernels/prefill.cu."""

    _fields_ = [(name, ctypes.c_float) for name in ("scale", "minimum", "level", "sum")]


def units_of(exponent: int) -> Units:
    """Of a tensor whose weights times 2^-exponent are below 2^15."""
    weight = max(-110, min(exponent + HEADROOM, 110))  # float32 holds them all, and no weight overflows half
    return Units(2.0 ** (-weight - LEVEL), 2.0**-weight, 2.0**LEVEL, 2.0**weight)


class PrefillLaunch:
    """The prefill kernel for all matrices of one shape, format and exponent, and so many rows of x."""

    def __init__(
        self, device: int, fmt: Format, shape: tuple[int, int], exponent: int, m: int, source: str, out: str,
        tiling: Tiling | None = None,
    ) -> None:  # fmt: skip
        """On the current device, for x of type `source` and y of type `out`; `tiling` other than the table's."""
        (n, k), strips = shape, -(-shape[0] // tiles.ROWS)
        tiling = tiling or tiling_of(m, strips)
        template = prefill_template(fmt, tiling, source, out)
        of_y = -(-strips // tiling.strips) * -(-m // tiling.tokens)
        grid = grid_of(of_y, -(-k // prefill_unit(fmt, tiling)), tiling.ctas * sms(device))
        self._size = 0
        if grid.whole < of_y:
            size = grid.ctas * tiling.strips * tiles.ROWS * tiling.tokens * PARTIAL
            self._size = 1 << (size - 1).bit_length()  # of few sizes: workspaces are kept
        self._map, self._box = TensorMap.aligned(), (source, m, k, min(m, tiling.tokens))
        self._x, self._device = 0, device
        self._lock = threading.Lock()  # from encoding the map of an x to the launch that takes it
        self._launch = Launch(
            jit.load("prefill", fmt, **template), grid.ctas, tiling.threads, int(template["SHARED"]), 3,
            self._map, ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int(m), ctypes.c_int(grid.whole),
            units_of(exponent),
        )  # fmt: skip
        self.grid, self.tiling, self.template = grid, tiling, template

    def __call__(self, stream: int, w: int, x: int, y: int) -> None:
        """Launch on a raw stream handle; x is aligned to 16 bytes."""
        parts = _workspace(self._device, stream, self._size).data.ptr if self._size else 0
        with self._lock:
            if x != self._x:
                self._map.encode(x, *self._box)
                self._x = x
            self._launch(stream, w, y, parts)


@cache
def launch_of(
    device: int, fmt: Format, shape: tuple[int, int], exponent: int, m: int, source: str, out: str
) -> PrefillLaunch:
    """The launch for these sizes, made once."""
    return PrefillLaunch(device, fmt, shape, exponent, m, source, out)


def multiply(row: Route, x: Any, w: DeviceTensor, y: Any) -> PrefillLaunch | None:
    """x [M, K] of half or bf16 times tiles -> y [M, N]. Returns the launch if it takes x and y as they are."""
    import cupy

    source, out = c_type(x.dtype), c_type(y.dtype)
    direct = out in outs(source)
    target = y if direct else cupy.empty(y.shape, "float32")
    if x.data.ptr % 16:  # a view into an array: a tensor map starts at a multiple of 16 bytes
        x = x.copy()
    launch = launch_of(w.device, w.format, w.shape, w.exponent, len(y), source, c_type(target.dtype))
    launch(cupy.cuda.get_current_stream().ptr, w.pointer, x.data.ptr, target.data.ptr)
    if direct:
        return launch
    y[...] = target
    return None


def outs(source: str) -> tuple[str, ...]:
    """Types of y that the kernel is compiled for."""
    return source, "float"


@cache
def sms(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def _workspace(device: int, stream: int, size: int) -> Any:
    """Where a stream's products keep parts of tiles that CTAs share. Never freed, see cuda._workspace.

    Its flags are zero before any kernel starts, whatever the stream does, capturing included.
    """
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as own:
        made = cupy.zeros(4 * FLAGS + size, "uint8")
        own.synchronize()
    return made
