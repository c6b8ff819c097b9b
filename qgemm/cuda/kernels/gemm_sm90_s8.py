"""Products of eight bits of a matrix that `requantize` brings to bytes first, by gemm_sm90_s8: for many rows of x.

W is packed as ever; its bytes are in a workspace for the time of a call, slice by slice where it is large.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.codec.group_activations import E4M3, GROUPS, INTEGER, multiplies
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import Launch, by_tensor_map
from qgemm.cuda.driver.workspace import address, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Problem

from . import prefill_sm80_eight_bits, prefill_sm90_eight_bits, sm90_config
from .kernel import Kernel, Launchable
from .sm90_config import BARRIER, EPI_TOKEN, SUM

NAME, REQUANTIZE = "gemm_sm90_s8", "requantize"
WORKSPACE = 256 << 20  # bytes of a slice of W at most, a power of two
CLUSTER, ROW_BLOCKS = 2, 2  # CTAs that share tokens, and the row_blocks of each: kernels/sm90/s8_gemm.cuh
CLUSTER_BLOCKS = CLUSTER * ROW_BLOCKS
THREADS = 128 * (ROW_BLOCKS + 1)
TOKENS, HALF, EPI_TILE = 256, 128, 32  # of a tile of y; that have their sums, and that are stored, at a time
W_STAGES, X_STAGES = 2, 4  # of COLUMNS: of all rows of a CTA, of HALF tokens
E4M3_BY_HALVES = 1.9  # mma.sync of e4m3 by that of int8: 180.5 us for 97.3, 44.1 for 22.2 (8192x8192, 256 and 16 rows)
STAGES_OF_TABLE = 8  # that a CTA of requantize goes through where it fills a table of levels first


class S8Config(NamedTuple):
    """The only one for an activation, and what a launch, a tile of y and a stage take."""

    activation: str
    fixed_us: float
    tile_us: float
    stage_us: float

    def __str__(self) -> str:
        """E.g. "256x2"."""
        return f"{TOKENS}x{ROW_BLOCKS}"

    @property
    def x_scale(self) -> int:
        """Columns of x that share a scale."""
        return GROUPS[self.activation]


class Pointers(ctypes.Structure):
    """What changes from call to call, besides the tensor map of x."""

    _fields_ = [("w", ctypes.c_void_p), ("x_scales", ctypes.c_void_p), ("epilogue", EpilogueArguments)]


class Slice(NamedTuple):
    """row_blocks of W whose bytes are in the workspace at a time, from number `first` on."""

    first: int
    row_blocks: int

    @property
    def clusters(self) -> int:
        """Clusters along N that have them."""
        return -(-self.row_blocks // CLUSTER_BLOCKS)

    def nbytes(self, k: int) -> int:
        """Bytes of the workspace, whole clusters: codes, then scales."""
        rows, stages = self.clusters * CLUSTER_BLOCKS * tiles.ROWS, -(-k // COLUMNS)
        return rows * stages * (COLUMNS + SUM)


@cache
def config_of(activation: str) -> S8Config:
    """The config for an activation of GROUPS."""
    return next(S8Config(*row) for row in read(NAME)["configs"] if row[0] == activation)


def smem_bytes(config: S8Config) -> int:
    """Shared memory of a CTA: Smem of kernels/sm90/s8_gemm.cuh, to the byte."""
    w = W_STAGES * ROW_BLOCKS * tiles.ROWS * (COLUMNS + SUM)
    x = X_STAGES * HALF * (COLUMNS + COLUMNS // config.x_scale * SUM)
    barriers = 2 * (W_STAGES + X_STAGES) * BARRIER
    return sm90_config.aligned(w + x + ROW_BLOCKS * EPI_TILE * EPI_TOKEN + barriers)


def template(config: S8Config) -> Template:
    """What gemm_sm90_s8 is compiled with."""
    return {
        "TOKENS": TOKENS,
        "HALF": HALF,
        **group_activations.byte_template(config.activation),
        "X_GROUP": config.x_scale,
        "EPI_TILE": EPI_TILE,
        "W_STAGES": W_STAGES,
        "X_STAGES": X_STAGES,
        "SMEM_BYTES": smem_bytes(config),
        "ARRIVALS": sm90_config.ARRIVALS,
    }


def requantize_template(fmt: Format, activation: str) -> Template:
    """What requantize is compiled with."""
    least, greatest = level_range(fmt)
    return {**group_activations.byte_template(activation), "LEAST_LEVEL": int(least), "GREATEST_LEVEL": int(greatest)}


def slices(n: int, k: int) -> list[Slice]:
    """W [N, K] in slices of at most WORKSPACE bytes, or the rows of a cluster."""
    row_blocks = -(-n // tiles.ROWS)
    step = max(WORKSPACE // Slice(0, CLUSTER_BLOCKS).nbytes(k), 1) * CLUSTER_BLOCKS
    return [Slice(first, min(step, row_blocks - first)) for first in range(0, row_blocks, step)]


def workspace_bytes(parts: Sequence[Slice], k: int) -> int:
    """Of the workspace for any of these slices: one of few sizes, because workspaces are kept."""
    return 1 << (parts[0].nbytes(k) - 1).bit_length()


def launch(p: Problem, config: S8Config) -> Launchable:
    """Two launches for every slice of W: its bytes, and the product by them."""
    parts = slices(p.n, p.k)
    nbytes, device = workspace_bytes(parts, p.k), p.device
    steps = [(_requantizing(p, part), _multiplying(p, config, part, nbytes)) for part in parts]
    scales_at = group_activations.scales_at(p.m, p.k)

    def enter(stream: int, x: int, w: int, *of_y: int) -> None:
        room = workspace(device, stream, REQUANTIZE, nbytes)
        with room.lock:
            for requantize, multiply in steps:
                requantize(stream, w, room.pointer)
                multiply(stream, x, x + scales_at, *of_y)

    return enter


def _requantizing(p: Problem, part: Slice) -> Launchable:
    """What makes the bytes of a slice, of pointers to all of W and to the workspace."""
    stages, along_k, table = -(-p.k // COLUMNS), -(-p.k // tiles.columns(p.format)), tiles.table_bytes(p.format)
    pointers = (ctypes.c_void_p * 2)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, ctypes.sizeof(ctypes.c_void_p)))
    sizes = along_k, stages, part.clusters * CLUSTER
    function = load(REQUANTIZE, p.format, **requantize_template(p.format, p.activation))
    grid = -(-stages // (STAGES_OF_TABLE if table else 1)), part.row_blocks
    arguments = *arrays, *map(ctypes.c_int, sizes)
    made = Launch(function, grid, tiles.WARPS * tiles.LANES, table, arguments, pointers, len(pointers)).enter
    before = part.first * along_k * tiles.tile_dtype(p.format).itemsize

    def enter(stream: int, w: int, codes: int) -> None:
        made(stream, w + before, codes)

    return enter


def _multiplying(p: Problem, config: S8Config, part: Slice, nbytes: int) -> Launchable:
    """The product by a slice, of pointers to the codes of x, its scales, y, bias and residual."""
    (output,), constants = p.outputs, template(config)
    pointers = Pointers(epilogue=EpilogueArguments(types=Types.of(*output[1:])))
    w, x_scales = (ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset) for name in ("w", "x_scales"))
    x_rows, token_tiles = group_activations.rows_of(p.m), -(-p.m // TOKENS)
    sizes = -(-p.k // COLUMNS), p.m, x_rows, part.first, part.clusters, token_tiles
    numbers = ctypes.c_int64(p.n), *map(ctypes.c_int, sizes)
    ctas, shared = min(part.clusters * token_tiles, p.sms // CLUSTER) * CLUSTER, int(constants["SMEM_BYTES"])
    arguments = w, x_scales, pointers.epilogue, *numbers
    box = EIGHT_BITS, x_rows, group_activations.columns_of(p.k), HALF // CLUSTER
    of_launch = ctas, THREADS, shared, pointers, 2 + len(Outputs._fields_), CLUSTER
    room, function = partial(address, p.device, REQUANTIZE, nbytes), load(NAME, None, **constants)
    return by_tensor_map(box, room, function, arguments, *of_launch)


def takes(p: Problem) -> bool:
    """A token tile at least, in eight bits."""
    return (
        p.format.tiled
        and multiplies(p.activation, p.format)
        and p.x == EIGHT_BITS
        and 90 <= p.sm < 100
        and group_activations.rows_of(p.m) >= TOKENS
    )


def predicted(p: Problem) -> float:
    """The us of a problem, infinite if it has no token tile."""
    if group_activations.rows_of(p.m) < TOKENS:
        return inf
    config, requantize, stages = config_of(p.activation), read(NAME)["requantize"], -(-p.k // COLUMNS)
    us = 0.0
    for part in slices(p.n, p.k):
        packed = part.row_blocks * -(-p.k // tiles.columns(p.format)) * tiles.tile_dtype(p.format).itemsize
        us += requantize["fixed_us"] + requantize["megabyte_us"] * (packed + part.nbytes(p.k)) / 1e6
        waves = -(-part.clusters * -(-p.m // TOKENS) // (p.sms // CLUSTER))
        us += config.fixed_us + (config.tile_us + config.stage_us * stages) * waves
    return us


def pays(p: Problem) -> bool:
    """Whether it takes less time than the kernel that makes bytes of W in its main loop."""
    if p.activation == E4M3:
        return predicted(p) < E4M3_BY_HALVES * prefill_sm80_eight_bits.ranked(p)[0][1]
    return predicted(p) < prefill_sm90_eight_bits.ranked(p)[0][1]


def variants(fmt: Format, sm: int, activations: Collection[str] = tuple(GROUPS)) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) of a format on a GPU for activations; those of integers do not depend on their groups."""
    if 90 <= sm < 100 and fmt.tiled:
        integers = [kind for kind in INTEGER if kind in activations and fmt.integer][:1]
        e4m3 = [kind for kind in (E4M3,) if kind in activations and fmt.e4m3]
        yield from ((REQUANTIZE, requantize_template(fmt, kind)) for kind in (*integers, *e4m3))


def common_variants(sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format on a GPU."""
    if 90 <= sm < 100:
        yield from ((NAME, template(config_of(activation))) for activation in GROUPS)


def _ranked(p: Problem) -> list[tuple[S8Config, float]]:
    return [(config_of(p.activation), predicted(p))]


def _chosen(p: Problem, rows: Sequence[int]) -> tuple[S8Config]:
    return (config_of(p.activation),)


# Its sources are not those of its configs: `variants` and `common_variants` have them.
GEMM_SM90_S8 = Kernel(
    NAME, takes, lambda p: (), _ranked, _chosen, lambda p, config: template(config), launch,
    reads=lambda p: (EIGHT_BITS,), adds=True,
)  # fmt: skip
