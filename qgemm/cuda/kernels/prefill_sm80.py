"""prefill_sm80 and prefill_sm80_a8 on the host: many rows of x on tensor cores by mma.sync (sm_80 and later)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.driver.workspace import workspace
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, Q8_1, SCALED_ROWS, Problem

from .choices import fastest
from .decode_config import TOKEN_BYTES, shared_limit
from .kernel import Kernel, Launchable, half_rows, x_pitch


class Sm80Config(NamedTuple):
    """The tile of y of a CTA: `tokens` rows of x and `row_blocks` * 64 rows of W.

    m16_tiles: tiles of 16 rows of W of a warp. warp_split_k: warps along K, each of which multiplies every
    warp_split_k-th k_block. us: approximate time of a CTA for a k_block.
    """

    kernel: str
    tokens: int
    row_blocks: int
    m16_tiles: int
    warp_split_k: int
    us: float

    def __str__(self) -> str:
        """E.g. "64x4 m16_tiles 2 warp_split_k 1": tokens, row_blocks."""
        return f"{self.tokens}x{self.row_blocks} m16_tiles {self.m16_tiles} warp_split_k {self.warp_split_k}"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return tiles.LANES * tiles.WARPS * self.row_blocks // self.m16_tiles * self.warp_split_k


A16, A8 = "prefill_sm80", "prefill_sm80_a8"

# Measured on an H200 with q4_0. A config serves a format if at least MIN_STAGES fit into shared memory.
SM80_CONFIGS = tuple(Sm80Config(*row) for row in read("prefill_sm80")["configs"])
TOKEN = {A16: TOKEN_BYTES["half"], A8: TOKEN_BYTES[Q8_1]}  # bytes of a token's share of a k_block in shared memory
EPI_TOKENS = 32  # largest number of tokens that are reduced and stored together
MIN_STAGES, MAX_STAGES = 3, 8


class Plan(NamedTuple):
    """A config, and the number of CTAs along K for each tile of y."""

    config: Sm80Config
    split_k: int = 1

    def __str__(self) -> str:
        return f"{self.config}, split_k {self.split_k}"


MAX_SPLIT_K = 4
WAVES = 2  # largest number of waves of CTAs with split-K: bounds the workspace of their partials
# us of the reduction of a split tile, and of each 128 x 256 partials.
REDUCTION_US: dict[str, float] = read("prefill_sm80")["reduction_us"]


@cache
def sm80_configs_for(kernel: str, fmt: Format, sm: int) -> tuple[Sm80Config, ...]:
    """The configs of a kernel of which MIN_STAGES fit into the shared memory of this GPU."""
    fitting = (config for config in SM80_CONFIGS if shared_bytes(fmt, config, MIN_STAGES) <= shared_limit(sm))
    return tuple(config for config in fitting if config.kernel == kernel)


def ranked(kernel: str, p: Problem) -> list[tuple[Plan, float]]:
    """Every plan and its predicted us, the fastest first."""
    return ranked_plans(p, sm80_configs_for(kernel, p.format, p.sm))


def chosen(kernel: str, p: Problem, rows: Sequence[int]) -> list[Plan]:
    """The plans that are chosen for any of these numbers of rows of x."""
    return chosen_plans(p, sm80_configs_for(kernel, p.format, p.sm), rows)


def ranked_plans(p: Problem, configs: Iterable[Sm80Config]) -> list[tuple[Plan, float]]:
    """Every plan of these configs and its predicted us, the fastest first."""
    times = ((plan, predicted(p, plan, p.m)) for plan in plans(configs))
    return sorted((pair for pair in times if pair[1] < inf), key=lambda pair: pair[1])


def chosen_plans(p: Problem, configs: Iterable[Sm80Config], rows: Sequence[int]) -> list[Plan]:
    """The plans of these configs that are chosen for any of these numbers of rows of x."""
    return fastest(((plan, plan.config.tokens, partial(predicted, p, plan)) for plan in plans(configs)), rows)


def plans(configs: Iterable[Sm80Config]) -> Iterator[Plan]:
    """Configs with every number of CTAs along K."""
    for config in configs:
        yield from (Plan(config, split_k) for split_k in range(1, MAX_SPLIT_K + 1))


def predicted(p: Problem, plan: Plan, m: int) -> float:
    """The us of a plan for M rows of x, infinite if it cannot serve them."""
    if not may_share(plan, p.n, m, p.sms):
        return inf
    (config, split_k), k_blocks = plan, -(-p.k // tiles.K_BLOCK)
    busiest_us = -(-tiles_of(config, p.n, m) * split_k // p.sms) * -(-k_blocks // split_k) * config.us
    return busiest_us + reduction_us(plan)


def reduction_us(plan: Plan) -> float:
    """The us of the reduction of a split tile."""
    config, split_k = plan
    parts = split_k * config.warp_split_k * config.tokens * config.row_blocks / (128 * 4)
    return (split_k > 1) * (REDUCTION_US["always"] + REDUCTION_US["part"] * parts)


def may_share(plan: Plan, n: int, m: int, processors: int) -> bool:
    """Whether split-K has at most WAVES waves of CTAs."""
    return plan.split_k == 1 or tiles_of(plan.config, n, m) * plan.split_k <= WAVES * processors


def tiles_of(config: Sm80Config, n: int, m: int) -> int:
    """Tiles of y."""
    return -(-n // (config.row_blocks * tiles.ROWS)) * -(-m // config.tokens)


def shared_bytes(fmt: Format, config: Sm80Config, stages: int) -> int:
    """Shared memory of a CTA: for A16 the table of levels, then `stages` stages of codes, fields and x.

    The reduction aliases all of it.
    """
    dtype = tiles.tile_dtype(fmt)
    weights = dtype.itemsize - (tiles.k_blocks(fmt) - 1) * dtype["k_blocks"].base.itemsize
    stage = config.warp_split_k * (config.row_blocks * weights + config.tokens * TOKEN[config.kernel])
    table = tiles.table_bytes(fmt) if config.kernel == A16 else 0
    return max(table + stages * stage, reduce_bytes(config))


def reduce_bytes(config: Sm80Config) -> int:
    """Shared memory of the reduction over the warps along K: float32 [warp_split_k][tokens][rows + 4 of padding]."""
    return 4 * config.warp_split_k * min(config.tokens, EPI_TOKENS) * (config.row_blocks * tiles.ROWS + 4)


def tile_sizes(config: Sm80Config, stages: int) -> Template:
    """The constants of Sm80 in kernels/gemm/sm80/config.cuh that follow from a config."""
    return {
        "BLOCK_TOKENS": config.tokens,
        "ROW_BLOCKS": config.row_blocks,
        "M16_TILES": config.m16_tiles,
        "WARP_SPLIT_K": config.warp_split_k,
        "STAGES": stages,
        "EPI_TOKENS": min(config.tokens, EPI_TOKENS),
    }


def template(fmt: Format, config: Sm80Config, source: str, out: str, sm: int) -> Template:
    """The constants of the config's kernel, with the largest number of stages that fits."""
    stages = next(
        count for count in range(MAX_STAGES, MIN_STAGES - 1, -1) if shared_bytes(fmt, config, count) <= shared_limit(sm)
    )
    sizes = {
        **tile_sizes(config, stages),
        "TOKEN_BYTES": TOKEN[config.kernel],
        "REDUCE_BYTES": reduce_bytes(config),
        "SMEM_BYTES": shared_bytes(fmt, config, stages),
    }
    return {"In": "half" if source == SCALED_ROWS else source, "Out": out, **sizes, "MAX_SPLIT_K": MAX_SPLIT_K}


