"""How the prefill kernel cuts y and K: rows and tokens to tiles, K to warpgroups, memory to stages."""

from __future__ import annotations

from math import gcd, inf
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout.row_scale import range_of
from qgemm.cuda.layout.tile import K_BLOCK, ROWS, k_blocks, table_bytes, tile_dtype

SHARED = 227 << 10  # bytes of shared memory that a CTA of sm_90 may have
PARTIAL = 4  # bytes of a sum
EPI_BYTES = PARTIAL * (ROWS + 4)  # bytes of a token of a row_block before it is stored
BARRIERS = 1 << 10  # bytes of them, and of alignment
MOST_IDLE = 3000  # columns; work that is shared out evenly, its sums through global memory, takes as much longer
MAX_STAGES = 12  # stages of a pipeline at most
MAX_PARTIALS = 4096  # that CTAs hand over: chunks of each row_block of each CTA, of a GPU with many multiprocessors
ARRIVALS = 1  # of a warp that has read a stage; see the kernel


class Sm90Config(NamedTuple):
    """A CTA has a tile of `row_blocks` * 64 rows of W and `tokens` rows of x.

    m, least, share: it is for up to so many rows of x, at least so many row_blocks of 64 rows of W, and at least so
    many columns of a row_block for each multiprocessor.
    wg_split_k: warpgroups that share K, for each row_block of the tile. k_blocks_per_stage: k_blocks of 64 columns in a
    stage of its pipeline;
    max_stages: the most stages, of which as many are taken as fit.
    single_tile: it is for no more tiles than multiprocessors, so that a CTA has one tile, or one piece of one, whose
    sums meet
    where its stages have been: there is memory for more of them, and its warpgroups store a part of the tile each.
    needs, k_blocks, codebook: it is for formats of which so many stages fit (also more than `max_stages`), whose tiles
    have at least so many k_blocks, and only for those that look levels up in a table.
    """

    m: int
    least: int
    share: int
    tokens: int
    row_blocks: int
    wg_split_k: int
    k_blocks_per_stage: int
    single_tile: bool = False
    needs: int = 1
    k_blocks: int = 1
    codebook: bool = False
    max_stages: int = MAX_STAGES

    def tiles(self, m: int, row_blocks: int) -> int:
        """Of y, for M rows of x and so many row_blocks of 64 rows of W."""
        return -(-row_blocks // self.row_blocks) * -(-m // self.tokens)

    def idle(self, m: int, row_blocks: int, k: int, sms: int) -> float:
        """Columns that a multiprocessor is idle for on average if each tile is cut into as many pieces as get a CTA."""
        tiles = self.tiles(m, row_blocks)
        split_k = sms // tiles
        return k / split_k - k * tiles / sms if split_k else inf

    @property
    def threads(self) -> int:
        """Of a CTA: its warpgroups, and the producers'."""
        return 128 * (self.row_blocks * self.wg_split_k + 1)

    @property
    def epi_tile(self) -> int:
        """Tokens that are added up and stored at a time; small ones where warpgroups share them."""
        return 16 if self.single_tile or self.tokens % 32 else 32

    @property
    def plain(self) -> Sm90Config:
        """The same without what chooses among the rows of SM90_CONFIGS."""
        return self._replace(m=0, least=0, share=0, needs=1, k_blocks=1, codebook=False)

    def serves(self, fmt: Format) -> bool:
        """Whether it is for this format."""
        looked_up = fmt.needs_table or not self.codebook
        return looked_up and k_blocks(fmt) >= self.k_blocks and memory_bytes(fmt, self, self.needs) <= SHARED

    def hides(self, other: Sm90Config) -> bool:
        """Whether nothing is left for a later row, of formats that this one serves."""
        wider = self.m >= other.m and self.least <= other.least and self.share <= other.share
        return wider and self.tokens >= other.tokens and not self.single_tile

    def unit(self, fmt: Format) -> int:
        """Columns at whose multiples the kernel may cut K: those of a stage, or of a tile if that is more."""
        return max(self.k_blocks_per_stage, k_blocks(fmt)) * K_BLOCK


# Measured on an H200, with tools/tune_sm90.py. Two row_blocks share x, of which an SM gets 60 bytes a cycle at most;
# warpgroups that share K hide each other's decoding, three of them mostly, four where levels are looked up. Few
# row_blocks leave few tiles, of which smaller ones share the work better; but where a multiprocessor has much of it a
# tile may be cut along K, long stages cost less, and super-blocks want whole tiles in a stage. Token tiles lie so close
# that one more row of x costs little. Where few stages fit, of which each warpgroup keeps one, fewer warpgroups are
# faster.
SM90_CONFIGS = (
    #      m <=   row_blocks >=  share tokens row_blocks  wg_split_k  stage
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     needs=7, single_tile=True, k_blocks=4),
    Sm90Config(16,   200,       0,    16,    2,      1,      4,     single_tile=True, k_blocks=4),
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     needs=8, single_tile=True),
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     needs=7, single_tile=True, codebook=True),
    Sm90Config(16,   200,       0,    16,    2,      2,      2,     single_tile=True),
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     k_blocks=4),
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     needs=8),
    Sm90Config(16,   200,       0,    16,    2,      2,      4,     needs=7, codebook=True),
    Sm90Config(16,   200,       0,    16,    2,      2,      2),
    Sm90Config(16,   133,       0,    16,    2,      2,      4,     needs=8, single_tile=True),
    Sm90Config(16,   0,         2500, 16,    1,      4,      4,     needs=11, single_tile=True, codebook=True),
    Sm90Config(16,   0,         2500, 16,    1,      3,      4,     needs=9, single_tile=True),
    Sm90Config(16,   0,         2500, 16,    1,      4,      4,     needs=11, codebook=True),
    Sm90Config(16,   0,         2500, 16,    1,      4,      4,     needs=11, k_blocks=4),
    Sm90Config(16,   0,         2500, 16,    1,      3,      4,     needs=9),
    Sm90Config(16,   0,         0,    16,    1,      3,      4,     needs=12, single_tile=True, k_blocks=4),
    Sm90Config(16,   0,         0,    16,    1,      4,      2,     single_tile=True, codebook=True),
    Sm90Config(16,   0,         0,    16,    1,      3,      2,     single_tile=True),
    Sm90Config(16,   0,         0,    16,    1,      4,      4,     needs=12, k_blocks=4),
    Sm90Config(16,   0,         0,    16,    1,      4,      2),
    Sm90Config(32,   400,       0,    32,    3,      1,      4,     needs=3),
    Sm90Config(32,   200,       0,    32,    2,      2,      4,     needs=6),
    Sm90Config(32,   200,       0,    32,    2,      2,      4,     needs=5, k_blocks=4),
    Sm90Config(32,   200,       0,    32,    2,      1,      4,     single_tile=True, k_blocks=4),
    Sm90Config(32,   200,       0,    32,    2,      1,      4,     k_blocks=4),
    Sm90Config(32,   200,       0,    32,    2,      2,      4,     single_tile=True, codebook=True),
    Sm90Config(32,   200,       0,    32,    2,      2,      2,     codebook=True),
    Sm90Config(32,   200,       0,    32,    2,      2,      2,     needs=9),
    Sm90Config(32,   200,       0,    32,    2,      1,      2,     single_tile=True),
    Sm90Config(32,   200,       0,    32,    2,      1,      2),
    Sm90Config(32,   133,       0,    32,    3,      1,      4,     needs=3, single_tile=True),
    Sm90Config(32,   0,         2500, 32,    1,      3,      4,     single_tile=True, codebook=True),
    Sm90Config(32,   0,         2500, 32,    1,      2,      4,     single_tile=True, k_blocks=4),
    Sm90Config(32,   0,         2500, 32,    1,      3,      4,     needs=8, single_tile=True),
    Sm90Config(32,   0,         2500, 32,    1,      2,      4,     k_blocks=4),
    Sm90Config(32,   0,         2500, 32,    1,      3,      4,     needs=8),
    Sm90Config(32,   0,         0,    32,    1,      2,      4,     needs=9, single_tile=True, k_blocks=4),
    Sm90Config(32,   0,         0,    32,    1,      3,      2,     single_tile=True),
    Sm90Config(32,   0,         0,    32,    1,      2,      2),
    Sm90Config(48,   400,       0,    48,    3,      1,      4,     needs=3),
    Sm90Config(48,   200,       0,    48,    2,      1,      4,     k_blocks=4),
    Sm90Config(48,   200,       0,    48,    2,      2,      2,     single_tile=True),
    Sm90Config(48,   200,       0,    48,    2,      2,      2),
    Sm90Config(48,   0,         2500, 48,    1,      2,      4,     needs=6, single_tile=True),
    Sm90Config(48,   0,         2500, 48,    1,      2,      4,     needs=6),
    Sm90Config(48,   100,       5000, 48,    2,      1,      4,     needs=4),
    Sm90Config(48,   0,         0,    48,    1,      3,      2,     single_tile=True),
    Sm90Config(48,   0,         0,    48,    1,      2,      4),
    Sm90Config(64,   400,       0,    64,    3,      1,      4,     needs=3),
    Sm90Config(64,   200,       0,    64,    2,      1,      4,     single_tile=True, k_blocks=4),
    Sm90Config(64,   200,       0,    64,    2,      1,      4,     k_blocks=4),
    Sm90Config(64,   400,       0,    64,    3,      1,      2),
    Sm90Config(64,   200,       0,    64,    2,      2,      2,     codebook=True),
    Sm90Config(64,   200,       0,    64,    2,      1,      2,     single_tile=True),
    Sm90Config(64,   200,       0,    64,    2,      2,      2,     needs=8),
    Sm90Config(64,   200,       0,    64,    2,      1,      2),
    Sm90Config(64,   133,       0,    64,    3,      1,      4,     needs=3, single_tile=True),
    Sm90Config(64,   133,       0,    64,    1,      2,      2,     codebook=True),
    Sm90Config(64,   65,        5000, 64,    2,      2,      2,     single_tile=True, codebook=True),
    Sm90Config(64,   0,         0,    64,    1,      3,      2,     single_tile=True, codebook=True),
    Sm90Config(64,   0,         2500, 64,    1,      2,      4,     needs=5, single_tile=True),
    Sm90Config(64,   0,         0,    64,    1,      2,      2,     single_tile=True),
    Sm90Config(64,   65,        5000, 64,    2,      1,      4,     single_tile=True, k_blocks=4),
    Sm90Config(64,   65,        5000, 64,    2,      2,      2,     needs=8, single_tile=True),
    Sm90Config(64,   65,        5000, 64,    2,      1,      2,     single_tile=True),
    Sm90Config(64,   0,         0,    64,    1,      2,      2),
    Sm90Config(80,   400,       0,    80,    3,      1,      4,     needs=3),
    Sm90Config(80,   200,       0,    80,    2,      1,      4,     needs=3, k_blocks=4),
    Sm90Config(80,   100,       5000, 80,    2,      1,      4,     needs=3, k_blocks=4),
    Sm90Config(80,   400,       0,    80,    3,      1,      2),
    Sm90Config(80,   200,       0,    80,    2,      1,      2),
    Sm90Config(80,   100,       5000, 80,    2,      1,      2),
    Sm90Config(80,   0,         0,    80,    1,      2,      2,     single_tile=True),
    Sm90Config(80,   0,         0,    80,    1,      2,      2),
    Sm90Config(96,   400,       0,    96,    3,      1,      2),
    Sm90Config(96,   200,       0,    96,    2,      1,      4,     needs=3, k_blocks=4),
    Sm90Config(96,   33,        5000, 96,    2,      1,      4,     needs=3, k_blocks=4),
    Sm90Config(96,   200,       0,    96,    2,      1,      2),
    Sm90Config(96,   100,       5000, 96,    2,      1,      2),
    Sm90Config(96,   33,        5000, 96,    2,      1,      2,     k_blocks=4),
    Sm90Config(96,   0,         0,    96,    1,      2,      2,     single_tile=True),
    Sm90Config(96,   0,         0,    96,    1,      2,      2),
    Sm90Config(112,  200,       0,    112,   2,      1,      2),
    Sm90Config(112,  0,         0,    112,   1,      2,      2),
    Sm90Config(128,  400,       0,    128,   3,      1,      2),
    Sm90Config(128,  33,        0,    128,   1,      2,      2,     needs=6, single_tile=True, codebook=True),
    Sm90Config(128,  33,        5000, 128,   1,      2,      2,     needs=6, single_tile=True),
    Sm90Config(128,  33,        5000, 128,   2,      1,      2),
    Sm90Config(128,  100,       0,    128,   1,      2,      2,     needs=6, single_tile=True),
    Sm90Config(128,  65,        0,    128,   2,      1,      2),
    Sm90Config(128,  33,        0,    128,   1,      2,      2,     needs=6, single_tile=True),
    Sm90Config(128,  33,        0,    128,   1,      2,      2,     needs=5, single_tile=True, k_blocks=4),
    Sm90Config(128,  33,        0,    128,   1,      2,      2,     needs=5, single_tile=True, codebook=True),
    Sm90Config(128,  33,        3500, 128,   2,      1,      2),
    Sm90Config(128,  0,         0,    64,    1,      3,      2,     single_tile=True, codebook=True),
    Sm90Config(128,  0,         0,    64,    1,      2,      2,     single_tile=True),
    Sm90Config(128,  0,         0,    64,    1,      2,      2),
    Sm90Config(144,  65,        0,    144,   2,      1,      2),
    Sm90Config(160,  65,        0,    160,   2,      1,      2),
    Sm90Config(192,  65,        0,    192,   2,      1,      1),
    Sm90Config(224,  65,        0,    224,   2,      1,      1),
    Sm90Config(256,  133,       0,    256,   2,      1,      1),
    Sm90Config(256,  65,        0,    256,   2,      1,      1,     codebook=True),
    Sm90Config(256,  65,        0,    128,   2,      1,      2,     needs=5),
    Sm90Config(256,  65,        5000, 256,   2,      1,      1),
    Sm90Config(256,  97,        0,    256,   2,      1,      1),
    Sm90Config(144,  33,        3500, 144,   2,      1,      2),
    Sm90Config(160,  33,        3500, 160,   2,      1,      2),
    Sm90Config(192,  33,        5000, 192,   2,      1,      1),
    Sm90Config(160,  0,         0,    80,    1,      2,      2),
    Sm90Config(192,  0,         0,    96,    1,      2,      2,     needs=6, single_tile=True),
    Sm90Config(192,  0,         0,    96,    1,      2,      2),
    Sm90Config(224,  0,         0,    112,   1,      2,      2),
    Sm90Config(224,  33,        5000, 224,   2,      1,      1),
    Sm90Config(256,  33,        5000, 256,   2,      1,      1,     codebook=True),
    Sm90Config(256,  33,        5000, 128,   2,      1,      2,     single_tile=True),
    Sm90Config(256,  33,        5000, 128,   2,      1,      2),
    Sm90Config(256,  33,        5000, 256,   2,      1,      1),
    Sm90Config(256,  0,         0,    128,   1,      2,      2,     needs=5, single_tile=True),
    Sm90Config(256,  0,         0,    128,   2,      1,      2),
    Sm90Config(144,  0,         0,    144,   2,      1,      2),
    Sm90Config(160,  0,         0,    160,   2,      1,      2),
    Sm90Config(384,  33,        0,    192,   1,      2,      1,     single_tile=True),
    Sm90Config(192,  0,         0,    192,   2,      1,      1),
    Sm90Config(448,  33,        0,    224,   1,      2,      1,     single_tile=True, k_blocks=4),
    Sm90Config(448,  33,        0,    224,   1,      2,      1,     single_tile=True, codebook=True),
    Sm90Config(448,  0,         0,    112,   2,      1,      2),
    Sm90Config(512,  0,         0,    128,   2,      1,      2),
    Sm90Config(224,  0,         0,    224,   2,      1,      1),
    Sm90Config(256,  0,         0,    256,   2,      1,      1),
)  # fmt: skip
TOKENS = tuple(sorted({config.tokens for config in SM90_CONFIGS}))


