"""Fit the cost model of prefill_sm90 to measured times, and pick the configs that are worth compiling.

For each format and type of x: two numbers for each config by least squares, in which configs near the fastest have most
weight. Then configs are dropped one by one, always the one whose loss costs least by the measured times of the configs
that the model would choose. Problems for which the model chooses badly gain weight in the next fit.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm import FORMATS
from qgemm.codec.format import Format
from qgemm.cuda import configs
from qgemm.cuda.kernels import sm90_cost
from qgemm.cuda.kernels.sm90_config import Sm90Config
from qgemm.cuda.kernels.sm90_cost import DATA, Model, Work, tile_facts, work_of
from qgemm.cuda.layout.tile import ROWS
from qgemm.text import json_lines

VARIANTS = 28  # configs of a format
START = Model(0.29, 0.15, 26.0, (0.6, 0.5), (0.6, 0.65), (1.7, 0.75), 0.3, (1.8, 1.4))
L2_MEGABYTES = 2  # index in a Model of the number that is not fitted
SHAPES = ((4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (28672, 8192), (5120, 5120), (11008, 4096),
          (2048, 8192), (1024, 4096))  # fmt: skip
M = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 448, 512, 1024, 4096)
NEAR = 0.2  # a config this much slower than the fastest has 1/e of its weight
OUTLIER = 0.04  # residual (of logarithms) from which on a measurement loses weight
UNMEASURED = 1.03  # factor on the time of a config that was only predicted
ROW, OTHER, PREDICTED = (0.003, 0.002), (0.02, 0.015), (0.04, 0.05)  # (free regret, regret that costs 1 more)
GAIN = 3  # weight of saved time relative to regrets

COLUMNS = {
    "tokens": "rows of x of a work tile", "row_blocks": "of 64 rows of W, of a work tile",
    "wg_split_k": "warpgroups that share K", "k_blocks_per_stage": "of the pipeline",
    "single_tile": "at most one work tile per CTA", "fixed_us": "what a launch takes at least",
    "k_block_us": "what a CTA takes for a k_block",
}  # fmt: skip

Floats = NDArray[np.float64]


class Problem(NamedTuple):
    """N, K, M; the time of the earlier choice or the fastest predicted time; the allowed regret."""

    n: int
    k: int
    m: int
    reference: float
    allowed: tuple[float, float]


class Fitted(NamedTuple):
    """A fit of one format: fixed_us and k_block_us of each config; indices of the configs to keep."""

    fixed: Floats
    k_block: Floats
    keep: list[int]


class Table:
    """The measurements of one format: problems x configs, nan if not measured."""

    def __init__(self, fmt: Format, rows: Sequence[dict[str, Any]], results: set[tuple[Any, ...]], sms: int):
        self.format, self.sms = fmt, sms
        mine = [row for row in rows if row["format"] == fmt.name]
        names = sorted({name for row in mine for name in row["us"]})
        self.configs = [config for config in map(parse, names) if config.fits(fmt)]
        keys = [key(config) for config in self.configs]
        self.problems = [
            Problem(*size, row["us"][row["before"]], ROW if (fmt.name, *size) in results else OTHER)
            for row in mine
            for size in [(row["n"], row["k"], row["m"])]
        ]
        self.us = np.array([[row["us"].get(name, np.nan) for name in keys] for row in mine])
        sizes = {problem[:3] for problem in self.problems}
        extra = [Problem(n, k, m, 0.0, PREDICTED) for (n, k), m in product(SHAPES, M) if (n, k, m) not in sizes]
        self.problems += extra
        self.us = np.concatenate([self.us, np.full((len(extra), len(keys)), np.nan)])
        self.possible = np.array([[c.serves(p.m, -(-p.n // ROWS), sms) for c in self.configs] for p in self.problems])
        works = [[work_of(fmt, c, p.m, p.n, p.k, sms, START.l2_megabytes) for c in self.configs] for p in self.problems]
        self.work = Work(*np.moveaxis(np.array(works, float), 2, 0))
        self.seen = ~np.isnan(self.us)
        fastest = np.nanmin(np.where(self.seen, self.us, np.inf), axis=1, keepdims=True)
        self.weight = np.where(self.seen, np.exp(-(np.where(self.seen, self.us, 1) / fastest - 1) / NEAR) + 0.03, 0)
        self.rows = np.array([p.allowed is ROW for p in self.problems])
        self.weight *= np.where(self.rows, 2, 1)[:, None]

    def predict(self, model: Model, fixed: Floats, k_block: Floats) -> Floats:
        """us of all problems and configs, inf if a config cannot serve a problem."""
        return np.where(self.possible, model.us(fixed, k_block, self.work), np.inf)

    def with_references(self, predicted: Floats) -> None:
        """Set the references: for problems without a measurement the fastest predicted time."""
        self.predicted = predicted
        self.problems = [
            p if p.reference else p._replace(reference=float(fastest))
            for p, fastest in zip(self.problems, predicted.min(1), strict=True)
        ]
        self.reference = np.array([p.reference for p in self.problems])
        self.free, self.scale = np.array([p.allowed for p in self.problems]).T

    def regrets(self, predicted: Floats, keep: Sequence[int]) -> Floats:
        """The relative excess of the model's choices among these configs over the references."""
        kept_us = predicted[:, keep]
        choice, problem_index = kept_us.argmin(1), np.arange(len(kept_us))
        measured = self.us[:, keep][problem_index, choice]
        guess = UNMEASURED * np.where(self.rows | (self.scale == OTHER[1]), kept_us[problem_index, choice], 1)
        guess = np.where(self.scale == PREDICTED[1], self.predicted[:, keep][problem_index, choice], guess)
        return np.where(np.isnan(measured), guess, measured) / self.reference - 1

    def cost(self, predicted: Floats, keep: Sequence[int]) -> float:
        """The sum of squared regrets in units of the allowed regret; gains count a little."""
        if np.isinf(predicted[:, keep].min(1)).any():
            return np.inf
        regrets = self.regrets(predicted, keep)
        beyond = np.maximum(0, regrets - self.free) / self.scale
        return float((beyond**2 + GAIN * np.clip(regrets, -0.2, 0.5)).sum())


