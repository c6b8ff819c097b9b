"""gemv: few rows of x without tensor cores (sm_75), and codebooks by exact levels. One source, two records.

    gemv_simt   float activations, sums of levels in float32
    gemv_dp4a   Q8_1 activations, integer dot products by dp4a

The type of x tells the source which of them it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.jit.codegen import Template
from qgemm.cuda.jit.load import load
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import C_TYPES, Q8_1, Problem

from .kernel import Kernel, Launchable, Ranked

SOURCE = "gemv"
TOKEN_TILES = (1, 2, 4, 8)
WARP_SPLIT_K = 4  # groups of four warps that share a row_block of tiles


def token_tile(p: Problem) -> int:
    """The smallest token tile that holds y's rows."""
    return next(tokens for tokens in TOKEN_TILES if tokens >= p.m)


def configs(p: Problem) -> tuple[int]:
    """A config is a token tile."""
    return (token_tile(p),)


def ranked(p: Problem) -> list[Ranked]:
    """The token tile of a problem."""
    return [(token_tile(p), None)]


def chosen(p: Problem, rows: Sequence[int]) -> set[int]:
    """The token tiles of these numbers of rows of x."""
    return {token_tile(p._replace(m=m)) for m in rows}


def template(p: Problem, tokens: int) -> Template:
    """The constants of a token tile."""
    return {"In": p.x, "Out": p.out, "TOKENS": tokens, "WARP_SPLIT_K": WARP_SPLIT_K}


def launch(p: Problem, tokens: int) -> Launchable:
    """A CTA for each row_block of tiles."""
    pointers = (ctypes.c_void_p * 3)()  # w, x, y
    arrays = (ctypes.c_void_p.from_buffer(pointers, i * ctypes.sizeof(ctypes.c_void_p)) for i in range(3))
    arguments = (*arrays, ctypes.c_int64(p.n), ctypes.c_int64(p.k), ctypes.c_int(p.m))
    function = load(SOURCE, p.format, **template(p, tokens))
    threads, row_blocks = WARP_SPLIT_K * tiles.WARPS * tiles.LANES, -(-p.n // tiles.ROWS)
    prepared = Launch(function, row_blocks, threads, 0, arguments, pointers, 3, programmatic=False)

    def run(stream: int, x: int, w: int, y: int, *_: int) -> None:
        prepared(stream, w, x, y)

    return run


def outs(x: str) -> tuple[str, ...]:
    """Each type of y is compiled for."""
    return tuple(C_TYPES)


GEMV_SIMT = Kernel("gemv_simt", configs, ranked, chosen, template, launch, SOURCE, outs=outs)
GEMV_DP4A = Kernel(
    "gemv_dp4a", configs, ranked, chosen, template, launch, SOURCE, reads=lambda p: (Q8_1,), takes_q8_1=True, outs=outs
)