def sm90_config_for(fmt: Format, m: int, row_blocks: int, k: int, sms: int) -> Sm90Config:
    """The first row of SM90_CONFIGS for M rows of x, so many row_blocks of 64 rows of W, K columns and multiprocessors.

    M beyond the largest token tile is shared out evenly over as few tiles as possible.
    """
    part = -(-m // -(-m // TOKENS[-1]))
    share = row_blocks * k // sms
    fitting = (row for row in SM90_CONFIGS if part <= row.m and row_blocks >= row.least and share >= row.share)
    for row in fitting:
        whole = m <= row.m or part <= row.tokens
        if whole and not (row.single_tile and row.idle(m, row_blocks, k, sms) > MOST_IDLE) and row.serves(fmt):
            return row
    raise AssertionError("the last row is for everything")


def compiled(fmt: Format) -> list[Sm90Config]:
    """The configs that products of a format may get, plain."""
    rows: list[Sm90Config] = []
    for row in SM90_CONFIGS:
        if row.serves(fmt) and not any(before.hides(row) for before in rows):
            rows.append(row)
    return list(dict.fromkeys(row.plain for row in rows))


def memory_bytes(fmt: Format, config: Sm90Config, stages: int) -> int:
    """Shared memory of a CTA with so many stages, as `Smem` in kernels/sm90/smem.cuh lays it out."""
    along, dtype = k_blocks(fmt), tile_dtype(fmt)
    codes = dtype["k_blocks"].base.itemsize
    fields = dtype.itemsize - along * codes
    weights = config.k_blocks_per_stage * codes + config.k_blocks_per_stage // along * fields
    x = config.k_blocks_per_stage * config.tokens * K_BLOCK * 2
    reduce_smem = (
        0 if config.single_tile else config.epi_tile * max((config.wg_split_k - 1) * ROWS * PARTIAL, EPI_BYTES)
    )
    return (
        table_bytes(fmt)
        + stages * (x + config.row_blocks * weights)
        + config.row_blocks * (field_stages(fmt, config, stages) * fields + reduce_smem)
        + BARRIERS
    )


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
    stages = next(stages for stages in range(config.max_stages, 0, -1) if memory_bytes(fmt, config, stages) <= SHARED)
    unit = range_of(fmt, source)
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
        "SHARED": memory_bytes(fmt, config, stages),
        "MAX_PARTIALS": MAX_PARTIALS,
        "ROW_SCALE_LEVEL": unit.level,
        "ROW_SCALE_HEADROOM": unit.above,
        "ROW_SCALE_MIN": unit.least,
        "ROW_SCALE_MAX": unit.most,
        "ARRIVALS": ARRIVALS,
    }
