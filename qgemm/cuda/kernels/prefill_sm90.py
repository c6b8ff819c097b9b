"""The prefill kernel on the host: its grid, the tensor map of x, the workspace of tiles that CTAs share."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.driver.tensor_map import TensorMap
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import Divisor, EpilogueArguments, Outputs, StreamK, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

from .kernel import Kernel
from .sm90_config import MAX_PARTIALS, PARTIAL, Sm90Config, compiled, prefill_template, sm90_config_for

WASTE = 0.06  # the share of a GPU that whole tiles may leave idle
IDLE, CUT_UNITS = 0.3, 16  # that equal pieces of few tiles may leave idle, if a tile has so many units along K
PAIR = 2  # CTAs of a cluster: larger ones do not fill an H200, whose partials have different numbers of multiprocessors
# Pieces of a tile, and the time it takes to add up their sums in that of a k_block of 64 columns of a row_block. On an
# H200 a pair exchanges them in half a microsecond; through global memory it takes two and more.
SPLIT_K_COST = {1: 0, 2: 4, 3: 20, 4: 18, 6: 22, 8: 26}
FLAG = 4  # bytes of what says that a part is complete


class Grid(NamedTuple):
    """A persistent grid: `ctas` take `whole` tiles of y in turn; those after them are cut along K, a piece a CTA.

    cluster_split_k: into so many pieces each, an even number, for pairs of CTAs that exchange sums through shared
    memory, or 0.
    """

    ctas: int
    whole: int
    cluster_split_k: int = 0


def grid_of(count: int, units: int, max_ctas: int, single_tile: bool = False, k_blocks: int = 1) -> Grid:
    """For so many tiles of y, each of so many units along K, on a GPU that holds `max_ctas` CTAs at a time.

    Cutting makes all CTAs finish together, but costs writing and reading sums: it is for where whole tiles would leave
    more than WASTE of the GPU idle. Few tiles are cut into equal pieces, as many as make the time shortest, unless they
    leave more than IDLE and a CTA may have several (not `single_tile`). k_blocks: of all row_blocks of a tile, in a
    unit.
    """
    if count <= max_ctas:
        most = min(max_ctas // count, units)
        if count * most < max_ctas * (1 - IDLE) and units >= max(CUT_UNITS, max_ctas // count) and not single_tile:
            return Grid(max_ctas, 0)
        costs = {
            split_k: -(-units // split_k) * k_blocks + sums for split_k, sums in SPLIT_K_COST.items() if split_k <= most
        }
        split_k = min(costs, key=costs.__getitem__)
        return Grid(count * split_k, count if split_k == 1 else 0, 0 if split_k % PAIR else split_k)
    if -(-count // max_ctas) * max_ctas <= count * (1 + WASTE):
        return Grid(max_ctas, count)
    return Grid(max_ctas, (count // max_ctas - 1) * max_ctas)


def stream_k_of(grid: Grid, count: int, units: int, row_tiles: int) -> StreamK:
    """For so many tiles of y, each of so many units along K, of which `row_tiles` lie side by side along N."""
    units_per_cta, remainder = divmod((count - grid.whole) * units, grid.ctas)
    return StreamK(
        grid.whole, grid.cluster_split_k, units_per_cta, remainder, *map(Divisor.of, (grid.ctas, units, row_tiles))
    )


class Pointers(ctypes.Structure):
    """What changes from call to call, besides the tensor map of x: the workspace, w, and the arrays of the epilogue."""

    _fields_ = [("partials", ctypes.c_void_p), ("w", ctypes.c_void_p), ("epilogue", EpilogueArguments)]


class PrefillLaunch:
    """The prefill kernel for all matrices of one shape and format, and so many rows of x.

    A call takes a raw stream handle and pointers to x, w, y, bias and residual (0 for none); x is a multiple of 16.
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """On the current device."""
        row_blocks, (output,) = -(-p.n // tiles.ROWS), p.outputs
        template = prefill_template(p.format, config, p.x)
        of_y = config.tiles(p.m, row_blocks)
        units = -(-p.k // config.unit(p.format))
        grid = grid_of(
            of_y, units, p.sms, config.single_tile, config.row_blocks * config.unit(p.format) // tiles.K_BLOCK
        )
        assert not (config.single_tile and of_y > grid.ctas)
        function, block, shared = load("prefill_sm90", p.format, **template), config.threads, int(template["SHARED"])
        self._size = 0  # of the workspace
        if grid.whole < of_y and grid.cluster_split_k != PAIR:
            size = grid.ctas * config.row_blocks * tiles.ROWS * config.tokens * PARTIAL
            self._size = 1 << (size - 1).bit_length()  # one of few: workspaces are kept
        self._map, self._box = TensorMap.aligned(), (p.x, p.m, p.k, min(p.m, config.tokens))
        self._x, self._device = 0, p.device
        self._lock = threading.Lock()  # from encoding the map of an x to the launch that takes it
        pointers = Pointers(epilogue=EpilogueArguments(types=Types.of(*output[1:])))
        partials, w = (
            ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset) for name in ("partials", "w")
        )
        sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), ctypes.c_int(p.m)
        stream_k = stream_k_of(grid, of_y, units, -(-row_blocks // config.row_blocks))
        arguments = (self._map, w, pointers.epilogue, partials, *sizes, stream_k)
        count = 2 + len(Outputs._fields_)
        self._launch = Launch(
            function, grid.ctas, block, shared, arguments, pointers, count, PAIR if grid.cluster_split_k else 0
        )
        self.grid, self.template = grid, template

    def __call__(self, stream: int, x: int, w: int, y: int, bias: int = 0, residual: int = 0) -> None:
        partials = _workspace(self._device, stream, self._size).data.ptr if self._size else 0
        with self._lock:
            if x != self._x:
                self._map.encode(x, *self._box)
                self._x = x
            self._launch(stream, partials, w, y, bias, residual)


def takes(p: Problem) -> bool:
    """Any number of rows of x of 16 bits; "a8" on decoded activations."""
    return bool(p.format.slots) and p.x in ("half", "bf16") and 90 <= p.sm < 100


def choose(p: Problem) -> Sm90Config:
    """The config for a problem."""
    return sm90_config_for(p.format, p.m, -(-p.n // tiles.ROWS), p.k, p.sms)


PREFILL_SM90 = Kernel(
    "prefill_sm90", takes, lambda p: compiled(p.format), choose,
    lambda p, config: prefill_template(p.format, config, p.x), PrefillLaunch, adds=True,
)  # fmt: skip


@cache
def _workspace(device: int, stream: int, size: int) -> Any:
    """Where a stream's products keep partials of tiles that CTAs share. Never freed, see cuda._workspace.

    Its flags are zero before any kernel starts, whatever the stream does, capturing included.
    """
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as own:
        made = cupy.zeros(FLAG * MAX_PARTIALS + size, "uint8")
        own.synchronize()
    return made
