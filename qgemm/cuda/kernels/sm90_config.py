"""Sm90Config: how prefill_sm90 cuts y and K: rows and tokens to tiles, K to warpgroups, shared memory to stages."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout.row_scale import range_of
from qgemm.cuda.layout.tile import K_BLOCK, ROWS, k_blocks, table_bytes, tile_dtype

SHARED = 227 << 10  # bytes of shared memory that a CTA of sm_90 may have
SUM = 4  # bytes of an accumulator
EPI_TOKEN = SUM * (ROWS + 4)  # bytes of a token of a row_block before it is stored
X_TURN = 16  # bytes of the turn that consumer warps have, of kernels/gemm/sm90/eight_bits.cuh
BARRIER = 8  # bytes of an mbarrier
MAX_STAGES = 12  # stages of a pipeline at most
MAX_PARTIALS = 4096  # that CTAs hand over: chunks of each row_block of each CTA, of a GPU with many multiprocessors
# row_blocks of a CTA from which on it has all rows of x, and the share of the SMs that must have such a tile at least:
# otherwise fewer row_blocks were faster.
TALL, TALL_SHARE = 4, 0.8
ARRIVALS = 1  # of a warp that has read a stage; see the kernel


class Sm90Config(NamedTuple):
    """A CTA has a work tile of `row_blocks` * 64 rows of W and `tokens` rows of x.

    wg_split_k: warpgroups that share K, for each row_block of the tile. k_blocks_per_stage: of a stage of the pipeline.
    single_tile: at most one work tile per CTA, so reduction and epilogue take the pipeline's shared memory; for no more
    tiles than SMs. max_stages: stages of the pipeline, if so many fit. x_scale: columns of x that share a scale, where
    x comes in eight bits; 0 where it comes in 16. static: bytes of shared memory that a CTA has beside `smem_bytes`,
    with what aligns these.
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
        """Whether it is for y [M, row_blocks * 64]: see `single_tile` and TALL."""
        tiles = self.tiles(m, row_blocks)
        if self.row_blocks >= TALL and (m > self.tokens or tiles < TALL_SHARE * sms):
            return False
        return not self.single_tile or tiles <= sms

    @property
    def threads(self) -> int:
        """Threads of a CTA: its consumer warpgroups and the producer's."""
        return 128 * (self.row_blocks * self.wg_split_k + 1)

    @property
    def epi_tile(self) -> int:
        """Tokens that are added up and stored at a time; small ones where warpgroups share them."""
        if self.tokens % 16:
            return self.tokens  # of one epilogue tile
        return 16 if self.single_tile or self.tokens % 32 else 32

    def unit(self, fmt: Format) -> int:
        """Columns at whose multiples the kernel may cut K: those of a stage, or of a tile of W if that is more."""
        return max(self.k_blocks_per_stage, k_blocks(fmt)) * K_BLOCK

    def fits(self, fmt: Format) -> bool:
        """Whether the kernel takes it: whole tiles of W in a stage or stages in a tile; a stage more than warpgroups
        that keep one each; reduction and epilogue of a single tile in its pipeline's place.
        """
        along, stages = k_blocks(fmt), stages_of(fmt, self)
        whole = self.k_blocks_per_stage % along == 0 or along % self.k_blocks_per_stage == 0
        return whole and stages > self.wg_split_k and single_tile_bytes(self) <= stages * x_bytes(self)


def shared_of(config: Sm90Config) -> int:
    """Shared memory that a CTA may have."""
    return SHARED - config.static


def x_bytes(config: Sm90Config) -> int:
    """Shared memory of a stage of x."""
    return config.k_blocks_per_stage * config.tokens * K_BLOCK * (1 if config.x_scale else 2)


def x_scales_bytes(config: Sm90Config) -> int:
    """And of the scales of x in a stage."""
    return config.k_blocks_per_stage * K_BLOCK // config.x_scale * config.tokens * SUM if config.x_scale else 0


def x_turn_bytes(config: Sm90Config) -> int:
    """And beside the stages, where consumer warps quantize x."""
    return X_TURN if config.x_scale else 0


def partial_bytes(config: Sm90Config) -> int:
    """Bytes of Partial (kernels/gemm/sm90/smem.cuh): the other warpgroups' sums of one epilogue tile of a row_block."""
    return max(config.wg_split_k - 1, 1) * config.epi_tile * ROWS * SUM


