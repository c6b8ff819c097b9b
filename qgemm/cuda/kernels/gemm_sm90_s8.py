"""gemm_sm90_s8 on the host: products of eight bits for many rows of x, from bytes of W in a workspace.

W stays packed. During a call its bytes are in the workspace, slice by slice if W is large. Requantizer warps of the
kernel write them while other warps multiply. If the format has a table of levels, requantize writes them before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from qgemm.codec.eight_bits import COLUMNS
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS, multiplies
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import by_tensor_map
from qgemm.cuda.driver.workspace import address, workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, S8Sizes, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem

from . import requantize, sm90_config
from .kernel import Kernel, Launchable
from .sm90_config import BARRIER, EPI_TOKEN, FLAG, SUM, WORK_QUEUE, aligned, type_code, x_workspace_bytes

NAME = "gemm_sm90_s8"
X_WORKSPACE = f"{NAME}: x in bytes"  # not shared with prefill_sm90_eight_bits, which draws work items before it waits
# Largest x (numbers) that the kernel quantizes itself. Measured with 8192 and 14336 rows of W, in the kernel vs. by a
# separate launch: 512 rows of x, 8192 columns: 76.8 vs. 78.5 us; 512 rows, 4096 columns: 76.2 vs. 79.1 us; 1024 rows,
# 8192 columns: 141.1 vs. 139.8 us.
MAX_QUANTIZED = 6 << 20
SAVED_LAUNCH_US = 0.5  # saved at least by quantizing x in the kernel
WORKSPACE = 256 << 20  # largest slice of W in bytes, a power of two
CLUSTER, ROW_BLOCKS = 2, 2  # CTAs that share tokens, and the row_blocks of a CTA: kernels/gemm/sm90/s8_gemm.cuh
CLUSTER_BLOCKS = CLUSTER * ROW_BLOCKS
BLOCK_TOKENS = 256  # tokens of a tile of y
ACC_TOKENS = 128  # tokens of a pass, whose int32 sums a warpgroup holds
EPI_TOKENS = 32  # tokens that are stored together
W_STAGES, X_STAGES = 2, 4  # a stage: COLUMNS of the rows of a CTA; COLUMNS of ACC_TOKENS tokens
ITEM_ROWS, BOX = 16, 128  # a requantizer's work item: its rows of a stage, and the columns that it stages at a time
STAGE_ITEMS = ROW_BLOCKS * tiles.ROWS // ITEM_ROWS


class S8Config(NamedTuple):
    """An activation, requantizer warps per CTA, and the cost model in us: per launch, per tile of y, per stage."""

    activation: str
    requantizers: int
    fixed_us: float
    tile_us: float
    stage_us: float

    def __str__(self) -> str:
        """E.g. "256x2, 7 requantizers"."""
        return f"{BLOCK_TOKENS}x{ROW_BLOCKS}" + (f", {self.requantizers} requantizers" if self.requantizers else "")


class Pointers(ctypes.Structure):
    """The pointers of a call, besides the tensor map of x."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("raw_x", ctypes.c_void_p),
        ("x_queue", ctypes.c_void_p),
        ("epilogue", EpilogueArguments),
    ]


