"""Encoding on the CPU beside ggml_quantize_chunk of ggml, which encodes rows on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from qgemm.codec.format import Format
from qgemm.codec.search import searched
from qgemm.errors import QgemmError
from qgemm.formats import FORMATS
from qgemm.ops import quantize
from qgemm.parallel import workers
from qgemm.text import columns

from .contest import cpu_name, document
from .ggml import Ggml
from .goals import ENCODE_OVER_GGML, ENCODE_OVER_GGML_GRIDS, FITTED
from .turns import Calls, Worker, least

__all__ = "document", "missed", "run", "table"  # for benchmarks.command

ACTIVATION_FORMATS = ("q8_1",)  # types without a row encoder of weights in ggml
NAMES = tuple(
    name for name, fmt in FORMATS.items()
    if fmt.ggml_type is not None and not fmt.plain and fmt.encode and name not in ACTIVATION_FORMATS
)  # fmt: skip
K = 4096
WEIGHTS, SEARCHED_WEIGHTS, GRID_WEIGHTS = 1 << 22, 1 << 20, 1 << 19  # in a call: more for faster encoders
ROUNDS = 5
OURS, GGML = "qgemm", "ggml"


class Case(NamedTuple):
    """One format, with or without an importance matrix."""

    format: str
    imatrix: bool

    @property
    def fmt(self) -> Format:
        """The format."""
        return FORMATS[self.format]

    def x(self) -> Any:
        """Normal weights [N, K]."""
        size = GRID_WEIGHTS if self.fmt.tile.grid is not None else SEARCHED_WEIGHTS if searched(self.fmt) else WEIGHTS
        return 0.02 * np.random.default_rng(0).standard_normal((size // K, K), np.float32)

    def importance(self) -> Any:
        """The importance of each column [K], or None."""
        return np.random.default_rng(1).random(K, np.float32) ** 2 if self.imatrix else None

    def goal(self) -> float:
        """The least speed a thread over ggml's; 0 where there is no goal."""
        if self.fmt.tile.grid is not None:
            return ENCODE_OVER_GGML_GRIDS
        return ENCODE_OVER_GGML if self.format in FITTED else 0.0


class Row(NamedTuple):
    """A case and the least milliseconds of both libraries for `weights` weights."""

    case: Case
    ms: dict[str, float]
    weights: int

    def speed(self, name: str) -> float:
        """Millions of weights a second."""
        return self.weights / self.ms[name] / 1e3

    def document(self) -> dict[str, Any]:
        """For JSON."""
        ms = {name: float(f"{ms:.4g}") for name, ms in self.ms.items()}
        return {**self.case._asdict(), "weights": self.weights, "ms": ms}

    def ratio(self, threads: int) -> float:
        """Our speed a thread relative to ggml's on one thread."""
        return self.ms[GGML] / self.ms[OURS] / threads


def cases(names: Sequence[str]) -> list[Case]:
    """The cases: with an importance matrix if the format uses it, without if the format does not require it."""
    every = (Case(name, imatrix) for name in names for imatrix in (False, True))
    return [case for case in every if (searched(case.fmt) if case.imatrix else not case.fmt.encoding.needs_importance)]


def ours() -> Callable[[Case], Calls]:
    """In a worker: qgemm.quantize."""

    def prepare(case: Case) -> Calls:
        x, importance = case.x(), case.importance()
        result: list[Any] = [None]

        def encode() -> None:
            result[0] = quantize(x, case.fmt, imatrix=importance)

        return Calls({OURS: [encode]}, lambda name: result[0].blocks.tobytes(), lambda: None)

    return prepare


def of_ggml(folder: Path) -> Callable[[Case], Calls]:
    """In a worker: ggml_quantize_chunk."""
    library = Ggml(folder, 1)

    def prepare(case: Case) -> Calls:
        encode = library.encoder(case.fmt, case.x(), case.importance())
        return Calls({GGML: [encode]}, lambda name: encode().tobytes(), lambda: None)

    return prepare


def run(ggml: Path, names: Sequence[str] = NAMES, rounds: int = ROUNDS) -> dict[str, Any]:
    """All rows as a document; QgemmError for bytes that are not ggml's."""
    threads, version = workers(), Ggml(ggml, 1).version()
    pool = {GGML: Worker(of_ggml, (ggml,)), OURS: Worker(ours, (), {"QGEMM_THREADS": str(threads)})}
    rows = [row.document() for row in measured(pool, cases(names), rounds)]
    return {"cpu": cpu_name(), "threads": threads, "ggml": version, "rows": rows}


def measured(pool: Mapping[str, Worker], cases: Sequence[Case], rounds: int) -> Iterator[Row]:
    """A row for each case, with a bar on stderr; then the workers end."""
    for case in tqdm(cases, disable=None, leave=False):
        seconds = {name: shortest for (_, name), shortest in least(pool, case, rounds).items()}
        if pool[OURS].ask("result", OURS) != pool[GGML].ask("result", GGML):
            raise QgemmError(f"{case}: the bytes are not ggml's")
        yield Row(case, {name: 1e3 * shortest for name, shortest in seconds.items()}, case.x().size)
    for worker in pool.values():
        worker.close()


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """The rows of a results document."""
    return [Row(Case(row["format"], row["imatrix"]), row["ms"], row["weights"]) for row in results["rows"]]


def table(results: Mapping[str, Any]) -> str:
    """The document for a terminal, each row with its goal."""
    cells = []
    for row in rows_of(results):
        ratio, goal = row.ratio(results["threads"]), row.case.goal()
        least_ratio = (f"{goal:g}" + "!" * (ratio < goal)) if goal else ""
        kind = "imatrix" if row.case.imatrix else "plain"
        cells.append(
            (row.case.format, kind, f"{row.speed(OURS):.1f}", f"{row.speed(GGML):.1f}", f"{ratio:.2f}", least_ratio)
        )
    facts = f"{results['cpu']}: {results['threads']} threads, ggml {results['ggml']} one; millions of weights a second"
    head = ("format", "", OURS, GGML, "ratio a thread", "at least")
    return f"{facts}\n\n{columns('<<>>>>', [head, *cells])}"


def missed(results: Mapping[str, Any]) -> int:
    """The number of missed goals."""
    return sum(row.ratio(results["threads"]) < row.case.goal() for row in rows_of(results))
