"""Measure the cost of each type for each tensor: the error of rows spread over the tensor, encoded as it would be.

    mse  sum of h (w' - w)^2 / sum of h w^2          the relative error of the products
    kl   1/2 sum of f (w' - w)^2                     the expected KL divergence of a token's predictions in nats

h is the importance of a column (1 without an importance matrix), f its Fisher information, both from the file of
--imatrix. The token embedding's rows are looked up besides, each as often as any other: 1/2 l / rows sum of (w' - w)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, lcm
from typing import NamedTuple

import numpy as np

from qgemm.files.imatrix import Importance
from qgemm.files.imatrix_sums import Sensitivities
from qgemm.parallel import workers

from .job import ordered_results
from .range_encoding import choose_encoder, encode_weights
from .rules import TOKEN_EMBEDDING, Options, Step, importance_of
from .scale_search import importance_of_range
from .size_choice import Alternative
from .weight import Weight

SHARE, LEAST_ROWS = 32, 32  # one row of SHARE is measured, but at least LEAST_ROWS
GROUPS = 4  # places in a tensor from which rows are taken


class _Error(NamedTuple):
    """Sums over the measured rows: h (w' - w)^2 or f (w' - w)^2, the same of w, and (w' - w)^2."""

    weighted: float
    power: float
    plain: float


def costs(
    candidates: Mapping[str, Sequence[Step]],
    options: Options,
    objective: str,
    sensitivities: Sensitivities,
    threads: int | None = None,
    advance: Callable[[int], object] = lambda steps: None,
) -> dict[str, list[Alternative]]:
    """The alternatives of each tensor, one for each candidate; a type that cannot hold its weights costs inf."""
    jobs = [(name, step) for name, steps in candidates.items() for step in steps]

    def measure(job: tuple[str, Step]) -> Alternative:
        return Alternative(job[1].nbytes, _cost(job[1], options, objective, sensitivities))

    alternatives: dict[str, list[Alternative]] = {name: [] for name in candidates}
    for (name, _), alternative in ordered_results(measure, jobs, threads or workers()):
        alternatives[name].append(alternative)
        advance(1)
    return alternatives


def _cost(step: Step, options: Options, objective: str, sensitivities: Sensitivities) -> float:
    if step.copied:
        return 0.0
    weight = step.weight
    fisher = importance_of(weight, sensitivities.fisher) if objective == "kl" else None
    error = _measure(step, fisher or importance_of(weight, options.importance), options)
    cost = error.weighted / error.power if error.power else 0.0
    if objective == "kl":
        cost = error.weighted / 2 if fisher is not None else 0.0
        if TOKEN_EMBEDDING.search(weight.name):
            cost += sensitivities.lookups * error.plain / weight.shape[-2] / 2
    return cost if isfinite(cost) else float("inf")


def _measure(step: Step, columns: Importance | None, options: Options) -> _Error:
    """The sums over rows spread over the tensor, scaled to all rows. columns: the weight of their errors, 1 if None."""
    weight, encoder = step.weight, choose_encoder(step, options)
    weighted = power = plain = 0.0
    count = 0
    for start, stop in sample(weight, step.format.weights):
        with np.errstate(all="ignore"):  # a type that does not hold the weights costs inf
            x, blocks = encode_weights(step, start, stop, encoder.encode)
            squares = np.square(np.asarray(step.format.decode(blocks), np.float32).reshape(-1) - x, dtype=np.float64)
            h = np.ones(1)
            if columns is not None:
                h = np.asarray(importance_of_range(weight, columns, start, stop), np.float64)
            weighted += float((squares.reshape(-1, h.size) * h).sum())
            power += float((np.square(x, dtype=np.float64).reshape(-1, h.size) * h).sum())
            plain += float(squares.sum())
        count += stop - start
    scale = weight.size / count if count else 1.0
    return _Error(weighted * scale, power * scale, plain * scale)


def sample(weight: Weight, block: int) -> list[tuple[int, int]]:
    """Ranges of whole rows, spread over the tensor; each within one matrix."""
    n, k = weight.shape[-2], weight.shape[-1]
    rows = weight.size // k
    unit = lcm(weight.step, block, k) // k  # rows that are read together
    count_of_rows = min(rows, max(LEAST_ROWS, rows // SHARE))
    groups = max(1, min(max(GROUPS, rows // n), count_of_rows // unit))
    size = max(1, count_of_rows // groups // unit) * unit
    ranges = []
    for group in range(groups):
        first = rows * group // groups // unit * unit
        stop = min(first + size, (first // n + 1) * n if n % unit == 0 else rows, rows)
        if stop > first:
            ranges.append((first * k, stop * k))
    return ranges
