"""The tuner: times the configs of every kernel that can serve the products of a model, on the GPU at hand.

The products of one matrix shape are a batch of jobs, one for each activation, type of x and number of rows of x. Their
candidates are timed in rounds, the k-th of every job in round k, in the order that the cost model ranks them: whenever
the tuner stops, every job has times of its most promising configs. At the end of a batch the fastest of a job are timed
again, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product, zip_longest
from math import inf, prod
from typing import Any, NamedTuple, Protocol

from qgemm.codec.float_types import DType
from qgemm.codec.format import Format
from qgemm.codec.group_activations import multiplies
from qgemm.errors import UnsupportedError
from qgemm.packed import Packed

from .jit.codegen import Template
from .jit.load import compiles
from .kernels.kernel import Kernel
from .kernels.routes import alternatives, source_of
from .problem import C_TYPES, Gpu, Output, Problem
from .times import Key, Row, Us

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # numbers of rows of x, up to a long prompt
REPEATS, SETTLING = 3, 7  # replays of a candidate at first, and of the fastest side by side
NEAR, MAX_NEAR = 1.05, 4  # candidates that are timed again: at most this much slower, and this number

Compile = Callable[[Sequence[Callable[[], bool]]], object]  # runs tasks, on all cores


class Candidate(NamedTuple):
    """A kernel with one of its configs."""

    kernel: Kernel
    config: Any

    @property
    def name(self) -> tuple[str, str]:
        """The names of both in a row of times."""
        return self.kernel.name, str(self.config)


class Clock(Protocol):
    """Times candidates; tests have one without a GPU."""

    def matrix(self, w: Packed) -> None:
        """The weights of the next products."""

    def us(self, p: Problem, candidates: Sequence[Candidate], repeats: int) -> Sequence[float | None]:
        """The least us of each candidate, replayed in turns; None for one that fails on this GPU."""


@dataclass
class Job:
    """One product with one number of rows of x: its candidates, the first of which is chosen without times."""

    problem: Problem
    candidates: list[Candidate]
    us: Us = field(default_factory=dict)
    settled: bool = False

    @property
    def key(self) -> Key:
        """The product."""
        p = self.problem
        return Key(p.format.name, p.activation, p.x, p.n, p.k)

    @property
    def row(self) -> Row:
        """Its row of times."""
        return Row(self.key, self.problem.m, self.us, self.settled)

    def timed(self, candidate: Candidate) -> float | None:
        """The us of a candidate."""
        kernel, config = candidate.name
        return self.us.get(kernel, {}).get(config)

    def note(self, candidate: Candidate, us: float | None) -> None:
        """Keep the time of a candidate."""
        kernel, config = candidate.name
        if us is not None:
            self.us.setdefault(kernel, {})[config] = round(us, 3)

    def ranked(self) -> list[tuple[float, Candidate]]:
        """The candidates that were timed, the fastest first."""
        times = [(us, candidate) for candidate in self.candidates if (us := self.timed(candidate)) is not None]
        return sorted(times, key=lambda pair: pair[0])

    @property
    def gain(self) -> float:
        """The us of the candidate that is chosen without times, relative to those of the fastest."""
        default, ranked = self.timed(self.candidates[0]), self.ranked()
        return default / ranked[0][0] if default and ranked else 1.0


class Batch(NamedTuple):
    """The jobs of the weights of one format and shape."""

    w: Packed
    jobs: list[Job]


class Tuner:
    """The jobs of a model on one GPU."""

    def __init__(self, batches: Sequence[Batch], clock: Clock, save: Callable[[list[Row]], object]) -> None:
        self.batches, self._clock, self._save = batches, clock, save

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all batches."""
        return [job for batch in self.batches for job in batch.jobs]

    @property
    def missing(self) -> int:
        """The number of times that are missing."""
        return sum(job.timed(candidate) is None for job in self.jobs for candidate in job.candidates)

    def run(self, compile_all: Compile, advance: Callable[[Job], object], now: Callable[[], float], end: float) -> bool:
        """Time until `end`, of which every batch may use an equal part; whether nothing is missing.

        The times of a batch are saved when it ends, also by an exception, Ctrl-C included.
        """
        finished = True
        for number, batch in enumerate(self.batches):
            start = now()
            part = start + (end - start) / (len(self.batches) - number)
            try:
                finished = self._run(batch, compile_all, advance, partial(_late, now, part)) and finished
            finally:
                self._save([job.row for job in batch.jobs if job.us])
        return finished

    def _run(
        self, batch: Batch, compile_all: Compile, advance: Callable[[Job], object], late: Callable[[], bool]
    ) -> bool:
        """Whether all candidates of a batch are timed and the fastest settled."""
        unsettled = [job for job in batch.jobs if not job.settled]
        if not unsettled:
            return True
        self._clock.matrix(batch.w)
        for pairs in rounds(unsettled):
            if late():
                return False
            compile_all([task for job, candidate in pairs for task in tasks(job.problem, candidate)])
            for job, candidate in pairs:
                if late():
                    return False
                (us,) = self._clock.us(job.problem, [candidate], REPEATS)
                job.note(candidate, us)
                if us is None:
                    job.candidates.remove(candidate)
                if not job.candidates:
                    raise UnsupportedError(f"{job.problem}: every config fails on this GPU")
                advance(job)
        for job in unsettled:
            if late():
                return False
            self._settle(job)
        return True

    def _settle(self, job: Job) -> None:
        """Time the fastest candidates again, side by side: one replay may have met a slow phase of the GPU."""
        ranked = job.ranked()
        near = [candidate for us, candidate in ranked if us <= NEAR * ranked[0][0]][:MAX_NEAR]
        if len(near) > 1:
            for candidate, us in zip(near, self._clock.us(job.problem, near, SETTLING), strict=True):
                job.note(candidate, us)
        job.settled = True


