"""The configs of the decode kernels: rows of W for a CTA, warps that share K, shared memory for their pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import q8_1_k_blocks
from qgemm.cuda.layout.tile import K_BLOCK, WARPS, columns, k_blocks, scales_once, table_bytes, tile_dtype
from qgemm.cuda.problem import Q8_1

SOURCE = "decode"
# The kernels by their names in configs/decode.json, and their policies (kernels/policies.cuh). SUMMED_SLOTS is the
# kernel of SLOTS if y is the sum over a token's experts.
A16, A8, SLICES = "decode", "decode_a8", "decode_slices"
SLOTS, SUMMED_SLOTS, TILES = "moe_decode", "moe_decode_sum", "moe_decode_tiles"
POLICIES: dict[str, Template] = {
    A16: {"Grouping": "DenseProducts", "Mainloop": "MainloopA16"},
    A8: {"Grouping": "DenseProducts", "Mainloop": "MainloopA8"},
    SLICES: {"Grouping": "DenseProducts", "Mainloop": "MainloopSlices"},
    SLOTS: {"Grouping": "ExpertSlots", "Mainloop": "MainloopA16"},
    SUMMED_SLOTS: {"Grouping": "ExpertSlots", "Mainloop": "MainloopA16"},
    TILES: {"Grouping": "ExpertTiles", "Mainloop": "MainloopA16"},
}

MMA_N = 8  # tokens of an mma; fewer are padded
PADDING = 8  # numbers after a token's share of a k_block, against bank conflicts
REDUCE_PADDING = 4  # floats after a token's sums of a warp, against bank conflicts
TOKEN_BYTES = {  # bytes of a token's share of a k_block in a pipeline, by the type of x
    "half": 2 * (K_BLOCK + PADDING),
    "bf16": 2 * (K_BLOCK + PADDING),
    "float": 4 * (K_BLOCK + PADDING),
    Q8_1: q8_1_k_blocks.DTYPE.itemsize,
}
INSIDE = 16384  # numbers of x, of all tokens together, that a CTA of decode_a8 quantizes at most
SLICE_BLOCK = 256  # columns of sliced x that share a unit
POINTS_BYTES = 32 << 10  # bytes of a table of points in decode_slices, at most
SCALE_BYTES = 4  # a decoded scale is float32
SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}  # KB of a CTA, from a compute capability on
BARRIERS = 1 << 10  # bytes that are reserved for mbarriers beside the pipelines
SM_SHARED = 228  # KB of shared memory of an SM that has bulk copies
FEW_BITS = 3  # codes of up to 3 bits: k_blocks are so small that other configs are best
WIDEST_STAGE = 2  # k_blocks of a stage, at most
BULK_COPIES = 90  # the first compute capability that has cp.async.bulk


class DecodeConfig(NamedTuple):
    """One config: a CTA has `m16_tiles` * 16 rows, where 8 is two row_blocks, and `warp_split_k` warps that share K.

    kernels, tiles, tokens, least: the config serves these kernels, kinds of tiles (`tile_kind`) and token tiles from
        this compute capability on.
    row_blocks, k, m: the minimum number of row_blocks of 64 rows, of columns of W, and of rows of x.
    cluster_split_k: CTAs of a cluster, which share K as well.
    shared: bytes of shared memory of a CTA, at most. At least half is allocated, which limits the CTAs of an SM.
    max_stages: the maximum number of stages in a pipeline.
    prefetch: stages that a warp prefetches into the L2 cache after those of its pipeline, while it waits for x.
    whole_tiles: whether a stage is a tile rather than a k_block, if a tile is one group of several k_blocks.
    columns: columns of x that a CTA of decode_slices has in slices at a time.
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
        """Bytes of shared memory that a CTA always allocates, so that an SM holds the intended number of CTAs.

        Half of `shared`, and too much for one CTA more, even if a format of few bits a weight has short pipelines.
        """
        ctas = self.ctas
        return max(self.shared // 2, (SM_SHARED << 10) // (ctas + 1) if ctas else 0) + BARRIERS

    @property
    def ctas(self) -> int:
        """The intended number of CTAs of an SM; 0: any."""
        return (SM_SHARED << 10) // self.shared if self.least >= BULK_COPIES else 0

    def __str__(self) -> str:
        """E.g. "2 m16_tiles, warp_split_k 16, 213 KiB, at most 4 stages"."""
        cluster = f" in each CTA of a cluster of {self.cluster_split_k}" if self.cluster_split_k > 1 else ""
        return (
            f"{self.m16_tiles} m16_tiles, warp_split_k {self.warp_split_k}{cluster}, {self.shared >> 10} KiB, "
            f"at most {self.max_stages} stages" + " of tiles" * self.whole_tiles
            + f", {self.prefetch} prefetched" * bool(self.prefetch)
            + f", {self.columns} columns in slices" * bool(self.columns)
        )  # fmt: skip


def _row(values: list[Any]) -> DecodeConfig:
    """A row of configs/decode.json, which has shared memory in KiB."""
    kernels, tiles, tokens, *numbers = values
    row = DecodeConfig(tuple(kernels), tuple(tiles), tuple(tokens), *numbers)
    return row._replace(shared=row.shared << 10)


# Measured on an H200 (132 SMs) with q4_0, q4_k, q6_k and q8_0; docs/choosing-a-config.md gives the reasons. A codebook
# or a grid has a table of levels that all warps of a CTA share: shared memory is the limit, so pipelines are short.
DECODE_CONFIGS, CODEBOOK_DECODE_CONFIGS, GRID_DECODE_CONFIGS = (
    tuple(map(_row, read("decode")[name])) for name in ("integer", "codebook", "grid")
)


def decode_configs_for(fmt: Format, kernel: str, tokens: int, sm: int) -> Iterator[DecodeConfig]:
    """The rows of the table for this format, kernel and token tile on this GPU, or else on the previous one.

    A format with a table of levels has the rows whose shared memory holds the table and two k_blocks a warp, and the
    last row, if the GPU's shared memory holds one warp.
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
    """The kind of a format in the table of configs: "codebook", "pairs" (`TileLayout.pair_lookup`), "grid", "few_bits"
    (up to 3), "super_blocks", "bytes" (codes of 8 bits) or "blocks"."""
    if table_bytes(fmt):
        return "codebook" if fmt.needs_table else "pairs" if fmt.tile.pair_lookup else "grid"
    if fmt.code_bits <= FEW_BITS:
        return "few_bits"
    return "super_blocks" if k_blocks(fmt) > 1 else "bytes" if fmt.code_bits == 8 else "blocks"


def decode_ranked(
    fmt: Format, kernel: str, tokens: int, m: int, row_blocks: int, k: int, sm: int
) -> list[DecodeConfig]:
    """Configs for M rows of x [m, k] and `row_blocks` row_blocks of W, the best first; those for larger sizes last."""
    rows = list(decode_configs_for(fmt, kernel, tokens, sm))
    rows.sort(key=lambda row: not (row_blocks >= row.row_blocks and k >= row.k and m >= row.m))
    first: dict[str, DecodeConfig] = {}
    for row in rows:  # a later row may differ from an earlier one in its sizes alone
        first.setdefault(str(row), row)
    return list(first.values())


def gated_config(config: DecodeConfig) -> DecodeConfig:
    """The config for a gate and its up projection: half of its rows belong to each."""
    return config._replace(m16_tiles=max(config.m16_tiles, 2))


def stage_k_blocks(fmt: Format, config: DecodeConfig) -> int:
    """k_blocks of a stage: one, or all of a tile that is one group and not too wide."""
    wide = config.whole_tiles and fmt.weights == fmt.group and k_blocks(fmt) <= WIDEST_STAGE
    return k_blocks(fmt) if wide else 1


def pipeline_bytes(
    fmt: Format, m16_tiles: int, tokens: int, stages: int, kernel: str, source: str, stage_k_blocks: int = 1
) -> int:
    """Shared memory of a warp of a decode kernel, as `SmemPipeline` and `WarpSmem` in kernels/ lay it out.

    A stage has the codes of `m16_tiles` groups of rows in `stage_k_blocks` k_blocks, and their share of x of type
    `source`; there are `stages` of them. In addition: the fields of the tiles that they span, and the decoded scales of
    a tile. decode_a8 has x outside of the pipelines if it quantizes x itself.
    """
    dtype = tile_dtype(fmt)
    k_block = dtype["k_blocks"].base.itemsize
    fields = (dtype.itemsize - k_blocks(fmt) * k_block) * m16_tiles // WARPS
    number = TOKEN_BYTES[source] // (K_BLOCK + PADDING)
    x = max(tokens, MMA_N) * (TOKEN_BYTES[source] + (stage_k_blocks - 1) * K_BLOCK * number)
    if kernel == SLICES or (kernel == A8 and source != Q8_1):
        x = 0
    elif kernel != A8 and tokens == 1:
        x = K_BLOCK * stage_k_blocks * number
    decoded = SCALE_BYTES * columns(fmt) // fmt.group * 16 * m16_tiles if scales_once(fmt) and kernel != SLICES else 0
    spanned = stages if stage_k_blocks == k_blocks(fmt) else in_flight(fmt, stages)
    return stages * (stage_k_blocks * k_block * m16_tiles // WARPS + x) + spanned * fields + decoded


def one_warp_bytes(fmt: Format, config: DecodeConfig, kernel: str, tokens: int) -> int:
    """Shared memory of a CTA of one warp with the shortest pipeline, for the largest type of x."""
    return kernel_table_bytes(fmt, kernel) + max(
        pipeline_bytes(fmt, config.m16_tiles, tokens, 2, kernel, source)
        + quantized_bytes(kernel, source, tokens)
        + sliced_bytes(config.columns)
        for source in TOKEN_BYTES
    )


def kernel_table_bytes(fmt: Format, kernel: str) -> int:
    """Shared memory of a decode kernel for a format's table; twin of POINTS_BYTES in kernels/codes/grid.cuh."""
    return min(table_bytes(fmt), POINTS_BYTES) if kernel == SLICES else table_bytes(fmt)


def sliced_bytes(columns: int) -> int:
    """Shared memory of a CTA for this number of columns of x: four slices, sums over steps of 16 columns, and units."""
    return columns * 4 + columns // 16 * 4 + columns // SLICE_BLOCK * 4


def quantized_bytes(kernel: str, source: str, tokens: int) -> int:
    """Shared memory of a CTA for the largest x that it quantizes itself; all tokens of a tile are read.

    It does not depend on the size of x: the limit of a function holds for all of its launches.
    """
    if kernel != A8 or source == Q8_1:
        return 0
    return (INSIDE // K_BLOCK + tokens) * TOKEN_BYTES[Q8_1]


def in_flight(fmt: Format, stages: int) -> int:
    """Tiles that `stages` consecutive k_blocks may belong to."""
    return 1 + -(-(stages - 1) // k_blocks(fmt))


def shared_limit(sm: int) -> int:
    """Bytes of shared memory that the pipelines of a CTA can have on this GPU."""
    return (SHARED[max(least for least in SHARED if least <= sm)] << 10) - BARRIERS


def decode_template(
    fmt: Format, config: DecodeConfig, tokens: int, kernel: str, source: str, sm: int, gated: bool = False
) -> Template:
    """The template of a decode kernel: pipelines of two stages up to max_stages, as many as fit, and fewer warps if two
    do not fit."""
    limit, warp_split_k, stages = shared_limit(sm), config.warp_split_k, 2
    inbox = 4 * tokens * 16 * config.m16_tiles if config.cluster_split_k > 1 else 0
    in_stage = stage_k_blocks(fmt, config) if kernel == A16 else 1
    if kernel == SLICES and fmt.code_bits == 1:  # k_blocks so small that a wait for each would cost more
        in_stage = k_blocks(fmt)

    def warp_bytes(stages: int) -> int:
        return pipeline_bytes(fmt, config.m16_tiles, tokens, stages, kernel, source, in_stage)

    def size(stages: int) -> int:
        return (
            kernel_table_bytes(fmt, kernel)
            + inbox
            + warp_split_k * warp_bytes(stages)
            + quantized_bytes(kernel, source, tokens)
            + sliced_bytes(config.columns)
        )

    while size(stages) > limit:
        warp_split_k -= 1
    while stages < config.max_stages and size(stages + 1) <= min(config.shared, limit):
        stages += 1
    constants: Template = {
        **POLICIES[kernel],
        "In": source,
        "TOKENS": tokens,
        "M16_TILES": config.m16_tiles // 2 if gated else min(config.m16_tiles, WARPS),
        "ROW_BLOCKS": 2 if gated else max(1, config.m16_tiles // WARPS),
        "GATED": int(gated),
        "SUMMED": int(kernel == SUMMED_SLOTS),
        "WARP_SPLIT_K": warp_split_k,
        "CLUSTER_SPLIT_K": config.cluster_split_k,
        "STAGES": stages,
        "STAGE_K_BLOCKS": in_stage,
        "PREFETCH": config.prefetch,
        "BULK": int(sm >= BULK_COPIES),
        "CTAS": max(1, config.ctas) if kernel in (SLOTS, SUMMED_SLOTS, TILES) else 1,
        "WARP_BYTES": warp_bytes(stages),
        "INBOX_BYTES": inbox,
        "REDUCE_BYTES": 4 * warp_split_k * tokens * (16 * config.m16_tiles + REDUCE_PADDING),
    }
    if kernel == SLICES:
        constants |= {"SLICED": config.columns, "SLICES_BYTES": sliced_bytes(config.columns)}
        constants["POINTS_BYTES"] = kernel_table_bytes(fmt, kernel)
    return constants