class Slice(NamedTuple):
    """The row_blocks of W whose bytes are in the workspace at one time, from number `first` on."""

    first: int
    row_blocks: int

    @property
    def clusters(self) -> int:
        """Clusters along N."""
        return -(-self.row_blocks // CLUSTER_BLOCKS)

    def nbytes(self, k: int) -> int:
        """Bytes in the workspace, for whole clusters: codes, then scales."""
        rows, stages = self.clusters * CLUSTER_BLOCKS * tiles.ROWS, -(-k // COLUMNS)
        return rows * stages * (COLUMNS + SUM)


@cache
def configs_of(activation: str) -> tuple[S8Config, ...]:
    """The configs for an activation of GROUP_COLUMNS."""
    return tuple(S8Config(*row) for row in read(NAME)["configs"] if row[0] == activation)


def configs(p: Problem) -> list[S8Config]:
    """The configs for a format: a table of levels does not fit beside requantizers."""
    table = requantize.table_bytes(p.format)
    return [config for config in configs_of(p.activation) if not (config.requantizers and table)]


def smem_bytes(config: S8Config) -> int:
    """Shared memory of a CTA: Smem of kernels/gemm/sm90/s8_gemm.cuh, to the byte."""
    w = W_STAGES * ROW_BLOCKS * tiles.ROWS * (COLUMNS + SUM)
    x = X_STAGES * ACC_TOKENS * (COLUMNS + SUM)
    barriers = (2 * (W_STAGES + X_STAGES) + 2) * BARRIER
    staged = config.requantizers * ITEM_ROWS * BOX
    return aligned(staged + w + x + ROW_BLOCKS * EPI_TOKENS * EPI_TOKEN + barriers)


def threads(config: S8Config) -> int:
    """Threads of a CTA: two consumer warpgroups, then the producer and the requantizers in whole warpgroups."""
    return 128 * (ROW_BLOCKS + -(-(1 + config.requantizers) // 4))


def template(config: S8Config, fmt: Format | None = None) -> Template:
    """The constants of the kernel. fmt: the format of W, for requantizers."""
    return {
        "REQUANTIZERS": config.requantizers,
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "ACC_TOKENS": ACC_TOKENS,
        **(requantize.weights_template(fmt, config.activation) if fmt and config.requantizers else {}),
        **group_activations.byte_template(config.activation),
        "EPI_TOKENS": EPI_TOKENS,
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
    """Bytes of the workspace for any of these slices. Workspaces are kept, so there are few sizes."""
    return 1 << (parts[0].nbytes(k) - 1).bit_length()


def queue_bytes(nbytes: int) -> int:
    """WorkQueue of the requantizers and its ready flags, after a workspace of `nbytes`."""
    return WORK_QUEUE + nbytes // (ITEM_ROWS * COLUMNS) * FLAG


def launch(p: Problem, config: S8Config) -> Launchable:
    """The launches for every slice of W: the product, without requantizers also requantize before it.

    If x is not in eight bits, the product quantizes it first, into a workspace of its own.
    """
    parts = slices(p.n, p.k)
    nbytes, device = workspace_bytes(parts, p.k), p.device
    size = nbytes + queue_bytes(nbytes)
    row_block_bytes = -(-p.k // tiles.columns(p.format)) * tiles.tile_dtype(p.format).itemsize
    offsets = [part.first * row_block_bytes for part in parts]
    products = [_product(p, config, part, nbytes, size) for part in parts]
    conversions = [
        None if config.requantizers else requantize.launch(p, part.row_blocks, part.clusters * CLUSTER)
        for part in parts
    ]
    scales_offset = group_activations.scales_at(p.m, p.k)
    if p.x != EIGHT_BITS:
        (multiply,) = products
        x_bytes = x_workspace_bytes(p.m, p.k)

        def enter_raw(stream: int, x: int, w: int, *outputs: int) -> None:
            bytes_of_w = workspace(device, stream, requantize.NAME, size)
            queue = address(device, X_WORKSPACE, x_bytes, stream)
            codes = queue + WORK_QUEUE
            with bytes_of_w.lock:
                multiply(stream, codes, w, codes + scales_offset, x, queue, *outputs)

        return enter_raw

    def enter(stream: int, x: int, w: int, *outputs: int) -> None:
        bytes_of_w = workspace(device, stream, requantize.NAME, size)
        with bytes_of_w.lock:
            for offset, convert, multiply in zip(offsets, conversions, products, strict=True):
                if convert is not None:
                    convert(stream, w + offset, bytes_of_w.pointer)
                multiply(stream, x, w + offset, x + scales_offset, 0, 0, *outputs)

    return enter


def _product(p: Problem, config: S8Config, part: Slice, nbytes: int, size: int) -> Launchable:
    """The product by a slice.

    A call has pointers to the codes of x, W from the slice on, the scales of x, x in floats, its queue, the outputs.
    """
    fmt = p.format if config.requantizers else None
    (output,), constants = p.outputs, template(config, fmt)
    pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
    arrays = (
        ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset) for name, *_ in Pointers._fields_[:-1]
    )
    launch_sizes, ctas = sizes(p, part, nbytes)
    return by_tensor_map(
        (EIGHT_BITS, launch_sizes.x_rows, group_activations.columns_of(p.k), ACC_TOKENS // CLUSTER),
        partial(address, p.device, requantize.NAME, size), load(NAME, fmt, **constants),
        (*arrays, pointers.epilogue, launch_sizes), ctas, threads(config), int(constants["SMEM_BYTES"]), pointers,
        5 + len(Outputs._fields_), CLUSTER,
    )  # fmt: skip


def sizes(p: Problem, part: Slice, nbytes: int) -> tuple[S8Sizes, int]:
    """The sizes of a slice's launch, and its CTAs. nbytes: of the workspace."""
    token_tiles, max_clusters = -(-p.m // BLOCK_TOKENS), p.sms // CLUSTER
    count = part.clusters * token_tiles
    whole = whole_tiles(count, max_clusters)
    clusters = min(2 * count - whole, max_clusters)
    groups, rest = divmod(min(clusters, count), S8Sizes.ROW_TILES_TOGETHER * token_tiles)
    first = min(part.clusters, groups * S8Sizes.ROW_TILES_TOGETHER + min(rest, S8Sizes.ROW_TILES_TOGETHER))
    along_k = -(-p.k // COLUMNS), -(-p.k // tiles.columns(p.format))
    rows = part.first, part.row_blocks, part.clusters
    s8_sizes = S8Sizes(
        p.n, nbytes, p.k, p.m, *along_k, group_activations.rows_of(p.m), type_code(p.x), *rows, token_tiles, whole,
        first,
    )  # fmt: skip
    return s8_sizes, clusters * CLUSTER


def whole_tiles(count: int, clusters: int) -> int:
    """The number of tiles of y that stay whole: a last wave is cut in two if it is one wave even then."""
    last = count % clusters
    return count - last if 2 * last <= clusters else count


def quantizes(p: Problem) -> bool:
    """Whether the kernel quantizes x itself: it has requantizers, W is one slice, and x is small enough."""
    config = ranked(p)[0][0] if p.times is None else GEMM_SM90_S8.choose(p)
    requantizers = p.x in TYPES and config.requantizers > 0
    return requantizers and p.m * p.k <= MAX_QUANTIZED and len(slices(p.n, p.k)) == 1


def predicted(p: Problem, config: S8Config) -> float:
    """The us of a problem, infinite if it has no token tile."""
    if group_activations.rows_of(p.m) < BLOCK_TOKENS:
        return inf
    return sum(_us(p, config, part) for part in slices(p.n, p.k))


def _us(p: Problem, config: S8Config, part: Slice) -> float:
    """The us of a slice: waves of tiles, and the conversion of W, by a pass over memory or by requantizers.

    Requantizers slow the other warps a little, and bound the time if they are the slowest.
    """
    constants, size, ctas = read(NAME), *sizes(p, part, 0)
    clusters = ctas // CLUSTER
    halves = 2 * (size.row_tiles * size.token_tiles - size.whole)
    waves = -(-size.whole // clusters) + constants["half_tile"] * -(-halves // clusters)
    us = config.fixed_us + (config.tile_us + config.stage_us * size.stages) * waves
    if config.requantizers:
        items, per_item = size.row_tiles * CLUSTER * STAGE_ITEMS * size.stages, constants["items"]
        us += per_item["added_us"] * items / ctas
        return float(max(us, per_item["requantizer_us"] * items / (ctas * config.requantizers)))
    packed = part.row_blocks * size.tiles_along_k * tiles.tile_dtype(p.format).itemsize
    by_memory = constants["requantize"]
    return float(us + by_memory["fixed_us"] + by_memory["megabyte_us"] * (packed + part.nbytes(p.k)) / 1e6)


def ranked(p: Problem) -> list[tuple[S8Config, float]]:
    """The configs of a format and their predicted us, the fastest first."""
    return sorted(((config, predicted(p, config)) for config in configs(p)), key=lambda pair: pair[1])


def us_in_a_call(p: Problem) -> float:
    """The predicted us of the best config, without the launch that it saves if it quantizes x itself."""
    return ranked(p)[0][1] - (SAVED_LAUNCH_US if quantizes(p) else 0)


def variants(
    fmt: Format, sm: int, activations: Collection[str] = tuple(GROUP_COLUMNS)
) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) pairs of a format on a GPU for activations."""
    kinds = [kind for kind in GROUP_COLUMNS if kind in activations and multiplies(kind, fmt)]
    templates = {tuple(pairs.items()): pairs for pairs in (requantize.template(fmt, kind) for kind in kinds)}
    yield from ((requantize.NAME, pairs) for pairs in templates.values())  # activations of integers share one
    if not requantize.table_bytes(fmt):
        with_requantizers = (config for kind in kinds for config in configs_of(kind) if config.requantizers)
        yield from ((NAME, template(config, fmt)) for config in with_requantizers)


def common_variants(sm: int) -> Iterator[tuple[str, Template]]:
    """Every (kernel, template) pair on a GPU that depends on no format."""
    yield from ((NAME, template(config)) for config in all_configs() if not config.requantizers)


def extra_units(fmt: Format | None, sm: int, activations: Collection[str]) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) pairs of a format for activations, or those that depend on no format."""
    return common_variants(sm) if fmt is None else variants(fmt, sm, activations)


def all_configs() -> list[S8Config]:
    """The configs of every activation."""
    return [config for activation in GROUP_COLUMNS for config in configs_of(activation)]


def _chosen(p: Problem, rows: Sequence[int]) -> list[S8Config]:
    return configs(p)


GEMM_SM90_S8 = Kernel(
    NAME, lambda p: (), ranked, _chosen, lambda p, config: template(config, p.format), launch,
    reads=lambda p: (EIGHT_BITS,), adds=True, quantizes=quantizes,
    extra_units=extra_units,
)  # fmt: skip
