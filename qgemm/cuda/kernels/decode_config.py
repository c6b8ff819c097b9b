"""How the decode kernels share a matrix out: rows to CTAs, K to the warps of a CTA, memory to their pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import q8_1_k_blocks
from qgemm.cuda.layout.tile import K_BLOCK, WARPS, columns, k_blocks, scales_once, table_bytes, tile_dtype
from qgemm.cuda.problem import Q8_1

A16, A8, SLICES = "decode", "decode_a8", "decode_slices"

COLUMN_TILE = 8  # tokens of an operand of the tensor cores: so many have their place, be there fewer
PADDING = 8  # numbers after a token's share of a k_block, against bank conflicts
REDUCE_PADDING = 4  # floats after a token's sums of a warp, against bank conflicts
TOKEN_BYTES = {  # of a token's share of a k_block in a pipeline, by the type of x
    "half": 2 * (K_BLOCK + PADDING),
    "bf16": 2 * (K_BLOCK + PADDING),
    "float": 4 * (K_BLOCK + PADDING),
    Q8_1: q8_1_k_blocks.DTYPE.itemsize,
}
INSIDE = 16384  # numbers of x, all tokens', that a CTA of decode_a8 quantizes for itself at most
SLICE_BLOCK = 256  # columns of x in slices that share a unit
POINTS_BYTES = 32 << 10  # of a table of points in decode_slices, at most
SCALE_BYTES = 4  # of a decoded scale, float32
SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}  # KB of a CTA, from a compute capability on
BARRIERS = 1 << 10  # bytes of them that are kept beside the pipelines
SM_SHARED = 228  # KB of an SM that has bulk copies
FEW_BITS = 3  # of a code, at most: a k_block has so few bytes that other configs are best
WIDEST_STAGE = 2  # k_blocks of one, at most
BULK_COPIES = 90  # the first compute capability that has them


class DecodeConfig(NamedTuple):
    """How a decode kernel shares a matrix out: CTAs of `m16_tiles` * 16 rows, 8 being two row_blocks, `warp_split_k`
    warps share K.

    kernels, tiles, tokens, least: the kernels, the kinds of tiles (`tile_kind`), the token tiles and the compute
    capability from which on it is for them.
    row_blocks, k, m: the least number of row_blocks of 64 rows, of columns of W, and of rows of x.
    cluster_split_k: CTAs of a cluster, which share K as well. shared: bytes of shared memory that a CTA may take, and
    half of which it always takes, which decides how many CTAs an SM holds; max_stages: the most k_blocks in a pipeline.
    prefetch: stages behind those that a warp fetches into the L2 cache while it waits for x.
    whole_tiles: whether a stage is a tile rather than a k_block; for those alone that are a group of several k_blocks.
    columns: of x that a CTA of decode_slices has in slices at once.
    """

    kernels: tuple[str, ...]
    tiles: tuple[str, ...]
    tokens: tuple[int, ...]
    least: int
    row_blocks: int
    k: int
    m: int
    m16_tiles: int
    warp_split_k: int
    cluster_split_k: int
    shared: int
    max_stages: int
    prefetch: int
    whole_tiles: int = 0
    columns: int = 0

    @property
    def reserved(self) -> int:
        """Bytes of shared memory that a CTA always takes, so that an SM holds as many as were meant.

        Half of `shared`, and more than what would let an SM hold one more than were meant, however short the pipelines
        of few bits a weight are.
        """
        meant = self.ctas
        return max(self.shared // 2, (SM_SHARED << 10) // (meant + 1) if meant else 0) + BARRIERS

    @property
    def ctas(self) -> int:
        """CTAs that an SM is meant to hold; 0 where that is left open."""
        return (SM_SHARED << 10) // self.shared if self.least >= BULK_COPIES else 0

    def __str__(self) -> str:
        """E.g. "2 m16_tiles, warp_split_k 16, 213 KiB, at most 4 stages"."""
        cluster = f" in each CTA of a cluster of {self.cluster_split_k}" if self.cluster_split_k > 1 else ""
        return (
            f"{self.m16_tiles} m16_tiles, warp_split_k {self.warp_split_k}{cluster}, {self.shared >> 10} KiB, "
            f"at most {self.max_stages} stages"
        )


def _row(values: list[Any]) -> DecodeConfig:
    """A row of configs/decode.json, where shared memory is in KiB."""
    kernels, tiles, tokens, *numbers = values
    row = DecodeConfig(tuple(kernels), tuple(tiles), tuple(tokens), *numbers)
    return row._replace(shared=row.shared << 10)


# Measured on an H200 (132 SMs) with q4_0, q4_k, q6_k and q8_0; docs/choosing-a-config.md says what decides. The same
# with a codebook or a grid, whose table of levels all warps of a CTA share: shared memory is what limits, so pipelines
# are short.
DECODE_CONFIGS, CODEBOOK_DECODE_CONFIGS, GRID_DECODE_CONFIGS = (
    tuple(map(_row, read("decode")[name])) for name in ("integer", "codebook", "grid")
)


def decode_configs_for(fmt: Format, kernel: str, tokens: int, sm: int) -> Iterator[DecodeConfig]:
    """The rows for this format, kernel and token tile on this GPU, or else on the one before it.

    With a table of levels, of them those that have the memory for it and two k_blocks a warp; the last serves all of
    which the GPU's shared memory holds one warp.
    """
    kind = tile_kind(fmt)
    table = {"codebook": CODEBOOK_DECODE_CONFIGS, "pairs": CODEBOOK_DECODE_CONFIGS, "grid": GRID_DECODE_CONFIGS}
    rows = [row for row in table.get(kind, DECODE_CONFIGS) if kernel in row.kernels and kind in row.tiles]
    rows = [row for row in rows if tokens in row.tokens and row.least <= sm]
    rows = [row for row in rows if not row.whole_tiles or stage_k_blocks(fmt, row) > 1]
    rows = [row for row in rows if row.least == max(row.least for row in rows)]
    rows = [row for row in rows if one_warp_bytes(fmt, row, kernel, tokens) <= shared_limit(sm)]

    def fits(row: DecodeConfig) -> bool:
        return (
            kernel_table_bytes(fmt, kernel)
            + row.warp_split_k * pipeline_bytes(fmt, row.m16_tiles, tokens, 2, kernel, "half")
            + sliced_bytes(row.columns)
            <= row.shared
        )

    return (row for row in rows if not table_bytes(fmt) or fits(row) or row is rows[-1])


def tile_kind(fmt: Format) -> str:
    """The kind of tile that configs are chosen by: "codebook", "pairs" (`TileLayout.pair_lookup`), "grid", "few_bits"
    (codes of up to 3), "super_blocks", "bytes" (codes of 8 bits) or "blocks"."""
    if table_bytes(fmt):
        return "codebook" if fmt.needs_table else "pairs" if fmt.tile.pair_lookup else "grid"
    if fmt.code_bits <= FEW_BITS:
        return "few_bits"
    return "super_blocks" if k_blocks(fmt) > 1 else "bytes" if fmt.code_bits == 8 else "blocks"


def decode_ranked(
    fmt: Format, kernel: str, tokens: int, m: int, row_blocks: int, k: int, sm: int
) -> list[DecodeConfig]:
    """Configs for M rows of x [m, k] and `row_blocks` row_blocks of W, the best first."""
    rows = decode_configs_for(fmt, kernel, tokens, sm)
    return [row for row in rows if row_blocks >= row.row_blocks and k >= row.k and m >= row.m]


def gated_config(config: DecodeConfig) -> DecodeConfig:
    """The config for a gate and what it gates: its rows are half of each."""
    return config._replace(m16_tiles=max(config.m16_tiles, 2))


def stage_k_blocks(fmt: Format, config: DecodeConfig) -> int:
    """k_blocks of a stage: one, or all of a tile of one group that is not too wide."""
    wide = config.whole_tiles and fmt.weights == fmt.group and k_blocks(fmt) <= WIDEST_STAGE
    return k_blocks(fmt) if wide else 1


def pipeline_bytes(
    fmt: Format, m16_tiles: int, tokens: int, stages: int, kernel: str, source: str, of_stage: int = 1
) -> int:
    """Shared memory of a warp of a decode kernel, as `SmemPipeline` and `Smem` in kernels/ lay it out.

    `stages` stages, each the codes of some row groups of `of_stage` k_blocks and their share of x, which comes as
    `source`; the fields per block of the tiles that they span; the decoded scales of a tile. decode_a8 has x apart from
    the pipelines where it quantizes it.
    """
    dtype = tile_dtype(fmt)
    k_block = dtype["k_blocks"].base.itemsize
    fields = (dtype.itemsize - k_blocks(fmt) * k_block) * m16_tiles // WARPS
    number = TOKEN_BYTES[source] // (K_BLOCK + PADDING)
    x = max(tokens, COLUMN_TILE) * (TOKEN_BYTES[source] + (of_stage - 1) * K_BLOCK * number)
    if kernel == SLICES or (kernel == A8 and source != Q8_1):
        x = 0
    elif kernel != A8 and tokens == 1:
        x = K_BLOCK * of_stage * number
    decoded = SCALE_BYTES * columns(fmt) // fmt.group * 16 * m16_tiles if scales_once(fmt) and kernel != SLICES else 0
    spanned = stages if of_stage == k_blocks(fmt) else in_flight(fmt, stages)
    return stages * (of_stage * k_block * m16_tiles // WARPS + x) + spanned * fields + decoded


def one_warp_bytes(fmt: Format, config: DecodeConfig, kernel: str, tokens: int) -> int:
    """Shared memory of a CTA of one warp with the shortest pipeline, for the widest x."""
    return kernel_table_bytes(fmt, kernel) + max(
        pipeline_bytes(fmt, config.m16_tiles, tokens, 2, kernel, source)
        + quantized_bytes(kernel, source, tokens)
        + sliced_bytes(config.columns)
        for source in TOKEN_BYTES
    )


def kernel_table_bytes(fmt: Format, kernel: str) -> int:
    """Shared memory that a decode kernel keeps for a format's table; twin of POINTS_BYTES in kernels/codes/grid.cuh."""
    return min(table_bytes(fmt), POINTS_BYTES) if kernel == SLICES else table_bytes(fmt)


