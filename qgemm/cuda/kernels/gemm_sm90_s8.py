"""Products of eight bits of a matrix whose bytes lie in a workspace, by gemm_sm90_s8: for many rows of x.

W is packed as ever; its bytes are in the workspace for the time of a call, slice by slice where it is large. Makers,
warps of the kernel itself, write them while others multiply; where levels lie in a table requantize does it before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.format import Format
from qgemm.codec.group_activations import E4M3, GROUPS, multiplies
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import by_tensor_map
from qgemm.cuda.driver.workspace import address, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, S8Sizes, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem

from . import prefill_sm80_eight_bits, prefill_sm90_eight_bits, requantize, sm90_config
from .kernel import Kernel, Launchable
from .sm90_config import BARRIER, EPI_TOKEN, SUM

NAME, QUANTIZED = "gemm_sm90_s8", "quantized x"
# Of x, up to which warps quantize it within: 512 rows of 8192 columns take 76.8 us for 78.5 of two launches, of 4096
# columns 76.2 for 79.1 (8192 and 14336 rows of W), but 1024 rows of 8192 columns 141.1 for 139.8.
QUANTIZED_NUMBERS = 6 << 20
WITHIN_US = 0.5  # that this takes less at least than a launch of its own
WORKSPACE = 256 << 20  # bytes of a slice of W at most, a power of two
CLUSTER, ROW_BLOCKS = 2, 2  # CTAs that share tokens, and the row_blocks of each: kernels/gemm/sm90/s8_gemm.cuh
CLUSTER_BLOCKS = CLUSTER * ROW_BLOCKS
TOKENS, HALF, EPI_TILE = 256, 128, 32  # of a tile of y; that have their sums, and that are stored, at a time
W_STAGES, X_STAGES = 2, 4  # of COLUMNS: of all rows of a CTA, of HALF tokens
E4M3_BY_HALVES = 1.9  # mma.sync of e4m3 by that of int8: 180.5 us for 97.3, 44.1 for 22.2 (8192x8192, 256 and 16 rows)
UNIT_ROWS, BOX = 16, 128  # rows of a stage that a maker makes at a time, columns that it stages
UNIT_FLAG = 4  # bytes, of those rows
UNITS = ROW_BLOCKS * tiles.ROWS // UNIT_ROWS  # of a stage of a CTA
MADE = 128  # bytes of Made of kernels/gemm/sm90/s8_gemm.cuh before its flags


class S8Config(NamedTuple):
    """An activation, warps that make bytes of W, and what a launch, a tile of y and a stage take."""

    activation: str
    makers: int
    fixed_us: float
    tile_us: float
    stage_us: float

    def __str__(self) -> str:
        """E.g. "256x2, 3 makers"."""
        return f"{TOKENS}x{ROW_BLOCKS}" + (f", {self.makers} makers" if self.makers else "")

    @property
    def x_scale(self) -> int:
        """Columns of x that share a scale."""
        return GROUPS[self.activation]


class Pointers(ctypes.Structure):
    """What changes from call to call, besides the tensor map of x."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("x_units", ctypes.c_void_p),
        ("epilogue", EpilogueArguments),
    ]


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
def configs_of(activation: str) -> tuple[S8Config, ...]:
    """The configs for an activation of GROUPS."""
    return tuple(S8Config(*row) for row in read(NAME)["configs"] if row[0] == activation)


def configs(p: Problem) -> list[S8Config]:
    """Those that a format has: makers have no table of levels."""
    return [config for config in configs_of(p.activation) if not (config.makers and requantize.table_bytes(p.format))]


