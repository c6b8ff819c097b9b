"""Token tiles of prefill_sm90 over rows that are sorted by expert: configs, their cost, the choice of a tile."""

from __future__ import annotations

from functools import lru_cache
from math import hypot
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import TUNED_SMS

from .expert_tiles import Size, best_tile, expected_tiles, read_us
from .sm90_config import Sm90Config, stages_of

STATIC = 1024  # bytes of shared memory of the schedule, aligned as the pipeline is
# The configs of each token tile, of which the first with MIN_STAGES serves a format. With few tokens, registers suffice
# for four row_blocks a CTA, which share rows of x and the cost of starting and ending a tile.
CONFIGS = tuple(
    Sm90Config(tokens, row_blocks, 1, k_blocks, static=STATIC)
    for tokens, row_blocks, k_blocks in (
        (16, 4, 4), (16, 4, 2), (24, 4, 4), (24, 4, 2), (32, 4, 4), (32, 4, 2), (48, 4, 4), (48, 4, 2), (64, 4, 2),
        (80, 4, 2), (96, 4, 2), (96, 4, 1), (128, 2, 2), (160, 2, 2), (160, 2, 1), (256, 2, 1),
    )
)  # fmt: skip
MIN_STAGES = 3  # one is multiplied, the previous one is released, the next one loads
GROUPED_TOKENS = tuple(dict.fromkeys(config.tokens for config in CONFIGS))


class Cost(NamedTuple):
    """us of an SM per k_block of a tile and per tile: pairs of a constant part and a part for each token."""

    k_block: tuple[float, float]
    tile: tuple[float, float]


# The cost model by the row_blocks of a CTA. Fitted to 54 products on an H200 (132 SMs); its error is 5%.
COSTS = {2: Cost((0.0674, 0.0022), (1.63, 0.0101)), 4: Cost((0.166, 0.0039), (1.46, 0.0153))}


def config_of(fmt: Format, tokens: int) -> Sm90Config | None:
    """The config of a token tile for a format; None if none fits."""
    fitting = (config for config in CONFIGS if config.tokens == tokens and config.fits(fmt))
    return next((config for config in fitting if stages_of(fmt, config) >= MIN_STAGES), None)


@lru_cache(maxsize=4096)
def token_tile(sizes: tuple[Size, ...], slots: int, experts: int, sms: int = TUNED_SMS) -> int:
    """Rows of a token tile for products of `slots` rows by experts; 0 if moe_decode is faster."""
    fitting = [tokens for tokens in GROUPED_TOKENS if all(config_of(size.format, tokens) for size in sizes)]
    times = {tokens: sum(grouped_us(size, tokens, slots, experts, sms) for size in sizes) for tokens in fitting}
    return best_tile(times, sizes, slots, experts)


def grouped_us(size: Size, tokens: int, slots: int, experts: int, sms: int = TUNED_SMS) -> float:
    """Predicted us of a product of sorted rows, if slots choose experts at random."""
    read_experts, count = expected_tiles(slots, experts, tokens)
    config = config_of(size.format, tokens)
    assert config is not None
    cost, k_blocks = COSTS[config.row_blocks], -(-size.k // tiles.K_BLOCK)
    row_tiles = -(-size.n // (tiles.ROWS * config.row_blocks))
    tile_us = k_blocks * _linear(cost.k_block, tokens) + _linear(cost.tile, tokens)
    return hypot(max(1.0, count * row_tiles / sms) * tile_us, read_us(size, read_experts))


def rows_of_x(rows: int, tokens: int) -> int:
    """Rows of a buffer of sorted x: a box of the tensor map may begin at the last row."""
    return rows + tokens


def _linear(us: tuple[float, float], tokens: int) -> float:
    return us[0] + us[1] * tokens
