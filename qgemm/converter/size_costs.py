"""Measure the cost of each type for each tensor: the error of rows spread over the tensor, encoded as it would be.

    mse  sum of h (w' - w)^2 / sum of h w^2          the relative error of the products
    kl   1/2 sum of f (w' - w)^2                     the expected KL divergence of a token's predictions in nats

h is the importance of a column (1 without an importance matrix), f its Fisher information, both from the file of
--imatrix. The token embedding's rows are looked up besides, each as often as any other: 1/2 l / rows sum of (w' - w)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.files.imatrix import Importance
from qgemm.files.imatrix_sums import Sensitivities
from qgemm.parallel import workers

from .job import ordered_results
from .range_encoding import choose_encoder, encoded_together
from .rules import TOKEN_EMBEDDING, Options, Step, importance_of
from .scale_search import importance_of_columns
from .size_choice import Alternative
from .weight import Weight

SHARE, LEAST = 32, 1 << 13  # weights: one of SHARE is measured, but at least LEAST of a tensor
PLACES = 8  # in a tensor, or one in each of more matrices, from which rows are taken


class _Rows(NamedTuple):
    """Rows of one matrix x [n, K], the index of the matrix's first weight in the tensor, the weights [K] or [1] of
    errors by column."""

    x: Floats
    start: int
    columns: NDArray[np.float64]


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

    def jobs() -> Iterator[tuple[str, Step, list[_Rows]]]:
        for name, steps in candidates.items():
            rows = _sample(steps[0].weight, _columns(steps[0].weight, options, objective, sensitivities))
            yield from ((name, step, rows) for step in steps)

    def measure(job: tuple[str, Step, list[_Rows]]) -> Alternative:
        _, step, rows = job
        return Alternative(step.nbytes, _cost(step, rows, options, objective, sensitivities))

    alternatives: dict[str, list[Alternative]] = {name: [] for name in candidates}
    for (name, *_), alternative in ordered_results(measure, jobs(), threads or workers()):
        alternatives[name].append(alternative)
        advance(1)
    return alternatives


def _columns(weight: Weight, options: Options, objective: str, sensitivities: Sensitivities) -> Importance | None:
    """The weights of errors by column: the Fisher information where it counts and is known, else the importance."""
    fisher = importance_of(weight, sensitivities.fisher) if objective == "kl" else None
    return fisher or importance_of(weight, options.importance)


def _cost(step: Step, rows: list[_Rows], options: Options, objective: str, sensitivities: Sensitivities) -> float:
    if step.copied or step.by_codes:  # scales are rounded to float16 at most
        return 0.0
    weight = step.weight
    error = _measure(step, rows, options)
    cost = error.weighted / error.power if error.power else 0.0
    if objective == "kl":
        cost = error.weighted / 2 if importance_of(weight, sensitivities.fisher) is not None else 0.0
        if TOKEN_EMBEDDING.search(weight.name):
            cost += sensitivities.lookups * error.plain / weight.shape[-2] / 2
    return cost if isfinite(cost) else float("inf")


def _measure(step: Step, sample: list[_Rows], options: Options) -> _Error:
    """The sums over the rows of a sample, scaled to all rows."""
    encode, width = choose_encoder(step, options).encode, encoded_together(step)
    weighted = power = plain = 0.0
    with np.errstate(all="ignore"):  # a type that does not hold the weights costs inf
        for x, start, columns in sample:
            blocks = encode(x.reshape(-1, width), start)
            squares = np.square(
                np.asarray(step.format.decode(blocks), np.float32).reshape(x.shape) - x, dtype=np.float64
            )
            weighted += float((squares * columns).sum())
            power += float((np.square(x, dtype=np.float64) * columns).sum())
            plain += float(squares.sum())
    count = sum(rows.x.size for rows in sample)
    scale = step.weight.size / count if count else 1.0
    return _Error(weighted * scale, power * scale, plain * scale)


def _sample(weight: Weight, columns: Importance | None) -> list[_Rows]:
    """Rows spread over the tensor; those of one matrix are joined. columns: the weights of errors, 1 if None."""
    n, k = weight.shape[-2], weight.shape[-1]
    rows = weight.size // k
    unit = lcm(weight.step, k) // k  # rows that are read together
    count_of_rows = min(rows, max(-(-LEAST // k), rows // SHARE))
    places = max(1, min(max(PLACES, rows // n), count_of_rows, rows // unit))
    parts: dict[int, list[Floats]] = {}
    for place in range(places):
        first = rows * place // places // unit * unit
        count = min(-(-count_of_rows // places), (first // n + 1) * n - first)
        stop = min(-(-(first + count) // unit) * unit, rows)
        assert weight.values is not None
        parts.setdefault(first // n, []).append(weight.values(first * k, stop * k).reshape(-1, k)[:count])
    return [
        _Rows(np.concatenate(part), matrix * n * k, _columns_of(weight, columns, matrix * n))
        for matrix, part in parts.items()
    ]


def _columns_of(weight: Weight, columns: Importance | None, row: int) -> NDArray[np.float64]:
    if columns is None:
        return np.ones(1)
    return np.asarray(importance_of_columns(weight, columns, row, 0, weight.shape[-1]), np.float64)