def parse(name: str) -> Sm90Config:
    """The config of a key."""
    *numbers, single_tile = map(int, name.split(","))
    return Sm90Config(*numbers, bool(single_tile))


def key(config: Sm90Config) -> str:
    """The name of a config in a file of measurements: tokens,row_blocks,wg_split_k,k_blocks_per_stage,single_tile."""
    return ",".join(str(int(value)) for value in config[:5])


def solve(table: Table, model: Model, start: Fitted, boost: Floats, rounds: int = 12) -> Fitted:
    """Least squares of log(predicted / measured), independently for each config."""
    fixed, log_k = start.fixed.copy(), np.log(start.k_block)
    measured, seen, step, ridge = np.where(table.seen, table.us, 1), table.seen & table.possible, 1e-5, 4e-4

    def residuals(fixed: Floats, log_k: Floats) -> Floats:
        predicted = np.maximum(model.us(fixed, np.exp(log_k), table.work), 0.1)
        return np.where(seen, np.log(predicted / measured), 0)

    first = fixed.copy(), log_k.copy()
    for _ in range(rounds):
        r = residuals(fixed, log_k)
        weight = table.weight * boost / (1 + (r / OUTLIER) ** 2)
        by_fixed = (residuals(fixed + step, log_k) - r) / step
        by_k = (residuals(fixed, log_k + step) - r) / step
        a, b, c = ((weight * u * v).sum(0) for u, v in ((by_fixed, by_fixed), (by_fixed, by_k), (by_k, by_k)))
        a, c = a + ridge, c + ridge
        gradient = ((weight * by_fixed * r).sum(0) + ridge * (fixed - first[0]),
                    (weight * by_k * r).sum(0) + ridge * (log_k - first[1]))  # fmt: skip
        determinant = a * c - b * b
        fixed -= 0.8 * np.clip((c * gradient[0] - b * gradient[1]) / determinant, -1, 1)
        log_k -= 0.8 * np.clip((a * gradient[1] - b * gradient[0]) / determinant, -0.3, 0.3)
    return Fitted(fixed, np.exp(log_k), start.keep)


