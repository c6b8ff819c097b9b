"""gemm_sm80_s8 on the host: products of int8 for many rows of x, by mma.sync (sm_80 and later)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache, partial
from math import inf

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.configs import read
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Problem

from . import prefill_sm80_eight_bits
from .choices import fastest
from .decode_config import BARRIERS, shared_limit
from .kernel import Kernel, Launchable
from .prefill_sm80 import (
    MAX_SPLIT_K,
    Plan,
    Sm80Config,
    may_share,
    plans,
    reduce_bytes,
    reduction_us,
    tile_sizes,
    tiles_of,
)

NAME = "gemm_sm80_s8"
MIN_ROWS = 256  # rows of x
CHUNK_TOKENS = 32  # rows of x of a stage: kernels/gemm/sm80/s8_gemm.cuh
STAGES = 3
TILE_BYTES = 64  # CtaTile of kernels/gemm/sm80/config.cuh, aligned as tiles of W are
SM_WARPS = 8  # their registers fit into an SM
CTA_RESERVED = 1 << 10  # bytes of shared memory that CUDA keeps for itself, of each CTA


@cache
def measured() -> tuple[Sm80Config, ...]:
    """The configs, which are the same for all formats and have one warp along K."""
    return tuple(
        Sm80Config(NAME, tokens, row_blocks, m16_tiles, 1, us)
        for tokens, row_blocks, m16_tiles, us in read(NAME)["configs"]
    )


def serves(fmt: Format) -> bool:
    """Whether the kernel multiplies by a format: integer levels that need no table."""
    return fmt.tiled and fmt.integer and not tiles.table_bytes(fmt)


def shared_bytes(fmt: Format, config: Sm80Config) -> int:
    """Shared memory of a CTA: S8Smem of kernels/gemm/sm80/s8_gemm.cuh."""
    weights = config.row_blocks * COLUMNS // tiles.columns(fmt) * tiles.tile_dtype(fmt).itemsize
    x = STAGES * CHUNK_TOKENS * (prefill_sm80_eight_bits.X_ROW_BYTES + group_activations.SCALE)
    return max(weights + x, reduce_bytes(config)) + TILE_BYTES


def ctas_of_sm(p: Problem, config: Sm80Config) -> int:
    """CTAs that an SM has at a time."""
    shared = shared_limit(p.sm) + BARRIERS + CTA_RESERVED
    by_memory = shared // (shared_bytes(p.format, config) + CTA_RESERVED)
    return min(by_memory, SM_WARPS * tiles.LANES // config.threads)


def template(fmt: Format, config: Sm80Config) -> Template:
    """The constants of the kernel."""
    least, greatest = level_range(fmt)
    return {
        **tile_sizes(config, STAGES),
        "REDUCE_BYTES": reduce_bytes(config),
        "SMEM_BYTES": shared_bytes(fmt, config),
        "MAX_SPLIT_K": MAX_SPLIT_K,
        "X_ROW_BYTES": prefill_sm80_eight_bits.X_ROW_BYTES,
        "LEAST_LEVEL": int(least),
        "GREATEST_LEVEL": int(greatest),
    }


def fitting(fmt: Format, sm: int) -> list[Sm80Config]:
    """The configs that fit into the shared memory of a GPU."""
    return [config for config in measured() if shared_bytes(fmt, config) <= shared_limit(sm)]


def predicted(p: Problem, plan: Plan, m: int) -> float:
    """The us of a plan for M rows of x, infinite if it cannot serve them."""
    (config, split_k), k_blocks = plan, -(-p.k // tiles.K_BLOCK)
    if not may_share(plan, p.n, m, p.sms):
        return inf
    waves = -(-tiles_of(config, p.n, m) * split_k // (p.sms * ctas_of_sm(p, config)))
    return waves * -(-k_blocks // split_k) * config.us + reduction_us(plan)


def ranked(p: Problem) -> list[tuple[Plan, float]]:
    """Every plan and its predicted us, the fastest first."""
    times = ((plan, predicted(p, plan, p.m)) for plan in plans(fitting(p.format, p.sm)))
    return sorted((pair for pair in times if pair[1] < inf), key=lambda pair: pair[1])


def pays(p: Problem) -> bool:
    """Whether the kernel is predicted to be faster than the one that converts W for 64 rows of x at most."""
    return p.m >= MIN_ROWS and ranked(p)[0][1] < prefill_sm80_eight_bits.ranked(p)[0][1]


def chosen(p: Problem, rows: Sequence[int]) -> list[Plan]:
    """The plans that are chosen for any of these numbers of rows of x."""
    candidates = plans(fitting(p.format, p.sm))
    return fastest(((plan, plan.config.tokens, partial(predicted, p, plan)) for plan in candidates), rows)


def launch(p: Problem, plan: Plan) -> Launchable:
    """The launch for every matrix of one shape and format, and M rows of x."""
    return prefill_sm80_eight_bits.launch_of(NAME, template(p.format, plan.config), p, plan)


def extra_units(fmt: Format | None, sm: int, activations: Collection[str]) -> Iterator[tuple[str, Template]]:
    """The (kernel, template) pairs of a format: whether the kernel pays follows from the sizes of a product."""
    if fmt is not None and serves(fmt) and not set(INTEGER).isdisjoint(activations):
        yield from ((NAME, template(fmt, config)) for config in fitting(fmt, sm))


GEMM_SM80_S8 = Kernel(
    NAME, lambda p: [Plan(config) for config in fitting(p.format, p.sm)], ranked, chosen,
    lambda p, plan: template(p.format, plan.config), launch, reads=lambda p: (EIGHT_BITS,), adds=True,
    extra_units=extra_units,
)  # fmt: skip
