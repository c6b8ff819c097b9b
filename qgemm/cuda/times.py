"""Times: measured us of the configs of kernels on one GPU, by product and rows of x; data that routes consult.

A row is the measurement of one product, a `Key`, with one number of rows of x. It serves that number and smaller ones,
down to the next row; the row of the largest number serves all beyond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

HERE, SHIPPED = "timed here by `qgemm tune`", "times of this GPU in qgemm/cuda/configs/gpus"
# A config this much slower than the fastest of its row is never chosen, and not part of a report.
WORTH = 1.5
MAX_US = 1e9  # the largest time that a file may have: of a replay that lasts a quarter of an hour

Us = dict[str, dict[str, float]]  # kernel -> config, as it prints -> us


class Key(NamedTuple):
    """A product: format, activation, type of x by the kernels' name, N, K; gated: with its gate, in one launch."""

    format: str
    activation: str
    x: str
    n: int
    k: int
    gated: bool = False


class Timed(NamedTuple):
    """The row that serves a problem: its rows of x, the us of each kernel and config, and the source of the row."""

    m: int
    us: Us
    source: str


class Row(NamedTuple):
    """A row of a file. settled: whether the fastest configs were timed again, side by side."""

    key: Key
    m: int
    us: Us
    settled: bool = False


class Times:
    """Measured times of one GPU: its user's, and for products that were not tuned those that qgemm ships."""

    def __init__(self, own: Iterable[Row] = (), shipped: Iterable[Row] = ()) -> None:
        self._rows: dict[Key, list[Timed]] = {}
        for rows, source in ((shipped, SHIPPED), (own, HERE)):
            by_key: dict[Key, dict[int, Timed]] = {}
            for row in rows:
                by_key.setdefault(row.key, {})[row.m] = Timed(row.m, worth(row.us), source)
            self._rows |= {key: [by_m[m] for m in sorted(by_m)] for key, by_m in by_key.items()}

    def serving(self, key: Key, m: int) -> Timed | None:
        """The row that serves M rows of x; None if the product was never timed."""
        rows = self._rows.get(key)
        if rows is None:
            return None
        return rows[min(bisect_left(rows, m, key=lambda row: row.m), len(rows) - 1)]

    def __bool__(self) -> bool:
        return bool(self._rows)


def worth(us: Us) -> Us:
    """The times of configs that are at most WORTH times as slow as the fastest."""
    limit = WORTH * min((time for times in us.values() for time in times.values()), default=0)
    near = {kernel: {name: time for name, time in times.items() if time <= limit} for kernel, times in us.items()}
    return {kernel: times for kernel, times in near.items() if times}


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """The rows of both; of a row in both all configs, with the new time where both have one."""
    rows = {(row.key, row.m): row for row in old}
    for row in new:
        before = rows.get((row.key, row.m))
        if before is not None:
            names = {**before.us, **row.us}
            row = row._replace(us={name: {**before.us.get(name, {}), **row.us.get(name, {})} for name in names})
        rows[row.key, row.m] = row
    return [rows[name] for name in sorted(rows)]


def as_json(row: Row) -> dict[str, Any]:
    """A row of a file."""
    return {**row.key._asdict(), "m": row.m, "us": row.us, "settled": row.settled}


def rows_of(document: object) -> Iterator[Row]:
    """The rows of a parsed file; ValueError for anything that is no row."""
    if not isinstance(document, list):
        raise ValueError("no list of rows")
    for values in document:
        if not isinstance(values, dict) or set(values) != {*Key._fields, "m", "us", "settled"}:
            raise ValueError("a row has other fields")
        key = Key(*(values[name] for name in Key._fields))
        if not all(isinstance(name, str) for name in key[:3]) or not isinstance(key.gated, bool):
            raise ValueError("a row has fields of other types")
        if not all(type(size) is int and size > 0 for size in (key.n, key.k, values["m"])):
            raise ValueError("a row has no sizes")
        yield Row(key, values["m"], _us_of(values["us"]), values["settled"] is True)


def _us_of(us: object) -> Us:
    if not isinstance(us, Mapping) or not us:
        raise ValueError("a row has no times")
    for configs in us.values():
        if not isinstance(configs, Mapping) or not configs:
            raise ValueError("a kernel has no times")
        for time in configs.values():
            if type(time) not in (int, float) or not isfinite(time) or not 0 < time < MAX_US:
                raise ValueError("a time is no positive number")
    return {str(kernel): {str(name): float(time) for name, time in times.items()} for kernel, times in us.items()}
