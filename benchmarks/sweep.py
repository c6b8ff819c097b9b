"""How time grows with M: products of all neighbouring M, in which a cliff between token tiles or routes would show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from qgemm.cli.timing import Loop, compare
from qgemm.cuda.kernels.prefill_sm80 import SM80_CONFIGS
from qgemm.cuda.kernels.sm90_cost import TOKENS

FIRST, LAST, STEP = 16, 512, 8

Sweep = dict[str, float]  # M -> us; of JSON, whose keys are text


def counts() -> list[int]:
    """Every STEP-th M from FIRST to LAST, and those just beside an edge of a token tile."""
    edges = {*TOKENS, *(config.tokens for config in SM80_CONFIGS)}
    beside = {edge + by for edge in edges for by in (-1, 1)}
    return sorted({m for m in (*range(FIRST, LAST + 1, STEP), *beside) if FIRST <= m <= LAST})


def measure(stream: Any, loops: Iterator[tuple[int, Loop]], repeats: int) -> Sweep:
    """The times of a loop for each M."""
    return {str(m): compare(stream, [loop], repeats)[0].us for m, loop in loops}


def steepest(sweep: Mapping[str, float]) -> tuple[float, int]:
    """The most by which time grows from one M to the next, as a ratio, and the M after it."""
    times = sorted((int(m), us) for m, us in sweep.items())
    return max((us / before, m) for (_, before), (m, us) in pairwise(times))
