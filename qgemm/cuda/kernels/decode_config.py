"""How the decode kernels share a matrix out: rows to CTAs, K to the warps of a CTA, memory to their pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import activations
from qgemm.cuda.layout.tile import K_BLOCK, WARPS, columns, k_blocks, scales_once, table_bytes, tile_dtype

COLUMN_TILE = 8  # tokens of an operand of the tensor cores: so many have their place, be there fewer
PADDING = 8  # numbers after a token's share of a k_block, against bank conflicts
TOKEN_BYTES = {  # of a token's share of a k_block in a pipeline, by the type of x
    "half": 2 * (K_BLOCK + PADDING),
    "bf16": 2 * (K_BLOCK + PADDING),
    "float": 4 * (K_BLOCK + PADDING),
    "Activations": activations.DTYPE.itemsize,
}
INSIDE = 16384  # numbers of x, all tokens', that a CTA of decode_a8 quantizes for itself at most
SCALE_BYTES = 4  # of a decoded scale, float32
SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}  # KB of a CTA, from a compute capability on
BARRIERS = 1 << 10  # bytes of them that are kept beside the pipelines
BULK_COPIES = 90  # the first compute capability that has them


class DecodeConfig(NamedTuple):
    """How a decode kernel shares a matrix out: CTAs of `m16_tiles` * 16 rows, 8 being two row_blocks, `warp_split_k`
    warps share K.

    kernels, tokens, least: the kernels, their token tiles and the compute capability from which on it is for them.
    row_blocks, m: the least number of row_blocks of 64 rows, and of rows of x. shared: bytes of shared memory that a
    CTA may take, and half of which it always takes, which decides how many CTAs an SM holds; max_stages: the most
    k_blocks in a pipeline.
    """

    kernels: tuple[str, ...]
    tokens: tuple[int, ...]
    least: int
    row_blocks: int
    m: int
    m16_tiles: int
    warp_split_k: int
    shared: int
    max_stages: int


A16, A8 = ("decode",), ("decode_a8",)

# Measured on an H200 (132 SMs) with q4_0: about one CTA an SM with 16 warps, or two or more with 8, and 90 to 200 KB in
# flight an SM; with fewer than 101 row_blocks half a row_block to a CTA, so that every SM has one; with many, and
# several tokens, two row_blocks, which share x. Where there is one CTA for each SM, two must not fit, or some SMs get
# two: up to twice the time.
DECODE_CONFIGS = (
    #     kernel    tokens      sm  row_blocks >=  m >=  m16_tiles  warp_split_k  shared      max_stages
    DecodeConfig(A16,      (8,),        90, 265,       5,    8,      12,     226 << 10,  4),
    DecodeConfig(A16,      (1, 8, 16),  90, 133,       1,    4,      8,      113 << 10,  4),
    DecodeConfig(A16,      (1, 8, 16),  90, 101,       1,    4,      16,     226 << 10,  3),
    DecodeConfig(A16,      (1, 8, 16),  90, 67,        1,    2,      8,      113 << 10,  6),
    DecodeConfig(A16,      (1, 8, 16),  90, 34,        1,    2,      16,     213 << 10,  4),
    DecodeConfig(A8,       (1, 8),      90, 133,       1,    4,      8,      113 << 10,  4),
    DecodeConfig(A8,       (1, 8),      90, 101,       1,    4,      16,     213 << 10,  4),
    DecodeConfig(A8,       (16,),       90, 133,       1,    4,      8,      75 << 10,   4),
    DecodeConfig(A8,       (16,),       90, 101,       1,    4,      16,     226 << 10,  2),
    DecodeConfig(A8,       (16,),       90, 34,        1,    2,      16,     226 << 10,  2),
    DecodeConfig(A8,       (1, 8),      90, 34,        1,    2,      16,     213 << 10,  6),
    DecodeConfig(A16,      (1, 8, 16),  90, 0,         1,    1,      16,     226 << 10,  4),
    DecodeConfig(A8,       (1, 8),      90, 0,         1,    1,      16,     226 << 10,  6),
    DecodeConfig(A8,       (16,),       90, 0,         1,    1,      16,     226 << 10,  2),
    DecodeConfig(A16 + A8, (1, 8, 16),  80, 34,        1,    4,      8,      75 << 10,   4),
    DecodeConfig(A16 + A8, (1, 8, 16),  80, 0,         1,    1,      16,     75 << 10,   4),
)  # fmt: skip

# The same with a codebook, whose table of levels all warps of a CTA share. Shared memory is what limits, so pipelines
# are short.
CODEBOOK_DECODE_CONFIGS = (
    #     kernel    tokens      sm  row_blocks >=  m >=  m16_tiles  warp_split_k  shared      max_stages
    DecodeConfig(A16,      (1, 8, 16),  90, 265,       1,    8,      8,      112 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  90, 265,       1,    8,      6,      112 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  90, 133,       1,    4,      8,      112 << 10,  4),
    DecodeConfig(A16,      (1, 8, 16),  90, 133,       1,    8,      8,      226 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  90, 67,        1,    4,      16,     226 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  90, 34,        1,    2,      16,     226 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  90, 0,         1,    1,      16,     226 << 10,  2),
    DecodeConfig(A16,      (1, 8, 16),  80, 34,        1,    4,      8,      113 << 10,  4),
    DecodeConfig(A16,      (1, 8, 16),  80, 0,         1,    1,      16,     113 << 10,  4),
)  # fmt: skip


def decode_configs_for(fmt: Format, kernel: str, tokens: int, sm: int) -> Iterator[DecodeConfig]:
    """The rows for this format, kernel and token tile on this GPU, or else on the one before it.

    With a codebook, of them those that have the memory for its table and two k_blocks a warp; the last serves all.
    """
    table = CODEBOOK_DECODE_CONFIGS if fmt.needs_table else DECODE_CONFIGS
    rows = [row for row in table if kernel in row.kernels and tokens in row.tokens and row.least <= sm]
    rows = [row for row in rows if row.least == max(row.least for row in rows)]

    def fits(row: DecodeConfig) -> bool:
        return (
            table_bytes(fmt) + row.warp_split_k * pipeline_bytes(fmt, row.m16_tiles, tokens, 2, kernel, "half")
            <= row.shared
        )

    return (row for row in rows if not fmt.needs_table or fits(row) or row is rows[-1])


def decode_config_for(fmt: Format, kernel: str, tokens: int, m: int, row_blocks: int, sm: int) -> DecodeConfig:
    """The first of these rows for M rows of x, and so many row_blocks of 64 rows of W."""
    return next(
        row for row in decode_configs_for(fmt, kernel, tokens, sm) if row_blocks >= row.row_blocks and m >= row.m
    )


def pipeline_bytes(fmt: Format, m16_tiles: int, tokens: int, stages: int, kernel: str, source: str) -> int:
    """Shared memory of a warp of a decode kernel, as `SmemPipeline` and `Smem` in kernels/ lay it out.

    `stages` stages, each the codes of some row groups of a k_block and its share of x, which comes as `source`; the
    fields per block of the tiles that they span; the decoded scales of a tile. decode_a8 has x apart from the pipelines
    where it quantizes it.
    """
    dtype = tile_dtype(fmt)
    k_block = dtype["k_blocks"].base.itemsize
    fields = (dtype.itemsize - k_blocks(fmt) * k_block) * m16_tiles // WARPS
    x = 0 if kernel == "decode_a8" and source != "Activations" else max(tokens, COLUMN_TILE) * TOKEN_BYTES[source]
    decoded = SCALE_BYTES * columns(fmt) // fmt.group * 16 * m16_tiles if scales_once(fmt) else 0
    return stages * (k_block * m16_tiles // WARPS + x) + in_flight(fmt, stages) * fields + decoded


def quantized_bytes(kernel: str, source: str, tokens: int) -> int:
    """Shared memory of a CTA for the most x that it quantizes itself; all tokens of a tile are read.

    Whatever the size of x: what a function may have is set for all of its launches.
    """
    if kernel != "decode_a8" or source == "Activations":
        return 0
    return (INSIDE // K_BLOCK + tokens) * TOKEN_BYTES["Activations"]


def in_flight(fmt: Format, stages: int) -> int:
    """Tiles that `stages` consecutive k_blocks may belong to."""
    return 1 + -(-(stages - 1) // k_blocks(fmt))


def shared_limit(sm: int) -> int:
    """Bytes of shared memory that the pipelines of a CTA can have on this GPU."""
    return (SHARED[max(known for known in SHARED if known <= sm)] << 10) - BARRIERS


def decode_template(fmt: Format, config: DecodeConfig, tokens: int, kernel: str, source: str, sm: int) -> Template:
    """The template of a decode kernel: pipelines as max_stages as fit, of at least two k_blocks, and fewer warps where
    they must."""
    limit, warp_split_k, stages = shared_limit(sm), config.warp_split_k, 2

    def size(stages: int) -> int:
        pipelines = warp_split_k * pipeline_bytes(fmt, config.m16_tiles, tokens, stages, kernel, source)
        return table_bytes(fmt) + pipelines + quantized_bytes(kernel, source, tokens)

    while size(stages) > limit:
        warp_split_k -= 1
    while stages < config.max_stages and size(stages + 1) <= min(config.shared, limit):
        stages += 1
    return {
        "In": source,
        "TOKENS": tokens,
        "M16_TILES": min(config.m16_tiles, WARPS),
        "ROW_BLOCKS": max(1, config.m16_tiles // WARPS),
        "WARP_SPLIT_K": warp_split_k,
        "STAGES": stages,
        "BULK": int(sm >= BULK_COPIES),
        "WARP_BYTES": pipeline_bytes(fmt, config.m16_tiles, tokens, stages, kernel, source),
    }
