"""Fuzzing of everything that qgemm reads: changed files, each judged by a reference that is slow and strict.

    make fuzz ARGS="--minutes 10"
    python tools/fuzz.py --count 100000 --kind npz --jobs 2
    python tools/fuzz.py --seed 1 --kind npz --case 4711      one execution, with what it found

An escape is any exception but a QgemmError, any warning, a message that is not printable ASCII, a verdict other than
the reference's, weights that the reference computes otherwise, more than 50 ms, or more than 16 MiB beyond the input.
docs/fuzzing.md says what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing import Pool
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from fuzzing.inputs import KINDS, Kind
from fuzzing.reference import Files, Invalid, Unsure

from qgemm.converter import open_source
from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.imatrix import read_imatrix

SECONDS, BEYOND = 0.05, 16 << 20  # of CPU time, bytes
LONGEST = 2000  # characters of a message
BATCH = 500  # executions between two looks at the clock
PATIENCE = 600  # seconds for a batch
VALID, REFUSED = "valid", "refused"


class Escape(NamedTuple):
    """What should not have happened, and the execution that did it."""

    seed: int
    kind: str
    case: int
    what: str


class Bench:
    """A folder of its own in another, in which one process writes files and reads them."""

    def __init__(self, folder: str) -> None:
        self.folder = tempfile.mkdtemp(dir=folder)
        self.written: set[str] = set()
        self.resident = _forgotten()

    def run(self, kind: Kind, files: Files, main: str) -> tuple[str, str]:
        """Valid or refused, and what is wrong with that, or ""."""
        for name in self.written - files.keys():
            os.unlink(os.path.join(self.folder, name))
        for name, raw in files.items():
            with open(os.path.join(self.folder, name), "wb", buffering=0) as file:
                file.write(raw)
        self.written = set(files)
        path = os.path.join(self.folder, main)
        start = time.thread_time()
        verdict, held, wrong = _tried(kind.reads, path)
        if time.thread_time() - start > SECONDS:
            wrong = wrong or self._slow(kind, path)
        most = _most_resident()
        inside = sum(map(len, files.values()))
        if most > self.resident + BEYOND:
            wrong = wrong or self._large(kind, path, inside)
        return verdict, wrong or _otherwise(kind, files, main, verdict, held)

    def _slow(self, kind: Kind, path: str) -> str:
        """Whether it is slow again, and not for what else the machine does."""
        times = []
        for _ in range(3):
            start = time.thread_time()
            _tried(kind.reads, path)
            times.append(time.thread_time() - start)
        return f"takes {min(times):.3f} s" if min(times) > SECONDS else ""

    def _large(self, kind: Kind, path: str, inside: int) -> str:
        """Whether this execution is what took the memory."""
        tracemalloc.start()
        _tried(kind.reads, path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.resident = _forgotten()
        return f"takes {peak >> 20} MiB" if peak > inside + BEYOND else ""


def _forgotten() -> int:
    """Bytes of memory that are in use now, which is from now on the most that ever was."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _most_resident()


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _tried(reads: str, path: str) -> tuple[str, Any, str]:
    """The verdict, what was read, and what is wrong with the way in which that happened."""
    try:
        return VALID, READERS[reads](path), ""
    except QgemmError as error:
        message = str(error)
        if message.isascii() and message.isprintable() and len(message) <= LONGEST and os.path.dirname(path) in message:
            return REFUSED, None, ""
        return REFUSED, None, f"message {message!r}"
    except Warning as warning:
        return REFUSED, None, f"warns {warning!r}"
    except Exception as error:
        return REFUSED, None, f"raises {type(error).__name__}: {error}"


def _read_gguf(path: str) -> dict[str, Any]:
    """Every value and the ends of every tensor; as a source of the converter, too, which may refuse more."""
    with open_gguf(path) as file:
        for key in file.metadata:
            file.metadata[key]
        found = {}
        for name, tensor in file.items():
            count = tensor.nbytes // tensor.format.block_bytes
            tensor.read(0, min(count, 4))
            tensor.read(max(0, count - 4), count)
            found[name] = tensor.shape
    with suppress(QgemmError):
        _read_source(path)
    return found