def sliced_bytes(columns: int) -> int:
    """Shared memory of a CTA for so many columns of x: four slices, sums by steps of 16 columns, and units."""
    return columns * 4 + columns // 16 * 4 + columns // SLICE_BLOCK * 4


def quantized_bytes(kernel: str, source: str, tokens: int) -> int:
    """Shared memory of a CTA for the most x that it quantizes itself; all tokens of a tile are read.

    Whatever the size of x: what a function may have is set for all of its launches.
    """
    if kernel != A8 or source == Q8_1:
        return 0
    return (INSIDE // K_BLOCK + tokens) * TOKEN_BYTES[Q8_1]


def in_flight(fmt: Format, stages: int) -> int:
    """Tiles that `stages` consecutive k_blocks may belong to."""
    return 1 + -(-(stages - 1) // k_blocks(fmt))


def shared_limit(sm: int) -> int:
    """Bytes of shared memory that the pipelines of a CTA can have on this GPU."""
    return (SHARED[max(known for known in SHARED if known <= sm)] << 10) - BARRIERS


def decode_template(
    fmt: Format, config: DecodeConfig, tokens: int, kernel: str, source: str, sm: int, gated: bool = False
) -> Template:
    """The template of a decode kernel: pipelines as max_stages as fit, of at least two k_blocks, and fewer warps where
    they must."""
    limit, warp_split_k, stages = shared_limit(sm), config.warp_split_k, 2
    inbox = 4 * tokens * 16 * config.m16_tiles if config.cluster_split_k > 1 else 0
    of_stage = stage_k_blocks(fmt, config) if kernel == A16 else 1
    if kernel == SLICES and fmt.code_bits == 1:  # of so few bytes that waiting for them would cost more
        of_stage = k_blocks(fmt)

    def of_warp(stages: int) -> int:
        return pipeline_bytes(fmt, config.m16_tiles, tokens, stages, kernel, source, of_stage)

    def size(stages: int) -> int:
        return (
            kernel_table_bytes(fmt, kernel)
            + inbox
            + warp_split_k * of_warp(stages)
            + quantized_bytes(kernel, source, tokens)
            + sliced_bytes(config.columns)
        )

    while size(stages) > limit:
        warp_split_k -= 1
    while stages < config.max_stages and size(stages + 1) <= min(config.shared, limit):
        stages += 1
    constants: Template = {
        "In": source,
        "TOKENS": tokens,
        "M16_TILES": config.m16_tiles // 2 if gated else min(config.m16_tiles, WARPS),
        "ROW_BLOCKS": 2 if gated else max(1, config.m16_tiles // WARPS),
        "GATED": int(gated),
        "WARP_SPLIT_K": warp_split_k,
        "CLUSTER_SPLIT_K": config.cluster_split_k,
        "STAGES": stages,
        "STAGE_K_BLOCKS": of_stage,
        "PREFETCH": config.prefetch,
        "BULK": int(sm >= BULK_COPIES),
        "WARP_BYTES": of_warp(stages),
        "INBOX_BYTES": inbox,
        "REDUCE_BYTES": 4 * warp_split_k * tokens * (16 * config.m16_tiles + REDUCE_PADDING),
    }
    if kernel == SLICES:
        constants |= {"SLICED": config.columns, "SLICES_BYTES": sliced_bytes(config.columns)}
        constants["POINTS_BYTES"] = kernel_table_bytes(fmt, kernel)
    return constants