def inbox_bytes(config: Sm90Config) -> int:
    """PeerInbox: what the peer CTA sends, sums of half of a row_block's epilogue tiles."""
    return -(-config.tokens // config.epi_tile // 2) * config.epi_tile * ROWS * SUM


def single_tile_bytes(config: Sm90Config) -> int:
    """Shared memory that reduction and epilogue of a single tile take in the place of all stages of x."""
    if not config.single_tile:
        return 0
    partials = config.tokens // config.epi_tile * partial_bytes(config)
    epilogue = config.wg_split_k * config.epi_tile * EPI_TOKEN
    return config.row_blocks * (partials + epilogue + inbox_bytes(config))


def stages_of(fmt: Format, config: Sm90Config) -> int:
    """Stages of the pipeline: as many as fit, at most `max_stages`."""
    return next((n for n in range(config.max_stages, 0, -1) if smem_bytes(fmt, config, n) <= shared_of(config)), 0)


def smem_bytes(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Shared memory of a CTA: the table of levels, and Smem of kernels/gemm/sm90/smem.cuh, to the byte."""
    x, row_blocks = stages * x_bytes(config), config.row_blocks
    if config.single_tile:
        x = max(x, single_tile_bytes(config))
    else:
        x = max(x, row_blocks * inbox_bytes(config))
        x += row_blocks * max(partial_bytes(config), config.epi_tile * EPI_TOKEN)
    full = config.wg_split_k // gcd(stages, config.wg_split_k) * stages
    barriers = full + stages + row_blocks * config.wg_split_k
    x += stages * x_scales_bytes(config) + x_turn_bytes(config)
    return table_bytes(fmt) + aligned(x + row_blocks * pipeline_bytes(fmt, config, stages) + barriers * BARRIER)


def pipeline_bytes(fmt: Format, config: Sm90Config, stages: int) -> int:
    """SmemPipeline: W of a row_block in so many stages."""
    along, tile = k_blocks(fmt), tile_dtype(fmt)
    if config.k_blocks_per_stage % along == 0:
        return stages * config.k_blocks_per_stage // along * tile.itemsize
    codes = tile["k_blocks"].base.itemsize
    fields = tile.itemsize - along * codes
    slots = field_stages(fmt, config, stages)
    return aligned(stages * config.k_blocks_per_stage * codes + slots * (fields + BARRIER))


def aligned(count: int) -> int:
    """Bytes of a struct that holds 16-byte values."""
    return -(-count // 16) * 16


def field_stages(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Tiles of a row_block whose fields lie beside a pipeline of so many stages: none if a stage holds whole tiles.

    As many as the stages may be of, so that the same wg_split_k read all tiles of a slot.
    """
    stages_per_tile = k_blocks(fmt) // config.k_blocks_per_stage  # of a tile
    if stages_per_tile < 2:
        return 0
    together = config.wg_split_k // gcd(stages_per_tile, config.wg_split_k)
    least = 1 + -(-(stages - 1) // stages_per_tile)
    return -(-least // together) * together


def prefill_template(fmt: Format, config: Sm90Config, source: str) -> Template:
    """The template of the prefill kernel for x of type `source`: as many stages as fit."""
    unit = range_of(fmt, source)
    return {
        **pipeline_template(fmt, config, source),
        "ROW_SCALE_LEVEL": unit.level,
        "ROW_SCALE_HEADROOM": unit.above,
        "ROW_SCALE_MIN": unit.min_weight,
        "ROW_SCALE_MAX": unit.max_weight,
    }


def pipeline_template(fmt: Format, config: Sm90Config, source: str) -> Template:
    """What the kernels that share the pipeline of prefill_sm90 have in common."""
    stages = stages_of(fmt, config)
    return {
        "In": source,
        "TOKENS": config.tokens,
        "ROW_BLOCKS": config.row_blocks,
        "WG_SPLIT_K": config.wg_split_k,
        "K_BLOCKS_PER_STAGE": config.k_blocks_per_stage,
        "STAGES": stages,
        "FIELD_STAGES": field_stages(fmt, config, stages),
        "SINGLE_TILE": int(config.single_tile),
        "EPI_TILE": config.epi_tile,
        "SMEM_BYTES": smem_bytes(fmt, config, stages),
        "MAX_PARTIALS": MAX_PARTIALS,
        "ARRIVALS": ARRIVALS,
    }