def _read_source(path: str) -> dict[str, Any]:
    """The first and the last weights of every tensor; all of small matrices."""
    found: dict[str, Any] = {}
    with open_source(path) as source:
        for name, weight in source.weights.items():
            size, step = weight.size, weight.step
            ranges = {(0, min(size, step)), (max(0, size - step), size)}
            values = None
            for start, stop in ranges if size % step == 0 else ():
                if weight.tensor is not None:
                    per = weight.tensor.format.weights
                    weight.tensor.read(start // per, stop // per)
                if weight.values is not None:
                    values = weight.values(start, stop)
                if weight.codes is not None and start % 32 == stop % 32 == 0:
                    weight.codes.read(start, stop).values()
            if weight.quantized and weight.values is not None and size < 1 << 14:
                values = weight.values(0, size)
            found[name] = weight.shape, values
    return found


READERS = {"gguf": _read_gguf, "source": _read_source, "imatrix": lambda path: dict(read_imatrix(path))}


def _otherwise(kind: Kind, files: Files, main: str, verdict: str, held: Any) -> str:
    """Where the reference says something else."""
    try:
        want: Any = kind.valid(files, main)
    except Unsure:
        return ""
    except Invalid as rule:
        return f"is read, but: {rule}" if verdict == VALID else ""
    if verdict == REFUSED:
        return "is refused, but valid"
    if kind.reads != "source" or not isinstance(want, dict):
        return ""
    for name, what in want.items():
        if isinstance(what[1], np.ndarray):
            shape, values = held[name]
            if shape != what[0] or not np.array_equal(values, what[1].reshape(-1), equal_nan=True):
                return f"tensor {name!r} has other values"
    return ""


def execute(bench: Bench, seed: int, name: str, case: int) -> tuple[str, str]:
    """One execution, which three numbers tell: its verdict, and what is wrong or ""."""
    rng = Random(f"{seed} {name} {case}")
    files, main = KINDS[name].draw(rng)
    return bench.run(KINDS[name], files, main)


def batch(job: tuple[int, str, int]) -> tuple[str, Counter[str], list[Escape]]:
    """Some executions of a kind: how many were valid, and what escaped."""
    seed, name, first = job
    seen: Counter[str] = Counter()
    escapes = []
    for case in range(first, first + BATCH):
        verdict, wrong = execute(BENCHES[0], seed, name, case)
        seen[verdict] += 1
        if wrong:
            escapes.append(Escape(seed, name, case, wrong))
    return name, seen, escapes


BENCHES: list[Bench] = []  # one, of this process


def _start(folder: str) -> None:
    """Make a process ready; Ctrl-C is its parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("error")
    BENCHES.append(Bench(folder))


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, if there is such a file system."""
    return tempfile.TemporaryDirectory(prefix="qgemm-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def jobs(args: argparse.Namespace) -> Any:
    """The batches of all kinds in turn, until time or number is used up."""
    end = time.monotonic() + 60 * args.minutes if args.count is None else None
    names = args.kind or list(KINDS)
    first = args.first
    while end is None or time.monotonic() < end:
        for name in names:
            yield args.seed, name, first
        first += BATCH
        if args.count is not None and (first - args.first) * len(names) >= args.count:
            return


def main() -> int:
    """Run, report, keep what was found; 1 if something escaped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="how long (default 1)")
    parser.add_argument("--count", type=int, help="how many executions, in place of a time")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only files of this kind; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other files")
    parser.add_argument("--first", type=int, default=0, help="the number of the first execution of each kind")
    parser.add_argument("--case", type=int, help="this one execution of one kind, and its files into --out")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where files that escape are kept")
    args = parser.parse_args()
    if args.case is not None:
        return one(args)
    totals: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {name: Counter() for name in args.kind or KINDS}
    escapes: list[Escape] = []
    start = told = time.monotonic()
    with in_memory() as folder, Pool(args.jobs, _start, (folder,)) as pool:
        for name, seen, found in _ahead(pool, jobs(args), 3 * args.jobs):
            kinds[name] += seen
            totals += seen
            for escape in found:
                if len(escapes) < 100:
                    kept(args.out, escape)
                    print(*escape, file=sys.stderr, flush=True)
                escapes.append(escape)
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{totals.total()} executions, {len(escapes)} escapes", file=sys.stderr, flush=True)
    for name, seen in kinds.items():
        print(f"{name:12} {seen.total():>9} executions, {seen[VALID]:>9} valid, {seen[REFUSED]:>9} refused")
    seconds = time.monotonic() - start
    print(f"{totals.total()} executions in {seconds:.0f} s, {len(escapes)} escapes (seed {args.seed})")
    return 1 if escapes else 0


def _ahead(pool: Any, jobs: Iterator[Any], most: int) -> Iterator[Any]:
    """The results of batches, of which few wait at a time."""
    waiting = deque(pool.apply_async(batch, (job,)) for job in islice(jobs, most))
    while waiting:
        yield waiting.popleft().get(PATIENCE)  # TimeoutError: a process died, or reads on and on
        waiting.extend(pool.apply_async(batch, (job,)) for job in islice(jobs, 1))


def one(args: argparse.Namespace) -> int:
    """One execution: its files are kept, its verdict is printed."""
    [name] = args.kind
    escape = Escape(args.seed, name, args.case, "")
    warnings.simplefilter("error")
    with in_memory() as folder:
        verdict, wrong = execute(Bench(folder), *escape[:3])
    print(kept(args.out, escape), verdict, wrong)
    return 1 if wrong else 0


def kept(folder: Path, escape: Escape) -> Path:
    """Write the files of an execution again, into a folder of their own."""
    files, main = KINDS[escape.kind].draw(Random(f"{escape.seed} {escape.kind} {escape.case}"))
    target = folder / f"{escape.kind}-{escape.seed}-{escape.case}"
    target.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (target / name).write_bytes(raw)
    (target / "escape.txt").write_text(json.dumps({**escape._asdict(), "opened": main}) + "\n")
    return target / main


if __name__ == "__main__":
    sys.exit(main())
