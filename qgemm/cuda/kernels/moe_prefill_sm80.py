"""moe_prefill_sm80 on the host: products by experts of many tokens by mma.sync (sm_80 and later, except sm_90).

The kernel is prefill_sm80 over token tiles, each with the weights of its expert. moe_sort lists them on the device, so
the grid has a CTA for each tile that there may be; CTAs without a tile exit at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import Divisor, StreamK
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

from .decode_config import shared_limit
from .expert_tiles import Size, best_tile, expected_tiles, max_token_tiles, read_us
from .grouped_products import POINTERS, forms, gate_template, grouped_products
from .kernel import Kernel, half_rows
from .prefill_sm80 import A16, MIN_STAGES, Sm80Config, shared_bytes, weight_factors
from .prefill_sm80 import template as template_sm80

NAME = "moe_prefill_sm80"
MIN_SM = 80  # compute capability
# The configs of each token tile: those of prefill_sm80 with four row_blocks, half of which belong to a gate. The second
# one serves formats of which three stages of the first do not fit in shared memory. us: measured for the first alone.
CONFIGS = (
    Sm80Config(A16, 16, 4, 2, 2, 0.4), Sm80Config(A16, 16, 2, 2, 2, 0.4),
    Sm80Config(A16, 64, 4, 2, 1, 0.8), Sm80Config(A16, 64, 2, 2, 1, 0.8),
    Sm80Config(A16, 128, 4, 2, 1, 1.38), Sm80Config(A16, 128, 2, 2, 1, 1.38),
)  # fmt: skip
TOKEN_TILES = tuple(dict.fromkeys(config.tokens for config in CONFIGS))


def config_of(fmt: Format, tokens: int, sm: int) -> Sm80Config | None:
    """The config of a token tile for a format; None if none fits into the shared memory of this GPU."""
    candidates = (config for config in CONFIGS if config.tokens == tokens)
    limit = shared_limit(sm)
    return next((config for config in candidates if shared_bytes(fmt, config, MIN_STAGES) <= limit), None)


def token_tile(sizes: tuple[Size, ...], slots: int, experts: int, sms: int, sm: int) -> int:
    """Rows of a token tile for products of `slots` rows by experts; 0 if moe_decode is faster."""
    fitting = [tokens for tokens in TOKEN_TILES if all(config_of(size.format, tokens, sm) for size in sizes)]
    times = {tokens: sum(grouped_us(size, tokens, slots, experts, sms, sm) for size in sizes) for tokens in fitting}
    return best_tile(times, sizes, slots, experts)


def grouped_us(size: Size, tokens: int, slots: int, experts: int, sms: int, sm: int) -> float:
    """Predicted us of a product of sorted rows, if slots choose experts at random."""
    config = config_of(size.format, tokens, sm)
    assert config is not None
    read_experts, count = expected_tiles(slots, experts, tokens)
    ctas = count * -(-size.n // (tiles.ROWS * config.row_blocks))
    return max(max(1.0, ctas / sms) * -(-size.k // tiles.K_BLOCK) * config.us, read_us(size, read_experts))


def configs(p: Problem) -> Iterator[Sm80Config]:
    """The config of the problem's token tile."""
    assert p.routed is not None
    config = config_of(p.format, p.routed.tokens, p.sm)
    if config is not None:
        yield config


def ranked(p: Problem) -> list[tuple[Sm80Config, None]]:
    """The one config of the token tile, which `token_tile` has chosen before."""
    return [(config, None) for config in configs(p)]


def chosen(p: Problem, rows: Sequence[int]) -> Iterator[Sm80Config]:
    """The one config of the token tile, for any number of rows."""
    return configs(p)


def template(p: Problem, config: Sm80Config) -> Template:
    """The constants of a config."""
    return {**template_sm80(p.format, config, p.x, "float", p.sm), **gate_template(p)}


class GroupedLaunch:
    """The kernel for all experts of one shape and format, and a largest number of sorted rows.

    A call requires a raw stream handle and the pointers of GroupedLaunch of prefill_sm90.py.
    """

    def __init__(self, p: Problem, config: Sm80Config) -> None:
        """Prepare the launch on the current device."""
        assert p.routed is not None
        constants = template(p, config)
        row_tiles = -(-p.n // (tiles.ROWS * config.row_blocks // len(p.outputs)))
        factor, unit = weight_factors(p)
        stream_k = StreamK(row_tiles=Divisor.by(row_tiles))
        products = grouped_products(p, stream_k, factor=factor, unit=unit)
        ctas = max_token_tiles(p.m, p.routed.experts, config.tokens) * row_tiles
        function, shared = load(NAME, p.format, **constants), int(constants["SMEM_BYTES"])
        self._launch = Launch(function, ctas, config.threads, shared, (products,), products, POINTERS)

    def __call__(self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int) -> None:
        self._launch(stream, counts, token_tiles, 0, x, *pointers)

    def bound(
        self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int, into: int | None = None
    ) -> Callable[[], int]:
        """A call that launches with this stream and these pointers: `Launch.bound`."""
        return self._launch.bound(stream, counts, token_tiles, 0, x, *pointers, into=into)


MOE_PREFILL_SM80 = Kernel(
    NAME, configs, ranked, chosen, template, GroupedLaunch, reads=half_rows, products=2, forms=forms,
    uses_exponent=True, token_tile=token_tile,
)  # fmt: skip
