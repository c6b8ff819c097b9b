"""The configs that a cost model chooses for many numbers of rows of x. A time is computed only where it may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A config, the number of rows of x at whose multiples its time changes, and its time in us for m rows, infinite if it
# cannot serve them.
Candidate = tuple[Any, int, Callable[[int], float]]


def fastest(candidates: Iterable[Candidate], rows: Sequence[int]) -> list[Any]:
    """The fastest configs for each of these numbers of rows of x, in any order; of equal ones the first."""
    numbers, steps = np.array(rows), dict[int, tuple[list[int], NDArray[np.intp]]]()
    configs, times = [], []
    for config, step, us in candidates:
        if step not in steps:
            multiples, where = np.unique(-(-numbers // step) * step, return_inverse=True)
            steps[step] = multiples.tolist(), where
        distinct, where = steps[step]
        configs.append(config)
        times.append(np.array([us(m) for m in distinct])[where])
    return [configs[i] for i in np.unique(np.argmin(times, axis=0))]
