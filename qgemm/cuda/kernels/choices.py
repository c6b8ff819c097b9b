"""Which configs a cost model chooses for some of many numbers of rows of x: each is asked for only where it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A config, the rows of x at whose multiples its time changes, and its time in us for m rows, infinite if it cannot.
Candidate = tuple[Any, int, Callable[[int], float]]


def fastest(candidates: Iterable[Candidate], rows: Sequence[int]) -> list[Any]:
    """The configs of least time for any of these numbers of rows of x, in any order; of equals the first."""
    asked, steps = np.array(rows), dict[int, tuple[list[int], NDArray[np.intp]]]()
    configs, times = [], []
    for config, step, us in candidates:
        if step not in steps:
            multiples, where = np.unique(-(-asked // step) * step, return_inverse=True)
            steps[step] = multiples.tolist(), where
        distinct, where = steps[step]
        configs.append(config)
        times.append(np.array([us(m) for m in distinct])[where])
    return [configs[i] for i in np.unique(np.argmin(times, axis=0))]
