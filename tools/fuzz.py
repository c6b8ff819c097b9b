"""Fuzzing of everything that qgemm reads: mutated files, judged by a slow and strict reference.

    make fuzz ARGS="--minutes 10"
    python tools/fuzz.py --count 100000 --kind npz --jobs 2
    python tools/fuzz.py --seed 1 --kind npz --case 4711      one execution and its verdict
    python tools/fuzz.py --folders                            each value and tensor of small folders: fuzzing/folders.py

An escape is any exception other than a QgemmError, any warning, a message that is not printable ASCII, a verdict or
weights that differ from the reference, more than 50 ms, or more than 16 MiB beyond the input. docs/fuzzing.md lists the
escapes so far.
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
from fuzzing import folders
from fuzzing.inputs import KINDS, Kind
from fuzzing.reference import Files, Invalid, Unsure

from qgemm.converter import open_source
from qgemm.errors import QgemmError
from qgemm.files.gguf.reader import open as open_gguf
from qgemm.files.imatrix import read_imatrix

SECONDS, BEYOND = 0.05, 16 << 20  # limits: CPU time, bytes of memory beyond the input
LONGEST = 2000  # largest number of characters in a message
BATCH = 500  # executions between two checks of the clock
PATIENCE = 600  # largest number of seconds for a batch
VALID, REFUSED = "valid", "refused"


class Escape(NamedTuple):
    """An execution with an escape, and its description."""

    seed: int
    kind: str
    case: int
    description: str


class Bench:
    """A new subfolder in which one process writes files and reads them."""

    def __init__(self, folder: str) -> None:
        self.folder = tempfile.mkdtemp(dir=folder)
        self.written: set[str] = set()
        self.resident = _reset_peak()

    def run(self, kind: Kind, files: Files, main: str) -> tuple[str, str]:
        """Read files -> (valid or refused, the escape or "")."""
        for name in self.written - files.keys():
            os.unlink(os.path.join(self.folder, name))
        for name, raw in files.items():
            with open(os.path.join(self.folder, name), "wb", buffering=0) as file:
                file.write(raw)
        self.written = set(files)
        path = os.path.join(self.folder, main)
        start = time.thread_time()
        verdict, held, wrong = _read(kind.reads, path)
        if time.thread_time() - start > SECONDS:
            wrong = wrong or self._slow(kind, path)
        peak = _peak_resident()
        inside = sum(map(len, files.values()))
        if peak > self.resident + BEYOND:
            wrong = wrong or self._large(kind, path, inside)
        return verdict, wrong or _difference(kind, files, main, verdict, held)

    def _slow(self, kind: Kind, path: str) -> str:
        """The escape if reading is slow again, and not only because the machine is busy; else ""."""
        times = []
        for _ in range(3):
            start = time.thread_time()
            _read(kind.reads, path)
            times.append(time.thread_time() - start)
        return f"takes {min(times):.3f} s" if min(times) > SECONDS else ""

    def _large(self, kind: Kind, path: str, inside: int) -> str:
        """The escape if this execution needs too much memory; else ""."""
        tracemalloc.start()
        _read(kind.reads, path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.resident = _reset_peak()
        return f"takes {peak >> 20} MiB" if peak > inside + BEYOND else ""


def _reset_peak() -> int:
    """Reset the peak of resident memory -> the bytes in use now."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak_resident()


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _read(reads: str, path: str) -> tuple[str, Any, str]:
    """Read a file -> (verdict, content, escape or "")."""
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
    """Read every value and both ends of every tensor; also as a source of the converter, which may refuse more."""
    with open_gguf(path) as file:
        for key in file.metadata:
            file.metadata[key]
        shapes = {}
        for name, tensor in file.items():
            count = tensor.nbytes // tensor.format.block_bytes
            tensor.read(0, min(count, 4))
            tensor.read(max(0, count - 4), count)
            shapes[name] = tensor.shape
    with suppress(QgemmError):
        _read_source(path)
    return shapes


def _read_source(path: str) -> dict[str, Any]:
    """Read the first and the last weights of every tensor, and all weights of small matrices."""
    content: dict[str, Any] = {}
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
            content[name] = weight.shape, values
    return content


READERS = {"gguf": _read_gguf, "source": _read_source, "imatrix": lambda path: dict(read_imatrix(path))}


def _difference(kind: Kind, files: Files, main: str, verdict: str, held: Any) -> str:
    """The difference to the reference, or ""."""
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
    for name, tensor in want.items():
        if isinstance(tensor[1], np.ndarray):
            shape, values = held[name]
            if shape != tensor[0] or not np.array_equal(values, tensor[1].reshape(-1), equal_nan=True):
                return f"tensor {name!r} has other values"
    return ""


