"""Sm90Config: how prefill_sm90 divides y into tiles, K among warpgroups, and shared memory into stages."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.twins import TYPE_CODES
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout.row_scale import range_of
from qgemm.cuda.layout.tile import K_BLOCK, ROWS, k_blocks, table_bytes, tile_dtype
from qgemm.cuda.problem import C_TYPES, SCALED_ROWS

SHARED = 227 << 10  # largest shared memory of a CTA of sm_90, in bytes
SUM = 4  # bytes of an accumulator
EPI_TOKEN = SUM * (ROWS + 4)  # bytes of a token in an epilogue tile of a row_block
X_BATCH_NUMBER = 16  # bytes of XScales::batch of kernels/gemm/sm90/eight_bits.cuh, aligned
WORK_QUEUE = 128  # bytes of WorkQueue of kernels/gemm/sm90/work_queue.cuh
FLAG = 4  # bytes of a ready flag
BARRIER = 8  # bytes of an mbarrier
MAX_STAGES = 12  # stages of a pipeline at most
MAX_PARTIALS = 4096  # flags of the stream-K workspace: epilogue tiles of all row_blocks of all CTAs, on any GPU
# Configs of at least TALL row_blocks serve only problems with one token tile and at least TALL_SHARE tiles of y per SM:
# for other problems, configs with fewer row_blocks are faster.
TALL, TALL_SHARE = 4, 0.8
ARRIVALS = 1  # lanes of a warp that arrive to release a stage, see kernels/gemm/sm90/config.cuh


class Sm90Config(NamedTuple):
    """The work tile of a CTA, `row_blocks` * 64 rows of W by `tokens` rows of x, and its pipeline.

    wg_split_k: warpgroups that share K, for each row_block of the tile. k_blocks_per_stage: of a stage of the pipeline.
    single_tile: at most one work tile per CTA, so that reduction and epilogue alias the pipeline's shared memory; it
    requires as many SMs as tiles. max_stages: limit on the stages, which otherwise fill shared memory. x_scale: the
    number of columns that share a scale if x has eight bits, 0 if it has 16. static: bytes of static shared memory of a
    CTA, with padding.
    """

    tokens: int
    row_blocks: int
    wg_split_k: int
    k_blocks_per_stage: int
    single_tile: bool = False
    max_stages: int = MAX_STAGES
    x_scale: int = 0
    static: int = 0

    def __str__(self) -> str:
        """E.g. "64x2x1 stage 4 single tile": tokens, row_blocks, wg_split_k, k_blocks per stage."""
        tile = f"{self.tokens}x{self.row_blocks}x{self.wg_split_k} stage {self.k_blocks_per_stage}"
        return tile + " single tile" * self.single_tile

    def tiles(self, m: int, row_blocks: int) -> int:
        """Work tiles of y [M, row_blocks * 64]."""
        return -(-row_blocks // self.row_blocks) * -(-m // self.tokens)

    def serves(self, m: int, row_blocks: int, sms: int) -> bool:
        """Whether the config may compute y [M, row_blocks * 64]: see `single_tile` and TALL."""
        tiles = self.tiles(m, row_blocks)
        if self.row_blocks >= TALL and (m > self.tokens or tiles < TALL_SHARE * sms):
            return False
        return not self.single_tile or tiles <= sms

    @property
    def threads(self) -> int:
        """Threads of a CTA: its consumer warpgroups and the producer's."""
        return 128 * (self.row_blocks * self.wg_split_k + 1)

    @property
    def epi_tokens(self) -> int:
        """Tokens of an epilogue tile, which is reduced and stored as a whole; few if warpgroups share the tiles."""
        if self.tokens % 16:
            return self.tokens  # one epilogue tile
        return 16 if self.single_tile or self.tokens % 32 else 32

    def unit(self, fmt: Format) -> int:
        """Columns of a work unit, at whose multiples the kernel may split K: a stage, or a tile of W if longer."""
        return max(self.k_blocks_per_stage, k_blocks(fmt)) * K_BLOCK

    def fits(self, fmt: Format) -> bool:
        """Whether the config is valid for a format.

        (1) A stage holds whole tiles of W, or a tile whole stages. (2) There are more stages than warpgroups along K,
        since each warpgroup holds one stage back. (3) With single_tile, the reduction fits in the pipeline's memory.
        """
        along, stages = k_blocks(fmt), stages_of(fmt, self)
        whole = self.k_blocks_per_stage % along == 0 or along % self.k_blocks_per_stage == 0
        return whole and stages > self.wg_split_k and single_tile_bytes(self) <= stages * x_bytes(self)


def shared_of(config: Sm90Config) -> int:
    """Dynamic shared memory that a CTA may have."""
    return SHARED - config.static


def x_bytes(config: Sm90Config) -> int:
    """Shared memory of a stage of x."""
    return config.k_blocks_per_stage * config.tokens * K_BLOCK * (1 if config.x_scale else 2)


def x_scales_bytes(config: Sm90Config) -> int:
    """Shared memory of the scales of x in a stage."""
    return config.k_blocks_per_stage * K_BLOCK // config.x_scale * config.tokens * SUM if config.x_scale else 0


def x_batch_bytes(config: Sm90Config) -> int:
    """Shared memory of the batch number, which consumer warps that quantize x read."""
    return X_BATCH_NUMBER if config.x_scale else 0


