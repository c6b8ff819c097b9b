"""Encoding on the CPU beside ggml, whose ggml_quantize_chunk encodes rows on one thread."""

from __future__ import annotations

import json
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

from .contest import cpu_name
from .ggml import Ggml
from .goals import ENCODE_OVER_GGML, ENCODE_OVER_GGML_GRIDS, FITTED
from .turns import Calls, Worker, least

OF_ACTIVATIONS = ("q8_1",)  # types without a row encoder of weights in ggml
NAMES = tuple(
    name for name, fmt in FORMATS.items()
    if fmt.ggml_type is not None and not fmt.plain and fmt.encode and name not in OF_ACTIVATIONS
)  # fmt: skip
K = 4096
WEIGHTS, SEARCHED, OF_GRIDS = 1 << 22, 1 << 20, 1 << 19  # of a call: more where an encoder is faster
ROUNDS = 5
OURS, GGML = "qgemm", "ggml"


class Case(NamedTuple):
    """One type, with an importance matrix or without."""

    format: str
    imatrix: bool

    @property
    def fmt(self) -> Format:
        """The type."""
        return FORMATS[self.format]

    def x(self) -> Any:
        """Normal weights [N, K]."""
        size = OF_GRIDS if self.fmt.grid is not None else SEARCHED if searched(self.fmt) else WEIGHTS
        return 0.02 * np.random.default_rng(0).standard_normal((size // K, K), np.float32)

    def importance(self) -> Any:
        """Of each column [K], or None."""
        return np.random.default_rng(1).random(K, np.float32) ** 2 if self.imatrix else None

    def goal(self) -> float:
        """The least speed a thread over ggml's; 0 where there is no goal."""
        if self.fmt.grid is not None:
            return ENCODE_OVER_GGML_GRIDS
        return ENCODE_OVER_GGML if self.format in FITTED else 0.0


class Row(NamedTuple):
    """A case and the least milliseconds of both, for so many weights."""

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
        """Our speed over ggml's on one thread times the threads."""
        return self.ms[GGML] / self.ms[OURS] / threads


def cases(names: Sequence[str]) -> list[Case]:
    """What ggml encodes: with an importance matrix where that says something, without where it may."""
    every = (Case(name, imatrix) for name in names for imatrix in (False, True))
    return [case for case in every if (searched(case.fmt) if case.imatrix else not case.fmt.needs_importance)]


def ours() -> Callable[[Case], Calls]:
    """In a worker: qgemm.quantize."""

    def prepare(case: Case) -> Calls:
        x, importance = case.x(), case.importance()
        made: list[Any] = [None]

        def encode() -> None:
            made[0] = quantize(x, case.fmt, imatrix=importance)

        return Calls({OURS: [encode]}, lambda name: made[0].blocks.tobytes(), lambda: None)

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
    threads, version = workers(), Ggml(ggml, 1).version
    taking = {GGML: Worker(of_ggml, (ggml,)), OURS: Worker(ours, (), {"QGEMM_THREADS": str(threads)})}
    rows = [row.document() for row in measured(taking, cases(names), rounds)]
    return {"cpu": cpu_name(), "threads": threads, "ggml": version, "rows": rows}


def measured(taking: Mapping[str, Worker], wanted: Sequence[Case], rounds: int) -> Iterator[Row]:
    """A row a case, with a bar on stderr, then the workers end."""
    for case in tqdm(wanted, disable=None, leave=False):
        seconds = {name: found for (_, name), found in least(taking, case, rounds).items()}
        if taking[OURS].ask("result", OURS) != taking[GGML].ask("result", GGML):
            raise QgemmError(f"{case}: the bytes are not ggml's")
        yield Row(case, {name: 1e3 * found for name, found in seconds.items()}, case.x().size)
    for worker in taking.values():
        worker.close()


def rows_of(found: Mapping[str, Any]) -> list[Row]:
    """The rows of a document."""
    return [Row(Case(each["format"], each["imatrix"]), each["ms"], each["weights"]) for each in found["rows"]]


def table(found: Mapping[str, Any]) -> str:
    """The document for a terminal, each row beside what is asked of it."""
    cells = []
    for row in rows_of(found):
        ratio, goal = row.ratio(found["threads"]), row.case.goal()
        asked = (f"{goal:g}" + "!" * (ratio < goal)) if goal else ""
        kind = "imatrix" if row.case.imatrix else "plain"
        cells.append((row.case.format, kind, f"{row.speed(OURS):.1f}", f"{row.speed(GGML):.1f}", f"{ratio:.2f}", asked))
    facts = f"{found['cpu']}: {found['threads']} threads, ggml {found['ggml']} one; millions of weights a second"
    head = ("format", "", OURS, GGML, "ratio a thread", "at least")
    return f"{facts}\n\n{columns('<<>>>>', [head, *cells])}"


def missed(found: Mapping[str, Any]) -> int:
    """How many goals are missed."""
    return sum(row.ratio(found["threads"]) < row.case.goal() for row in rows_of(found))


def document(found: Mapping[str, Any]) -> str:
    """JSON, a row a line."""
    facts = {name: value for name, value in found.items() if name != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in found["rows"])
    return f'{json.dumps(facts)[:-1]}, "rows": [\n  {rows}\n]}}\n'