def execute(bench: Bench, seed: int, name: str, case: int) -> tuple[str, str]:
    """One execution, determined by seed, kind and case -> (verdict, escape or "")."""
    rng = Random(f"{seed} {name} {case}")
    files, main = KINDS[name].draw(rng)
    return bench.run(KINDS[name], files, main)


def batch(job: tuple[int, str, int]) -> tuple[str, Counter[str], list[Escape]]:
    """A batch of executions of a kind -> its name, counts by verdict, escapes."""
    seed, name, first = job
    seen: Counter[str] = Counter()
    escapes = []
    for case in range(first, first + BATCH):
        verdict, wrong = execute(BENCHES[0], seed, name, case)
        seen[verdict] += 1
        if wrong:
            escapes.append(Escape(seed, name, case, wrong))
    return name, seen, escapes


BENCHES: list[Bench] = []  # holds the Bench of this process


def _start(folder: str) -> None:
    """Initialise a process; its parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("error")
    BENCHES.append(Bench(folder))


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in memory if such a file system exists."""
    return tempfile.TemporaryDirectory(prefix="qgemm-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def jobs(args: argparse.Namespace) -> Any:
    """Batches of all kinds in turn, until the time or the number is used up."""
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
    """Run, report, save escapes; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="duration (default 1)")
    parser.add_argument("--count", type=int, help="number of executions, instead of a duration")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only files of this kind; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--first", type=int, default=0, help="number of the first execution of each kind")
    parser.add_argument("--case", type=int, help="only this execution of one --kind; writes its files to --out")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for files with escapes")
    parser.add_argument("--folders", action="store_true", help="folders with one thing wrong, instead of drawn files")
    parser.add_argument("--every", type=int, default=1, help="only each nth folder")
    args = parser.parse_args()
    if args.folders:
        with in_memory() as folder:
            return folders.run(folder, args.every, args.jobs, SECONDS)
    if args.case is not None:
        return run_case(args)
    totals: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {name: Counter() for name in args.kind or KINDS}
    escapes: list[Escape] = []
    start = reported = time.monotonic()
    with in_memory() as folder, Pool(args.jobs, _start, (folder,)) as pool:
        for name, seen, new_escapes in _ahead(pool, jobs(args), 3 * args.jobs):
            kinds[name] += seen
            totals += seen
            for escape in new_escapes:
                if len(escapes) < 100:
                    save(args.out, escape)
                    print(*escape, file=sys.stderr, flush=True)
                escapes.append(escape)
            if time.monotonic() - reported > 60:
                reported = time.monotonic()
                print(f"{totals.total()} executions, {len(escapes)} escapes", file=sys.stderr, flush=True)
    for name, seen in kinds.items():
        print(f"{name:12} {seen.total():>9} executions, {seen[VALID]:>9} valid, {seen[REFUSED]:>9} refused")
    seconds = time.monotonic() - start
    print(f"{totals.total()} executions in {seconds:.0f} s, {len(escapes)} escapes (seed {args.seed})")
    return 1 if escapes else 0


def _ahead(pool: Any, jobs: Iterator[Any], limit: int) -> Iterator[Any]:
    """The results of batches, of which at most `limit` are pending."""
    waiting = deque(pool.apply_async(batch, (job,)) for job in islice(jobs, limit))
    while waiting:
        yield waiting.popleft().get(PATIENCE)  # TimeoutError: a process died, or never ends
        waiting.extend(pool.apply_async(batch, (job,)) for job in islice(jobs, 1))


def run_case(args: argparse.Namespace) -> int:
    """One execution: save its files, print its verdict."""
    [name] = args.kind
    escape = Escape(args.seed, name, args.case, "")
    warnings.simplefilter("error")
    with in_memory() as folder:
        verdict, wrong = execute(Bench(folder), *escape[:3])
    print(save(args.out, escape), verdict, wrong)
    return 1 if wrong else 0


def save(folder: Path, escape: Escape) -> Path:
    """Write the files of an execution into a new folder -> the path of the opened file."""
    files, main = KINDS[escape.kind].draw(Random(f"{escape.seed} {escape.kind} {escape.case}"))
    target = folder / f"{escape.kind}-{escape.seed}-{escape.case}"
    target.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (target / name).write_bytes(raw)
    (target / "escape.txt").write_text(json.dumps({**escape._asdict(), "opened": main}) + "\n")
    return target / main


if __name__ == "__main__":
    sys.exit(main())