def partial_bytes(config: Sm90Config) -> int:
    """Bytes of Partial (kernels/gemm/sm90/smem.cuh): partial sums of one epilogue tile of a row_block."""
    return max(config.wg_split_k - 1, 1) * config.epi_tokens * ROWS * SUM


def inbox_bytes(config: Sm90Config) -> int:
    """Bytes of PeerInbox: partial sums from the peer CTA, half of a row_block's epilogue tiles."""
    return -(-config.tokens // config.epi_tokens // 2) * config.epi_tokens * ROWS * SUM


def single_tile_bytes(config: Sm90Config) -> int:
    """Bytes of the buffers of reduction and epilogue that alias all stages of x; 0 without single_tile."""
    if not config.single_tile:
        return 0
    partials = config.tokens // config.epi_tokens * partial_bytes(config)
    epilogue = config.wg_split_k * config.epi_tokens * EPI_TOKEN
    return config.row_blocks * (partials + epilogue + inbox_bytes(config))


def stages_of(fmt: Format, config: Sm90Config) -> int:
    """Stages of the pipeline: the largest number that fits, at most `max_stages`."""
    return next((n for n in range(config.max_stages, 0, -1) if smem_bytes(fmt, config, n) <= shared_of(config)), 0)


def smem_bytes(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Dynamic shared memory: the table of levels, then Smem of kernels/gemm/sm90/smem.cuh, to the byte."""
    x, row_blocks = stages * x_bytes(config), config.row_blocks
    if config.single_tile:
        x = max(x, single_tile_bytes(config))
    else:
        x = max(x, row_blocks * inbox_bytes(config))
        x += row_blocks * max(partial_bytes(config), config.epi_tokens * EPI_TOKEN)
    full = config.wg_split_k // gcd(stages, config.wg_split_k) * stages
    barriers = full + stages + row_blocks * config.wg_split_k
    x += stages * x_scales_bytes(config) + x_batch_bytes(config)
    return table_bytes(fmt) + aligned(x + row_blocks * pipeline_bytes(fmt, config, stages) + barriers * BARRIER)


def pipeline_bytes(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Bytes of SmemPipeline: W of a row_block in `stages` stages."""
    along, tile = k_blocks(fmt), tile_dtype(fmt)
    if config.k_blocks_per_stage % along == 0:
        return stages * config.k_blocks_per_stage // along * tile.itemsize
    codes = tile["k_blocks"].base.itemsize
    fields = tile.itemsize - along * codes
    count = field_stages(fmt, config, stages)
    return aligned(stages * config.k_blocks_per_stage * codes + count * (fields + BARRIER))


def aligned(count: int) -> int:
    """Bytes of a struct that holds 16-byte values."""
    return -(-count // 16) * 16


def field_stages(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Field stages of a row_block beside a pipeline of `stages` stages; none if a stage holds whole tiles.

    They hold the fields of every tile that the pipeline may have stages of. Their number makes each field stage serve
    the same warpgroups along K every time.
    """
    stages_per_tile = k_blocks(fmt) // config.k_blocks_per_stage
    if stages_per_tile < 2:
        return 0
    together = config.wg_split_k // gcd(stages_per_tile, config.wg_split_k)
    tiles_in_pipeline = 1 + -(-(stages - 1) // stages_per_tile)
    return -(-tiles_in_pipeline // together) * together


def prefill_template(fmt: Format, config: Sm90Config, source: str) -> Template:
    """The constants of prefill_sm90 for x of type `source` and one dense product."""
    unit = range_of(fmt)
    return {
        **pipeline_template(fmt, config, source),
        "ROW_SCALE_LEVEL": unit.level,
        "ROW_SCALE_HEADROOM": unit.above,
        "ROW_SCALE_MIN": unit.min_weight,
        "ROW_SCALE_MAX": unit.max_weight,
    }


def pipeline_template(fmt: Format, config: Sm90Config, source: str) -> Template:
    """The constants of all kernels with the pipeline of prefill_sm90."""
    stages = stages_of(fmt, config)
    return {
        "In": "half" if source == SCALED_ROWS else source,
        "GROUPED": 0,
        "BLOCK_TOKENS": config.tokens,
        "ROW_BLOCKS": config.row_blocks,
        "WG_SPLIT_K": config.wg_split_k,
        "K_BLOCKS_PER_STAGE": config.k_blocks_per_stage,
        "STAGES": stages,
        "FIELD_STAGES": field_stages(fmt, config, stages),
        "SINGLE_TILE": int(config.single_tile),
        "EPI_TOKENS": config.epi_tokens,
        "SMEM_BYTES": smem_bytes(fmt, config, stages),
        "MAX_PARTIALS": MAX_PARTIALS,
        "ARRIVALS": ARRIVALS,
    }


def type_code(x: str) -> int:
    """The TYPE_CODES of x that a kernel quantizes itself, by the kernels' name of its type; 0 of x in eight bits."""
    return next((TYPE_CODES[name] for name, kind in C_TYPES.items() if kind == x), 0)


def x_workspace_bytes(m: int, k: int) -> int:
    """The workspace of a kernel that quantizes x itself: WorkQueue, codes, scales. Workspaces are kept: few sizes."""
    return 1 << (WORK_QUEUE + group_activations.nbytes(m, k, GROUP) - 1).bit_length()
