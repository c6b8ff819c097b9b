"""Products by experts of many tokens by mma.sync, over rows that are sorted by expert (sm_80 and later, but for sm_90).

The kernel is prefill_sm80 with other tiles of y: those of a token tile, which moe_sort lists on the device, have the
weights of its expert. Its grid has a CTA for each tile that there can be; those that are not there end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qgemm.codec.format import Format
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES, Divisor, GroupedProducts, StreamK, Types
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Output, Problem

from .decode_config import shared_limit
from .expert_tiles import Size, best_tile, expected_tiles, max_token_tiles, read_us
from .kernel import Kernel
from .moe_prefill_sm90 import POINTERS, forms
from .prefill_sm80 import A16, MIN_STAGES, Sm80Config, shared_bytes, weight_factors
from .prefill_sm80 import template as template_sm80

NAME = "moe_prefill_sm80"
LEAST = 80  # compute capability
# A config for each token tile, half of its row_blocks of a gate: those of prefill_sm80 with four. The second of a size
# is for formats of which three stages of the first do not fit into the shared memory of a GPU; us: as of the first.
CONFIGS = (
    Sm80Config(A16, 16, 4, 2, 2, 0.4), Sm80Config(A16, 16, 2, 2, 2, 0.4),
    Sm80Config(A16, 64, 4, 2, 1, 0.8), Sm80Config(A16, 64, 2, 2, 1, 0.8),
    Sm80Config(A16, 128, 4, 2, 1, 1.38), Sm80Config(A16, 128, 2, 2, 1, 1.38),
)  # fmt: skip
TOKENS = tuple(dict.fromkeys(config.tokens for config in CONFIGS))


def config_of(fmt: Format, tokens: int, sm: int) -> Sm80Config | None:
    """The config of a token tile for a format; None if no stages fit into the shared memory of this GPU."""
    of_size = (config for config in CONFIGS if config.tokens == tokens)
    return next((one for one in of_size if shared_bytes(fmt, one, MIN_STAGES) <= shared_limit(sm)), None)


def token_tile(sizes: tuple[Size, ...], slots: int, experts: int, sms: int, sm: int) -> int:
    """Rows of a token tile for products of so many slots by these experts; 0 where moe_decode takes less time."""
    fitting = [tokens for tokens in TOKENS if all(config_of(size.format, tokens, sm) for size in sizes)]
    times = {tokens: sum(grouped_us(size, tokens, slots, experts, sms, sm) for size in sizes) for tokens in fitting}
    return best_tile(times, sizes, slots, experts)


def grouped_us(size: Size, tokens: int, slots: int, experts: int, sms: int, sm: int) -> float:
    """The time of a product of sorted rows, of slots that choose among the experts at random."""
    config = config_of(size.format, tokens, sm)
    assert config is not None
    met, count = expected_tiles(slots, experts, tokens)
    ctas = count * -(-size.n // (tiles.ROWS * config.row_blocks))
    return max(max(1.0, ctas / sms) * -(-size.k // tiles.K_BLOCK) * config.us, read_us(size, met))


def configs(p: Problem) -> Iterator[Sm80Config]:
    """That of the problem's token tile."""
    assert p.routed is not None
    found = config_of(p.format, p.routed.tokens, p.sm)
    if found is not None:
        yield found


def ranked(p: Problem) -> list[tuple[Sm80Config, None]]:
    """The same."""
    return [(config, None) for config in configs(p)]


def chosen(p: Problem, rows: Sequence[int]) -> Iterator[Sm80Config]:
    """The same: the token tile is chosen before."""
    return configs(p)


def template(p: Problem, config: Sm80Config) -> Template:
    """The constants of a config."""
    gate = GATE_CODES[p.outputs[0].gate] if p.gated else 0
    constants = template_sm80(p.format, config, p.x, "float", p.sm)
    return {**constants, "GATED": int(p.gated), "GATE": gate}


class GroupedLaunch:
    """The kernel for all experts of one shape and format, and so many sorted rows at most.

    A call takes a raw stream handle and the pointers that that of moe_prefill_sm90 takes; x is sorted.
    """

    def __init__(self, p: Problem, config: Sm80Config) -> None:
        """Prepare the launch on the current device."""
        assert p.routed is not None
        constants, (first, *second) = template(p, config), p.outputs
        row_tiles = -(-p.n // (tiles.ROWS * config.row_blocks // len(p.outputs)))
        factor, unit = weight_factors(p)
        found = GroupedProducts(
            expert_bytes=p.routed.stride.nbytes, expert_rows=p.routed.stride.rows, n=p.n, k=p.k,
            factor=factor, unit=unit,
        )  # fmt: skip
        found.epilogue.types = Types.from_names(first.y, "", "")
        found.bias_types[:] = [TYPE_CODES.get(output.bias, 0) for output in (first, *(second or (Output(p.n),)))]
        found.stream_k = StreamK(row_tiles=Divisor.by(row_tiles))
        ctas = max_token_tiles(p.m, p.routed.experts, config.tokens) * row_tiles
        function, shared = load(NAME, p.format, **constants), int(constants["SMEM_BYTES"])
        self._launch = Launch(function, ctas, config.threads, shared, (found,), found, POINTERS)

    def __call__(self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int) -> None:
        self._launch(stream, counts, token_tiles, 0, x, *pointers)

    def bound(
        self, stream: int, x: int, counts: int, token_tiles: int, *pointers: int, into: int | None = None
    ) -> Callable[[], int]:
        """See Launch."""
        return self._launch.bound(stream, counts, token_tiles, 0, x, *pointers, into=into)


MOE_PREFILL_SM80 = Kernel(
    NAME,
    configs,
    ranked,
    chosen,
    template,
    GroupedLaunch,
    products=2,
    forms=forms,
    uses_exponent=True,
    token_tile=token_tile,
)
