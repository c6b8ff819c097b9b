"""The simple kernels for few rows of x: sums in float32 registers, integer dots by dp4a (sm_75), exact codebooks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, Q8_1, Problem

from .kernel import Kernel, Launchable, Ranked

A16, A8 = "gemv_simt", "gemv_dp4a"
TOKENS = (1, 2, 4, 8)  # token tiles
WARP_SPLIT_K = 4  # groups of four warps that share a row_block of tiles


def takes(activation: str, p: Problem) -> bool:
    """Up to 8 rows of x."""
    return p.format.tiled and p.m <= TOKENS[-1] and (activation == "a16" or p.format.integer)


def token_tile(p: Problem) -> int:
    """The smallest token tile that holds y's rows."""
    return next(tokens for tokens in TOKENS if tokens >= p.m)


def ranked(p: Problem) -> list[Ranked]:
    """Its token tile is all its config."""
    return [(token_tile(p), None)]


def chosen(p: Problem, rows: Sequence[int]) -> set[int]:
    """The token tiles of these numbers of rows of x."""
    return {token_tile(p._replace(m=m)) for m in rows}


def template(p: Problem, tokens: int) -> Template:
    """The constants of a token tile; Q8_1 activations have one type."""
    source: Template = {} if p.x == Q8_1 else {"In": p.x}
    return {**source, "Out": p.out, "TOKENS": tokens, "WARP_SPLIT_K": WARP_SPLIT_K}


def launch(name: str, p: Problem, tokens: int) -> Launchable:
    """One CTA a row_block of tiles."""
    pointers = (ctypes.c_void_p * 3)()  # w, x, y
    arrays = (ctypes.c_void_p.from_buffer(pointers, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3))
    arguments = (*arrays, ctypes.c_int64(p.n), ctypes.c_int64(p.k), ctypes.c_int(p.m))
    function = load(name, p.format, **template(p, tokens))
    threads, row_blocks = WARP_SPLIT_K * tiles.WARPS * tiles.LANES, -(-p.n // tiles.ROWS)
    made = Launch(function, row_blocks, threads, 0, arguments, pointers, 3, programmatic=False)

    def run(stream: int, x: int, w: int, y: int, *_: int) -> None:
        made(stream, w, x, y)

    return run


GEMV_SIMT = Kernel(
    A16,
    partial(takes, "a16"),
    lambda p: (token_tile(p),),
    ranked,
    chosen,
    template,
    partial(launch, A16),
    outs=lambda x: tuple(C_TYPES),
)
GEMV_DP4A = Kernel(
    A8, partial(takes, "a8"), lambda p: (token_tile(p),), ranked, chosen, template, partial(launch, A8),
    reads=lambda p: (Q8_1,), takes_q8_1=True, outs=lambda x: tuple(C_TYPES),
)  # fmt: skip
