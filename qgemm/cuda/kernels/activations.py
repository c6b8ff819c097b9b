"""Launches of the kernels that convert x: to codes, to the values that codes decode to, to scaled halves."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from qgemm.cuda.driver.launch import Launch
from qgemm.cuda.layout import group_activations as grouped
from qgemm.cuda.layout import tile as tiles

from .transforms import (
    DEQUANTIZE_ACTIVATIONS,
    GROUPS_TOKENS,
    QUANTIZE_ACTIVATIONS,
    QUANTIZE_ACTIVATIONS_GROUPS,
    ROUND_ACTIVATIONS,
    SCALE_ROWS,
    SCALE_THREADS,
    groups_template,
)

THREADS = 128  # threads of a CTA
SHARE = 8  # columns of a thread


@cache
def quantize_launch(device: int, source: str, k: int, m: int) -> Launch:
    """The kernel that quantizes M rows of K activations. Its pointers: x, aligned to 16 bytes, and the blocks."""
    shares = -(-k // tiles.K_BLOCK) * (tiles.K_BLOCK // SHARE)
    return _launch(QUANTIZE_ACTIVATIONS.load(In=source), (m, -(-shares // THREADS)), k, m)


@cache
def quantize_groups_launch(device: int, source: str, k: int, m: int, activation: str) -> Launch:
    """The kernel that quantizes M rows of K activations to bytes, a scale for each group. Its pointers: x, aligned to
    16 bytes, and the bytes."""
    shares = grouped.columns_of(k) // SHARE
    grid = grouped.rows_of(m) // GROUPS_TOKENS, -(-shares // THREADS)
    return _launch(QUANTIZE_ACTIVATIONS_GROUPS.load(None, In=source, **groups_template(activation)), grid, k, m)


@cache
def dequantize_launch(device: int, out: str, k: int, m: int) -> Launch:
    """The kernel that decodes M rows of K quantized activations. Its pointers: the blocks and x."""
    return _launch(DEQUANTIZE_ACTIVATIONS.load(Out=out), (m, -(-k // (SHARE * THREADS))), k, m)


@cache
def round_launch(device: int, source: str, out: str, k: int, m: int) -> Launch:
    """The kernel that rounds M rows of K activations to the values that their blocks decode to. Its pointers: x and the
    rounded x, aligned to 16 bytes."""
    return _launch(ROUND_ACTIVATIONS.load(In=source, Out=out), (-(-m * k // (SHARE * THREADS)), 1), k, m)


@cache
def scale_launch(device: int, k: int, m: int) -> Launch:
    """The kernel that scales M rows of K bf16 to halves. Its pointers: x, aligned to 16 bytes, and the ScaledRows."""
    return _launch(SCALE_ROWS.load(None, **SCALE_ROWS.types[0]), (m, 1), k, m, SCALE_THREADS)


def _launch(function: Any, grid: tuple[int, int], k: int, m: int, threads: int = THREADS) -> Launch:
    pointers = (ctypes.c_void_p * 2)()
    arrays = (ctypes.c_void_p.from_buffer(pointers, offset) for offset in (0, ctypes.sizeof(ctypes.c_void_p)))
    arguments = (*arrays, ctypes.c_int64(k), ctypes.c_int(m))
    return Launch(function, grid, threads, 0, arguments, pointers, 2)