def begin(table: Table) -> Fitted:
    """A first guess: the time of a k_block in the problem with most k_blocks, for each config."""
    k_blocks = np.where(table.seen, table.work.k_blocks, -1)
    largest = k_blocks.argmax(0), np.arange(len(table.configs))
    return Fitted(
        np.full(len(table.configs), 1.5), table.us[largest] / k_blocks[largest], list(range(len(table.configs)))
    )


def boosted(table: Table, model: Model, start: Fitted, rounds: int) -> Fitted:
    """The best of several fits, each with more weight on choices whose regret is not allowed."""
    boost, best = np.ones_like(table.us), (np.inf, start)
    for _ in range(rounds):
        fitted = solve(table, model, start, boost)
        predicted = table.predict(model, fitted.fixed, fitted.k_block)
        best = min(best, (table.cost(predicted, start.keep), fitted), key=lambda pair: pair[0])
        regrets, keep = table.regrets(predicted, start.keep), np.array(start.keep)
        bad = np.flatnonzero((regrets > table.free + table.scale / 4) & table.seen[:, keep].any(1))
        if not len(bad):
            break
        chosen = keep[predicted[:, keep].argmin(1)]
        fastest = keep[np.where(table.seen, table.us, np.inf)[:, keep].argmin(1)]
        boost[bad, chosen[bad]] *= 1.6
        boost[bad, fastest[bad]] *= 1.6
    return best[1]


def select(table: Table, model: Model, counts: Sequence[int]) -> dict[int, Fitted]:
    """Drop configs one by one: a fit for each of these counts of remaining configs."""
    fitted = solve(table, model, begin(table), np.ones_like(table.us), rounds=25)
    table.with_references(table.predict(model, fitted.fixed, fitted.k_block))
    fitted, fits = boosted(table, model, fitted, 25), {}
    while len(fitted.keep) > min(counts):
        predicted = table.predict(model, fitted.fixed, fitted.k_block)
        rest = [[i for i in fitted.keep if i != out] for out in fitted.keep]
        fitted = fitted._replace(keep=min(rest, key=lambda keep: table.cost(predicted, keep)))
        if len(fitted.keep) < 40:
            fitted = boosted(table, model, fitted, 25 if len(fitted.keep) in counts else 8)
        if len(fitted.keep) in counts:
            fits[len(fitted.keep)] = fitted
    return fits


def worst(table: Table, model: Model, fitted: Fitted) -> tuple[float, float, float]:
    """Regrets on measured problems: the largest on rows of the results, the largest on others, and the mean."""
    regrets = table.regrets(table.predict(model, fitted.fixed, fitted.k_block), fitted.keep)
    rest = regrets[~table.rows & (table.scale != PREDICTED[1])]
    return regrets[table.rows].max(initial=-1), rest.max(initial=-1), np.concatenate([regrets[table.rows], rest]).mean()


