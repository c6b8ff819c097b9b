"""prefill_sm80_eight_bits on the host: products of eight bits by mma.sync, int8 (from sm_80) or e4m3 (from sm_89)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from qgemm.codec.eight_bits import COLUMNS, level_range
from qgemm.codec.format import Format
from qgemm.cuda.configs import read
from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.jit.twins import EpilogueArguments, Outputs, Types
from qgemm.cuda.layout import group_activations
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Problem

from .decode_config import shared_limit
from .kernel import Kernel, Launchable
from .prefill_sm80 import (
    MAX_SPLIT_K,
    Plan,
    Sm80Config,
    chosen_plans,
    ranked_plans,
    reduce_bytes,
    reduction_memory,
    tile_sizes,
    tiles_of,
)

NAME = "prefill_sm80_eight_bits"
MIN_STAGES, MAX_STAGES = 2, 4  # stages of COLUMNS
X_ROW_BYTES = COLUMNS + 16  # a token in a stage, padded: EightBitStage in kernels/gemm/sm80/eight_bits.cuh


class Pointers(ctypes.Structure):
    """The pointers of a call."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "x", "partials", "counters")),
        ("epilogue", EpilogueArguments),
    ]


@cache
def measured() -> tuple[Sm80Config, ...]:
    """The configs, which are the same for all formats and activations and have one warp along K."""
    return tuple(
        Sm80Config(NAME, tokens, row_blocks, m16_tiles, 1, us)
        for tokens, row_blocks, m16_tiles, us in read(NAME)["configs"]
    )


def shared_bytes(fmt: Format, config: Sm80Config, stages: int) -> int:
    """Shared memory of a CTA: the table of levels, and an EightBitStage (kernels/gemm/sm80/eight_bits.cuh) per stage.

    The reduction aliases all of it.
    """
    weights = config.row_blocks * COLUMNS // tiles.columns(fmt) * tiles.tile_dtype(fmt).itemsize
    x = config.tokens * (X_ROW_BYTES + group_activations.SCALE)
    return max(tiles.table_bytes(fmt) + stages * (weights + x), reduce_bytes(config))


def template(fmt: Format, config: Sm80Config, activation: str, sm: int) -> Template:
    """The constants of the kernel, with the largest number of stages that fits."""
    stages = max(n for n in range(MIN_STAGES, MAX_STAGES + 1) if shared_bytes(fmt, config, n) <= shared_limit(sm))
    least, greatest = level_range(fmt)
    return {
        **tile_sizes(config, stages),
        "REDUCE_BYTES": reduce_bytes(config),
        "SMEM_BYTES": shared_bytes(fmt, config, stages),
        "MAX_SPLIT_K": MAX_SPLIT_K,
        "X_ROW_BYTES": X_ROW_BYTES,
        **group_activations.byte_template(activation),
        "LEAST_LEVEL": int(least),
        "GREATEST_LEVEL": int(greatest),
    }


def fitting(p: Problem) -> list[Sm80Config]:
    """The configs of which MIN_STAGES fit into the shared memory of the problem's GPU."""
    return [config for config in measured() if shared_bytes(p.format, config, MIN_STAGES) <= shared_limit(p.sm)]


def launch(p: Problem, plan: Plan) -> Launchable:
    """The launch for every matrix of one shape and format, and M rows of x."""
    return launch_of(NAME, _template(p, plan), p, plan)


def launch_of(name: str, constants: Template, p: Problem, plan: Plan) -> Launchable:
    """The launch of a kernel with the parameters of this one."""
    config, split_k = plan
    count, (output,) = tiles_of(config, p.n, p.m), p.outputs
    pointers = Pointers(epilogue=EpilogueArguments(types=Types.from_names(*output[1:])))
    w, x, partials, counters = (
        ctypes.c_void_p.from_buffer(pointers, getattr(Pointers, name).offset)
        for name in ("w", "x", "partials", "counters")
    )
    rows = ctypes.c_int(group_activations.rows_of(p.m))
    sizes = ctypes.c_int64(p.n), ctypes.c_int64(p.k), ctypes.c_int(p.m), rows, ctypes.c_int(split_k)
    product = Launch(
        load(name, p.format, **constants),
        count * split_k,
        config.threads,
        int(constants["SMEM_BYTES"]),
        (w, x, pointers.epilogue, partials, counters, *sizes),
        pointers,
        4 + len(Outputs._fields_),
    ).enter
    memory = reduction_memory(p.device, plan, count)

    def enter(stream: int, x: int, w: int, *outputs: int) -> None:
        product(stream, w, x, *memory(stream), *outputs)

    return enter


def ranked(p: Problem) -> list[tuple[Plan, float]]:
    """Every plan and its predicted us, the fastest first."""
    return ranked_plans(p, fitting(p))


def chosen(p: Problem, rows: Sequence[int]) -> list[Plan]:
    """The plans that are chosen for any of these numbers of rows of x."""
    return chosen_plans(p, fitting(p), rows)


def _template(p: Problem, plan: Plan) -> Template:
    return template(p.format, plan.config, p.activation, p.sm)


PREFILL_SM80_EIGHT_BITS = Kernel(
    NAME, lambda p: [Plan(config) for config in fitting(p)], ranked, chosen, _template, launch,
    reads=lambda p: (EIGHT_BITS,), adds=True,
)  # fmt: skip
