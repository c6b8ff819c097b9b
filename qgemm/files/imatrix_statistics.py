"""Statistics of an importance matrix: for each tensor those that `llama-imatrix --show-statistics` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .imatrix_sums import Doubles, Sums

ACTIVE = 1e-5  # least mean square of an active column
LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")


class Statistics(NamedTuple):
    """One tensor: of its mean squares E[x x] by column, all experts together, and of the previous layer's.

    total: their sum. active: share of columns above ACTIVE. entropy: of their distribution, relative to a uniform one.
    outliers: share of columns more than a standard deviation above the mean. cosine: between the mean squares of this
    layer and the previous one, None for the first. sensitivity: the mean square of the gradients of outputs, each
    token weighted by the squares of its inputs, or None.
    """

    name: str
    tokens: int
    total: float
    least: float
    greatest: float
    mean: float
    deviation: float
    active: float
    columns: int
    entropy: float
    outliers: float
    cosine: float | None
    sensitivity: float | None


def statistics(sums: Mapping[str, Sums]) -> list[Statistics]:
    """The statistics of all tensors, the largest sum first."""
    means = {name: _means(entry) for name, entry in sums.items()}
    lines = [_statistics(name, entry, means) for name, entry in sums.items()]
    return sorted(lines, key=lambda line: -line.total)


def _means(entry: Sums) -> Doubles:
    """The mean squares [experts * K]; zeros for an expert without a token."""
    return (entry.squares / np.maximum(entry.tokens, 1)[:, None]).reshape(-1)


def _statistics(name: str, entry: Sums, means: Mapping[str, Doubles]) -> Statistics:
    values = means[name]
    total, deviation = float(values.sum()), float(values.std())
    shares = values[values > 0] / total if total else np.ones(1)
    entropy = float(-(shares * np.log2(shares)).sum()) / np.log2(len(values)) if len(values) > 1 else 0.0
    tokens = float(entry.tokens.sum())
    squares = float(entry.squares.sum())
    sensitivity = None if entry.fisher is None else float(entry.fisher.sum()) / squares if squares else 0.0
    return Statistics(
        name, int(tokens), total, float(values.min()), float(values.max()), float(values.mean()), deviation,
        float((values > ACTIVE).mean()), len(values), entropy,
        float((values > values.mean() + deviation).mean()) if deviation else 0.0, _cosine(name, means), sensitivity,
    )  # fmt: skip


def _cosine(name: str, means: Mapping[str, Doubles]) -> float | None:
    layer = LAYER.match(name)
    before = means.get(f"blk.{int(layer[1]) - 1}.{layer[2]}") if layer else None
    if before is None or before.shape != means[name].shape:
        return None
    norm = float(np.linalg.norm(before) * np.linalg.norm(means[name]))
    return float(before @ means[name]) / norm if norm else None