def smem_bytes(config: S8Config) -> int:
    """Shared memory of a CTA: Smem of kernels/gemm/sm90/s8_gemm.cuh, to the byte."""
    w = W_STAGES * ROW_BLOCKS * tiles.ROWS * (COLUMNS + SUM)
    x = X_STAGES * HALF * (COLUMNS + COLUMNS // config.x_scale * SUM)
    barriers = (2 * (W_STAGES + X_STAGES) + 2) * BARRIER
    staged = config.makers * UNIT_ROWS * BOX
    return sm90_config.aligned(staged + w + x + ROW_BLOCKS * EPI_TILE * EPI_TOKEN + barriers)


def threads(config: S8Config) -> int:
    """Of a CTA: two warpgroups that multiply, a warp that loads and the makers in whole warpgroups."""
    return 128 * (ROW_BLOCKS + -(-(1 + config.makers) // 4))


def template(config: S8Config, fmt: Format | None = None) -> Template:
    """What gemm_sm90_s8 is compiled with; fmt: for makers."""
    return {
        "MAKERS": config.makers,
        "TOKENS": TOKENS,
        "HALF": HALF,
        **(requantize.weights_template(fmt, config.activation) if fmt and config.makers else {}),
        **group_activations.byte_template(config.activation),
        "X_GROUP": config.x_scale,
        "EPI_TILE": EPI_TILE,
        "W_STAGES": W_STAGES,
        "X_STAGES": X_STAGES,
        "SMEM_BYTES": smem_bytes(config),
        "ARRIVALS": sm90_config.ARRIVALS,
    }


def slices(n: int, k: int) -> list[Slice]:
    """W [N, K] in slices of at most WORKSPACE bytes, or the rows of a cluster."""
    row_blocks = -(-n // tiles.ROWS)
    step = max(WORKSPACE // Slice(0, CLUSTER_BLOCKS).nbytes(k), 1) * CLUSTER_BLOCKS
    return [Slice(first, min(step, row_blocks - first)) for first in range(0, row_blocks, step)]


def workspace_bytes(parts: Sequence[Slice], k: int) -> int:
    """Of the workspace for any of these slices: one of few sizes, because workspaces are kept."""
    return 1 << (parts[0].nbytes(k) - 1).bit_length()


def launch(p: Problem, config: S8Config) -> Launchable:
    """Of every slice of W its bytes and the product by them: one launch with makers, else two.

    Where x is not in eight bits, the launch quantizes it first, into a workspace of its own.
    """
    parts = slices(p.n, p.k)
    nbytes, device = workspace_bytes(parts, p.k), p.device
    size = nbytes + made_bytes(nbytes)
    of_row_block = -(-p.k // tiles.columns(p.format)) * tiles.tile_dtype(p.format).itemsize
    befores = [part.first * of_row_block for part in parts]
    products = [_multiplying(p, config, part, nbytes, size) for part in parts]
    firsts = [
        None if config.makers else requantize.launch(p, part.row_blocks, part.clusters * CLUSTER) for part in parts
    ]
    scales_at = group_activations.scales_at(p.m, p.k)
    if p.x != EIGHT_BITS:
        (multiply,) = products
        of_x = group_activations.room_within(p.m, p.k, config.x_scale)

        def quantizing(stream: int, x: int, w: int, *of_y: int) -> None:
            room, units = workspace(device, stream, requantize.NAME, size), address(device, QUANTIZED, of_x, stream)
            codes = units + group_activations.UNITS
            with room.lock:
                multiply(stream, codes, w, codes + scales_at, x, units, *of_y)

        return quantizing

    def enter(stream: int, x: int, w: int, *of_y: int) -> None:
        room = workspace(device, stream, requantize.NAME, size)
        with room.lock:
            for before, make_bytes, multiply in zip(befores, firsts, products, strict=True):
                if make_bytes is not None:
                    make_bytes(stream, w + before, room.pointer)
                multiply(stream, x, w + before, x + scales_at, 0, 0, *of_y)

    return enter


def made_bytes(nbytes: int) -> int:
    """What makers know of each other, behind a workspace of so many bytes: Made of kernels/gemm/sm90/s8_gemm.cuh."""
    return MADE + nbytes // (UNIT_ROWS * COLUMNS) * UNIT_FLAG


def _multiplying(p: Problem, config: S8Config, part: Slice, nbytes: int, size: int) -> Launchable:
    """The product by a slice, of pointers to the codes of x, W from the slice on, x's scales, x, units and outputs."""
    fmt = p.format if config.makers else None
    (output,), constants = p.outputs, template(config, fmt)
    pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
    arrays = (
        ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset) for name, *_ in Pointers._fields_[:-1]
    )
    of_sizes, ctas = sizes(p, part, nbytes)
    arguments = *arrays, pointers.epilogue, of_sizes
    box = EIGHT_BITS, of_sizes.x_rows, group_activations.columns_of(p.k), HALF // CLUSTER
    of_launch = ctas, threads(config), int(constants["SMEM_BYTES"]), pointers, 5 + len(Outputs._fields_), CLUSTER
    room, function = partial(address, p.device, requantize.NAME, size), load(NAME, fmt, **constants)
    return by_tensor_map(box, room, function, arguments, *of_launch)


def sizes(p: Problem, part: Slice, nbytes: int) -> tuple[S8Sizes, int]:
    """The sizes of a slice's launch, and its CTAs. nbytes: of the workspace."""
    token_tiles, most = -(-p.m // TOKENS), p.sms // CLUSTER
    tiles_of_y = part.clusters * token_tiles
    whole = whole_tiles(tiles_of_y, most)
    clusters = min(2 * tiles_of_y - whole, most)
    groups, rest = divmod(min(clusters, tiles_of_y), S8Sizes.ROW_TILES_TOGETHER * token_tiles)
    first = min(part.clusters, groups * S8Sizes.ROW_TILES_TOGETHER + min(rest, S8Sizes.ROW_TILES_TOGETHER))
    x_type = prefill_sm90_eight_bits.x_type(p)
    of_x = p.m, -(-p.k // COLUMNS), -(-p.k // tiles.columns(p.format)), group_activations.rows_of(p.m), x_type
    of_w = part.first, part.row_blocks, part.clusters
    return S8Sizes(p.n, nbytes, p.k, *of_x, *of_w, token_tiles, whole, first), clusters * CLUSTER


def whole_tiles(count: int, clusters: int) -> int:
    """How many of the tiles of y are not cut in two: all but the last wave's, if twice as many are one wave as well."""
    last = count % clusters
    return count - last if 2 * last <= clusters else count


def quantizes(p: Problem) -> bool:
    """Whether a product takes x as it is: where makers are chosen, W is one slice, and x is small enough."""
    makers = p.x in TYPES and ranked(p)[0][0].makers > 0
    return makers and p.m * p.k <= QUANTIZED_NUMBERS and len(slices(p.n, p.k)) == 1


def predicted(p: Problem, config: S8Config) -> float:
    """The us of a problem, infinite if it has no token tile."""
    if group_activations.rows_of(p.m) < TOKENS:
        return inf
    return sum(_us(p, config, part) for part in slices(p.n, p.k))


def _us(p: Problem, config: S8Config, part: Slice) -> float:
    """Of a slice: waves of tiles, and W as bytes, by a pass over memory or by makers, which slow the others a bit."""
    constants, size, ctas = read(NAME), *sizes(p, part, 0)
    clusters = ctas // CLUSTER
    halves = 2 * (size.row_tiles * size.token_tiles - size.whole)
    waves = -(-size.whole // clusters) + constants["half_tile"] * -(-halves // clusters)
    us = config.fixed_us + (config.tile_us + config.stage_us * size.stages) * waves
    if config.makers:
        units, of_unit = size.row_tiles * CLUSTER * UNITS * size.stages, constants["units"]
        us += of_unit["added_us"] * units / ctas
        return float(max(us, of_unit["maker_us"] * units / (ctas * config.makers)))
    packed = part.row_blocks * size.tiles_along_k * tiles.tile_dtype(p.format).itemsize
    by_memory = constants["requantize"]
    return float(us + by_memory["fixed_us"] + by_memory["megabyte_us"] * (packed + part.nbytes(p.k)) / 1e6)


def ranked(p: Problem) -> list[tuple[S8Config, float]]:
    """The configs of a format and their predicted us, the fastest first."""
    return sorted(((config, predicted(p, config)) for config in configs(p)), key=lambda pair: pair[1])


def pays(p: Problem) -> bool:
    """Whether it takes less time than the kernel that makes bytes of W in its main loop."""
    us = ranked(p)[0][1] - (WITHIN_US if quantizes(p) else 0)
    if p.activation == E4M3:
        return us < E4M3_BY_HALVES * prefill_sm80_eight_bits.ranked(p)[0][1]
    return us < prefill_sm90_eight_bits.ranked(p)[0][1]


def variants(fmt: Format, sm: int, activations: Collection[str] = tuple(GROUPS)) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) of a format on a GPU for activations."""
    kinds = [kind for kind in GROUPS if kind in activations and multiplies(kind, fmt)]
    found = {tuple(each.items()): each for each in (requantize.template(fmt, kind) for kind in kinds)}
    yield from ((requantize.NAME, each) for each in found.values())  # of integers it does not depend on their groups
    if not requantize.table_bytes(fmt):
        yield from ((NAME, template(config, fmt)) for kind in kinds for config in configs_of(kind) if config.makers)


def common_variants(sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) that knows no format on a GPU."""
    yield from ((NAME, template(config)) for config in all_configs() if not config.makers)


def extra_units(fmt: Format | None, sm: int, activations: Collection[str]) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) of a format for activations, or of no format, beside those of a problem's configs."""
    return common_variants(sm) if fmt is None else variants(fmt, sm, activations)


def all_configs() -> list[S8Config]:
    """For every activation."""
    return [config for activation in GROUPS for config in configs_of(activation)]


def _chosen(p: Problem, rows: Sequence[int]) -> list[S8Config]:
    return configs(p)


GEMM_SM90_S8 = Kernel(
    NAME, lambda p: (), ranked, _chosen, lambda p, config: template(config, p.format), launch,
    reads=lambda p: (EIGHT_BITS,), adds=True, quantizes=quantizes,
    extra_units=extra_units,
)  # fmt: skip