def constants(tables: Sequence[Table]) -> Model:
    """Constants of the cost model: the median over formats of the best fit of each format."""
    best_fits = []
    for table in tables:
        theta = np.log(flat(START))
        fitted = solve(table, START, begin(table), np.ones_like(table.us), rounds=25)
        for _ in range(12):  # alternately the numbers of the configs, and one step of the constants
            model = unflat(np.exp(theta))
            fitted = solve(table, model, fitted, np.ones_like(table.us), rounds=3)
            seen = table.seen & table.possible

            def residuals(theta: Floats, fitted: Fitted = fitted, table: Table = table, seen: Any = seen) -> Floats:
                us = unflat(np.exp(theta)).us(fitted.fixed, fitted.k_block, table.work)
                return np.log(np.maximum(us, 0.1)[seen] / table.us[seen])

            r = residuals(theta)
            weight = table.weight[seen] / (1 + (r / OUTLIER) ** 2)
            slopes = np.stack([(residuals(theta + 1e-5 * unit) - r) / 1e-5 for unit in np.eye(len(theta))])
            slopes[L2_MEGABYTES] = 0
            normal = (slopes * weight) @ slopes.T + 0.02 * np.eye(len(theta))
            theta = theta - np.clip(np.linalg.solve(normal, (slopes * weight) @ r), -0.3, 0.3)
        best_fits.append(np.exp(theta))
    return unflat([float(f"{value:.3g}") for value in np.median(best_fits, axis=0)])


def flat(model: Model) -> Floats:
    """The numbers of a model as a vector."""
    return np.array([number for value in model for number in (value if isinstance(value, tuple) else (value,))])


def unflat(numbers: Any) -> Model:
    """The model with these numbers."""
    left = iter([float(number) for number in numbers])
    return Model(*((next(left), next(left)) if isinstance(value, tuple) else next(left) for value in START))


def load(path: Path) -> dict[str, Any]:
    """A file of measurements."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def tables_of(measured: dict[str, Any], results: set[tuple[Any, ...]]) -> Iterator[Table]:
    """A table for each format."""
    for name in dict.fromkeys(row["format"] for row in measured["rows"]):
        yield Table(FORMATS[name], measured["rows"], results, measured["sms"])


def rows_of(table: Table, fitted: Fitted) -> Iterator[list[Any]]:
    """The rows of the data file for one table."""
    for i in sorted(fitted.keep, key=lambda i: table.configs[i]):
        numbers = round(float(fitted.fixed[i]), 3), round(float(fitted.k_block[i]), 4)
        yield [*map(int, table.configs[i][:5]), *numbers]


def fit(measured: dict[str, Any], results: set[tuple[Any, ...]], only: Sequence[str] = ()) -> dict[str, Any]:
    """The document of configs/prefill_sm90.json. results: (format, N, K, M) of rows with the least allowed regret.

    only: formats to fit with the current constants; the rest of the document stays.
    """
    tables = [table for table in tables_of(measured, results) if not only or table.format.name in only]
    model = sm90_cost.model() if only else constants(tables)
    formats: dict[str, list[Any]] = dict(configs.read(DATA)["formats"]) if only else {}
    for table in tables:
        fitted = select(table, model, [VARIANTS])[VARIANTS]
        on_rows, elsewhere, mean = worst(table, model, fitted)
        rows = f"on rows of the results {on_rows:.1%} at most, " if on_rows > -1 else ""
        regrets = f"regret {rows}elsewhere {elsewhere:.1%}, on average {mean:.1%}"
        print(f"{table.format}: {len(fitted.keep)} configs; {regrets}", flush=True)
        formats[table.format.name] = list(rows_of(table, fitted))
    return {
        "gpu": measured["gpu"], "model": model._asdict(),
        "tiles": {name: tile_facts(FORMATS[name]) for name in formats},
        "columns": COLUMNS, "formats": formats,
    }  # fmt: skip


def write(document: dict[str, Any]) -> None:
    """Replace the data file, with a line for each config."""
    lines = []
    for line in json_lines({**document, "formats": {}}):
        if line.startswith('  "formats"'):
            break
        lines.append(line)
    lines.append('  "formats": {')
    names = list(document["formats"])
    for name in names:
        rows = document["formats"][name]
        lines.append(f'    "{name}": [')
        lines += [f"      {json.dumps(row)}{',' * (row is not rows[-1])}" for row in rows]
        lines.append(f"    ]{',' * (name != names[-1])}")
    configs.path(DATA).write_text("\n".join([*lines, "  }", "}"]) + "\n")
    configs.read.cache_clear()
