"""Growth of time with M: products of neighbouring M, which show cliffs between token tiles or routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from qgemm.cli.timing import Loop, compare
from qgemm.cuda.kernels.prefill_sm80 import SM80_CONFIGS
from qgemm.cuda.kernels.sm90_cost import TOKEN_TILES

FIRST, LAST, STEP = 16, 512, 8

Sweep = dict[str, float]  # M -> us; keys are text, as in JSON


def counts() -> list[int]:
    """Every STEP-th M from FIRST to LAST, and the M next to edges of token tiles."""
    edges = {*TOKEN_TILES, *(config.tokens for config in SM80_CONFIGS)}
    beside = {edge + by for edge in edges for by in (-1, 1)}
    return sorted({m for m in (*range(FIRST, LAST + 1, STEP), *beside) if FIRST <= m <= LAST})


def measure(stream: Any, loops: Iterator[tuple[int, Loop]], repeats: int) -> Sweep:
    """The time of the loop of each M."""
    return {str(m): compare(stream, [loop], repeats)[0].us for m, loop in loops}


def steepest(sweep: Mapping[str, float]) -> tuple[float, int]:
    """The largest ratio of the times of one M and the next, and the larger M."""
    times = sorted((int(m), us) for m, us in sweep.items())
    return max((us / before, m) for (_, before), (m, us) in pairwise(times))
