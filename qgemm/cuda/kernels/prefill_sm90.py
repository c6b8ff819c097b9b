"""The prefill kernel on the host: its grid, the tensor map of x, the workspace of tiles that CTAs share."""

from __future__ import annotations

import ctypes
from functools import partial

from qgemm.cuda.driver.launch import by_tensor_map
from qgemm.cuda.driver.workspace import address
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import Divisor, EpilogueArguments, Outputs, StreamK, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

from . import sm90_cost
from .kernel import Kernel
from .sm90_config import MAX_PARTIALS, SUM, Sm90Config, prefill_template
from .sm90_grid import PAIR, Grid, grid_of

PARTIALS = "sm90 partials"  # what the workspace is for
FLAG = 4  # bytes of what says that a part is complete


def stream_k_of(grid: Grid, count: int, units: int, row_tiles: int) -> StreamK:
    """For so many tiles of y, each of so many units along K, of which `row_tiles` lie side by side along N."""
    units_per_cta, remainder = divmod((count - grid.whole) * units, grid.ctas)
    return StreamK(
        whole_tiles=grid.whole,
        cluster_split_k=grid.cluster_split_k,
        units_per_cta=units_per_cta,
        remainder=remainder,
        ctas=Divisor.by(grid.ctas),
        work_units=Divisor.by(units),
        row_tiles=Divisor.by(row_tiles),
    )


def workspace_bytes(grid: Grid, count: int, config: Sm90Config) -> int:
    """What CTAs that share some of `count` tiles of y need in global memory: flags and partials."""
    if grid.whole == count or grid.cluster_split_k == PAIR:
        return 0
    size = grid.ctas * config.row_blocks * tiles.ROWS * config.tokens * SUM
    return FLAG * MAX_PARTIALS + (1 << (size - 1).bit_length())  # one of few: workspaces are kept


class Pointers(ctypes.Structure):
    """What changes from call to call, besides the tensor map of x: the workspace, w, and the arrays of the epilogue."""

    _fields_ = [("partials", ctypes.c_void_p), ("w", ctypes.c_void_p), ("epilogue", EpilogueArguments)]


class PrefillLaunch:
    """The prefill kernel for all matrices of one shape and format, and so many rows of x.

    enter: a call, with a raw stream handle and pointers to x, w, y, bias and residual (0 for none); x is a multiple
    of 16.
    """

    def __init__(self, p: Problem, config: Sm90Config) -> None:
        """Prepare the launch on the current device."""
        row_blocks, (output,) = -(-p.n // tiles.ROWS), p.outputs
        template = prefill_template(p.format, config, p.x)
        of_y = config.tiles(p.m, row_blocks)
        units = -(-p.k // config.unit(p.format))
        grid = grid_of(
            of_y, units, p.sms, config.single_tile, config.row_blocks * config.unit(p.format) // tiles.K_BLOCK
        )
        assert not (config.single_tile and of_y > grid.ctas)
        function, block, shared = (
            load("prefill_sm90", p.format, **template),
            config.threads,
            int(template["SMEM_BYTES"]),
        )
        workspace_size = workspace_bytes(grid, of_y, config)
        pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
        partials, w = (
            ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset) for name in ("partials", "w")
        )
        sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), ctypes.c_int(p.m)
        stream_k = stream_k_of(grid, of_y, units, -(-row_blocks // config.row_blocks))
        count, cluster = 2 + len(Outputs._fields_), PAIR if grid.cluster_split_k else 0

        arguments = (w, pointers.epilogue, partials, *sizes, stream_k)
        box, room = (p.x, p.m, p.k, min(p.m, config.tokens)), partial(address, p.device, PARTIALS, workspace_size)
        self.enter = by_tensor_map(box, room, function, arguments, grid.ctas, block, shared, pointers, count, cluster)
        self.grid, self.template, self.workspace_size = grid, template, workspace_size

    def __call__(self, stream: int, x: int, w: int, y: int, bias: int = 0, residual: int = 0) -> None:
        """See `enter`."""
        self.enter(stream, x, w, y, bias, residual)


PREFILL_SM90 = Kernel(
    "prefill_sm90", sm90_cost.configs, sm90_cost.ranked, sm90_cost.chosen,
    lambda p, config: prefill_template(p.format, config, p.x), lambda p, config: PrefillLaunch(p, config).enter,
    adds=True,
)  # fmt: skip