def launch(kernel: str, p: Problem, plan: Plan) -> Launchable:
    """The launch for every matrix of one shape, format and exponent, and M rows of x."""
    (config, split_k), out = plan, p.out
    constants, count = template(p.format, config, p.x, out, p.sm), tiles_of(config, p.n, p.m)
    pointers = (ctypes.c_void_p * 5)()  # w, x, y, partials, counters
    arrays = (ctypes.c_void_p.from_buffer(pointers, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(5))
    pitch = (x_pitch(p),) * (kernel == A16)
    sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), *map(ctypes.c_int, (p.m, *pitch, split_k))
    product = Launch(
        load(kernel, p.format, **constants),
        count * split_k,
        config.threads,
        shared_bytes(p.format, config, int(constants["STAGES"])),
        (*arrays, *sizes, *(map(ctypes.c_float, weight_factors(p)) if kernel == A16 else ())),
        pointers,
        len(pointers),
    )
    if split_k == 1:

        def run(stream: int, x: int, w: int, y: int, *_: int) -> None:
            product(stream, w, x, y, 0, 0)

        return run
    memory = reduction_memory(p.device, plan, count)

    def run_split(stream: int, x: int, w: int, y: int, *_: int) -> None:
        product(stream, w, x, y, *memory(stream))

    return run_split


def reduction_memory(device: int, plan: Plan, count: int) -> Callable[[int], tuple[int, int]]:
    """A function of a stream that returns pointers to the partials of split tiles and to their arrival counters."""
    (config, split_k), none = plan, (0, 0)
    if split_k == 1:
        return lambda stream: none
    tile_sums = config.warp_split_k * config.row_blocks * tiles.ROWS * config.tokens
    # Workspaces are kept: powers of two are few sizes.
    partials, counters = (4 << size.bit_length() for size in (count * split_k * tile_sums, count))

    def memory(stream: int) -> tuple[int, int]:
        shared = workspace(device, stream, "sm80 partials", partials).pointer
        return shared, workspace(device, stream, "sm80 counters", counters).pointer

    return memory


MAX_EXPONENT = 126  # beyond it the factor overflows float32


def weight_factors(p: Problem) -> tuple[float, float]:
    """Two factors: of weights, to bring them into the range of half, and of sums, to undo it."""
    exponent = max(-MAX_EXPONENT, min(p.exponent, MAX_EXPONENT))
    return 2.0 ** (tiles.level_exponent(p.format) - exponent), 2.0**exponent


def configs(kernel: str, p: Problem) -> tuple[Plan, ...]:
    """A plan for each config that fits; templates do not depend on split_k."""
    return tuple(Plan(config) for config in sm80_configs_for(kernel, p.format, p.sm))


def outs(x: str) -> tuple[str, ...]:
    """float32 and the type of x. y of another type of 16 bits is rare; it is converted after the product."""
    return "float32", "bfloat16" if x == SCALED_ROWS else "float16"


def _template(p: Problem, plan: Plan) -> Template:
    return template(p.format, plan.config, p.x, p.out, p.sm)


PREFILL_SM80 = Kernel(
    A16, partial(configs, A16), partial(ranked, A16), partial(chosen, A16), _template,
    partial(launch, A16), reads=half_rows, outs=outs, uses_exponent=True, rounds=True,
)  # fmt: skip
PREFILL_SM80_A8 = Kernel(
    A8, partial(configs, A8), partial(ranked, A8), partial(chosen, A8), _template,
    partial(launch, A8), reads=lambda p: (Q8_1,), takes_q8_1=True, outs=lambda x: tuple(C_TYPES),
)  # fmt: skip