def _late(now: Callable[[], float], end: float) -> bool:
    return now() >= end


def rounds(jobs: Sequence[Job]) -> Iterator[list[tuple[Job, Candidate]]]:
    """The candidates that have no time: the first of every job, then the second of every job."""
    columns = [[(job, candidate) for candidate in job.candidates if job.timed(candidate) is None] for job in jobs]
    for pairs in zip_longest(*columns):
        yield [pair for pair in pairs if pair is not None]


def batches_of(
    weights: Iterable[Packed], gpu: Gpu, rows: Sequence[int], activations: Sequence[str], dtypes: Sequence[DType],
    timed: Iterable[Row],
) -> list[Batch]:  # fmt: skip
    """The batches of a model's matrices, those with most bytes first. timed: rows of an earlier run, to go on from."""
    alike: dict[tuple[Format, tuple[int, ...]], list[Packed]] = {}
    for w in weights:
        if w.ndim == 2 and w.format.levels is not None and min(w.shape) > 0:
            alike.setdefault((w.format, tuple(w.shape)), []).append(w)
    before, batches = {(row.key, row.m): row for row in timed}, []
    for (fmt, (n, k)), same in sorted(
        alike.items(), key=lambda item: -sum(prod(w.shape) * w.format.bpw for w in item[1])
    ):
        jobs = []
        for activation, dtype, m in product(activations, dtypes, rows):
            if not multiplies(activation, fmt):
                continue
            outputs = (Output(n, str(dtype)),)
            p = Problem(fmt, activation, m, n, k, gpu.sm, C_TYPES[str(dtype)], outputs, device=gpu.device, sms=gpu.sms)
            job = Job(p, candidates(p))
            if (row := before.get((job.key, m))) is not None:
                job.us, job.settled = {kernel: dict(times) for kernel, times in row.us.items()}, row.settled
            if len(job.candidates) > 1:
                jobs.append(job)
        if jobs:
            batches.append(Batch(same[0], jobs))
    return batches


def candidates(p: Problem) -> list[Candidate]:
    """The configs of all kernels that can serve a problem: the best of each kernel, then the second of each."""
    columns = []
    for row in alternatives(p):
        ranked = [config for config, us in row.kernel.ranked(p) if us is None or us < inf]
        columns.append([Candidate(row.kernel, config) for config in ranked])
    return [candidate for candidate in chain(*zip_longest(*columns)) if candidate is not None]


def tasks(p: Problem, candidate: Candidate) -> list[Callable[[], bool]]:
    """Calls that compile the kernel of a candidate for this problem, for each type of x that it may read."""
    kernel, config = candidate
    sources = (p._replace(x=x) for x in kernel.reads(p))
    templates = [kernel.template(source, config) for source in sources] if config is not None else []
    return [partial(_compiles, source_of(kernel.name), p.format, template) for template in templates]


def _compiles(kernel: str, fmt: Format, template: Template) -> bool:
    """Compile and load a kernel, if that is possible; the clock refuses the candidate if not."""
    try:
        return compiles(kernel, fmt, template)
    except RuntimeError:  # CompileError, and the driver's
        return False
