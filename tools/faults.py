"""Faults while outputs of several files are written: kills and errors of the disk at every call of the system.

    python tools/faults.py                        all calls, 200 kills at random times, 50 beside other writers
    python tools/faults.py --writer split --random 50

Each writer converts over an old output, or where none is. After a fault the output is the old one, the new one, or
refused by its reader, never a mixture; after an error nothing else is there; after a kill the next run leaves the new
output and nothing else.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

import qgemm
from qgemm.errors import QgemmError
from qgemm.system import system

CALLS = (
    "open", "mkdir", "fsync", "pwrite", "write", "posix_fallocate", "ftruncate", "fchmod", "fchown", "rename",
    "replace", "link", "unlink", "rmdir", "listdir", "stat",
)  # fmt: skip
FAILING = "fsync", "pwrite", "write", "rename", "replace", "link", "mkdir", "rename_with_flags"  # calls that get errors
KILL_BEFORE, KILL_AFTER, ERROR, ERRORS = "kill before", "kill after", "error", "errors from"
FAILED = 3  # exit status of a child whose conversion raised a QgemmError
MIXED = "MIXED"
State = dict[str, bytes]


class Writer(NamedTuple):
    """A conversion into a folder that has nothing else.

    old: makes the old output, None for a new one. new: the conversion. read: opens the output; a QgemmError refuses it.
    kept: files of the user that stay in the output.
    """

    old: Callable[[Path], object]
    new: Callable[[Path], object]
    read: Callable[[Path], object]


def writers(sources: Path) -> dict[str, Writer]:
    """The writers by name; their sources are written to a folder."""
    rng = np.random.default_rng(0)
    tensors = {f"blk.{i}.attn_q.weight": rng.standard_normal((32, 64)).astype(np.float32) for i in range(3)}
    model, split = sources / "m.gguf", sources / "s-00001-of-00003.gguf"
    qgemm.write(model, tensors, {"general.architecture": "llama"})
    for number, (name, values) in enumerate(tensors.items()):
        keys = {"split.no": np.uint16(number), "split.count": np.uint16(3), "split.tensors.count": np.int32(3)}
        head = {"general.architecture": "llama"} if number == 0 else {}
        with _shard(sources / f"s-0000{number + 1}-of-00003.gguf", {name: values}, {**head, **keys}):
            pass

    def folder(fmt: str, layout: str) -> Callable[[Path], object]:
        return lambda path: qgemm.convert(model, path / "out", fmt, layout=layout, force=True, threads=1)

    def shards(fmt: str) -> Callable[[Path], object]:
        return lambda path: qgemm.convert(split, path / "x.gguf", fmt, keep_split=True, force=True, threads=1)

    def single(fmt: str) -> Callable[[Path], object]:
        return lambda path: qgemm.convert(model, path / "x.gguf", fmt, force=True, threads=1)

    def with_readme(write: Callable[[Path], object], subfolder: bool = False) -> Callable[[Path], object]:
        def both(path: Path) -> None:
            write(path)
            (path / "out" / "README.md").write_text("the user's")
            if subfolder:
                (path / "out" / "figures").mkdir()
                (path / "out" / "figures" / "a.svg").write_text("the user's")

        return both

    def nothing(path: Path) -> None:
        pass

    def read_folder(path: Path) -> None:
        with qgemm.load(path / "out") as file:
            for name in file:
                file[name].dequantize()

    def read_shards(path: Path) -> None:
        qgemm.open(path / "x-00001-of-00003.gguf").close()

    zeros, plain = folder("u4z_g32", "gptq"), folder("u4_g64", "gptq")
    return {
        "new awq": Writer(nothing, folder("u4z_g32", "awq"), read_folder),
        "new compressed-tensors": Writer(nothing, folder("u4_g32", "compressed-tensors"), read_folder),
        "gptq over gptq": Writer(with_readme(zeros), plain, read_folder),
        "gptq in place": Writer(with_readme(zeros, subfolder=True), plain, read_folder),
        "new split": Writer(nothing, shards("q4_0"), read_shards),
        "split over split": Writer(shards("q8_0"), shards("q4_0"), read_shards),
        "file over file": Writer(single("q8_0"), single("q4_0"), lambda path: qgemm.open(path / "x.gguf").close()),
    }


@contextmanager
def _shard(path: Path, tensors: dict[str, Any], keys: dict[str, Any]) -> Iterator[None]:
    from qgemm.files.gguf.writer import drafting

    with drafting(path, tensors, keys, part=True) as draft:
        for name, values in tensors.items():
            draft.append(name, values)
        yield


# ---------------------------------------------------------------- faults in a child


class Fault:
    """Counts calls of the system in this process, and makes one fail or kills the process there."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number, self.count = kind, number, 0

    def patch(self) -> None:
        """Wrap the functions."""
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        system.rename_with_flags = self._wrapped("rename_with_flags", system.rename_with_flags)  # type: ignore[method-assign]

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            errors = self.kind in (ERROR, ERRORS)
            if errors and name not in FAILING:
                return function(*arguments, **named)
            self.count += 1
            here = self.count > self.number if self.kind == ERRORS else self.count - 1 == self.number
            if here and errors:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if here and self.kind == KILL_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def forked(work: Callable[[], object], fault: Fault | None = None) -> int:
    """A child that does the work with a fault; it ends with FAILED after a QgemmError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork beside BLAS's idle threads
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        if fault is not None:
            fault.patch()
        work()
        status = 0
    except QgemmError:
        status = FAILED
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


# ---------------------------------------------------------------- judging


def state(folder: Path) -> State:
    """The files below a folder, without temporary ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".qgemm-" not in str(path.relative_to(folder))
    }


def left_over(folder: Path) -> list[str]:
    """The temporary files below a folder."""
    return [str(path) for path in folder.rglob(".qgemm-*")]


class Bench:
    """One writer: its old and new output, and a folder in which both are."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.writer, self.place, self.saved = writer, folder / "place", folder / "saved"
        self.saved.mkdir(parents=True)
        writer.old(self.saved)
        self.reset()
        started = time.monotonic()
        os.waitpid(forked(lambda: writer.new(self.place)), 0)
        self.seconds = time.monotonic() - started
        self.old, self.new = state(self.saved), state(self.place)
        assert self.old != self.new
        assert not left_over(self.place)

    def reset(self) -> None:
        """Put the old output there."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.saved, self.place)

    def verdict(self) -> str:
        """The output: old, new, refused, or MIXED."""
        files = state(self.place)
        if files == self.old:
            return "old"
        if files == self.new:
            return "new"
        with suppress(QgemmError):
            self.writer.read(self.place)
            return MIXED
        return "refused"

    def calls(self, kind: str) -> int:
        """The number of calls in which a fault can be."""
        self.reset()
        fault = Fault(kind, 1 << 60)
        reading, writing = os.pipe()

        def count() -> None:
            self.writer.new(self.place)
            os.write(writing, str(fault.count).encode())

        os.waitpid(forked(count, fault), 0)
        os.close(writing)
        with open(reading) as file:
            return int(file.read())

    def fault(self, kind: str, number: int) -> tuple[str, str]:
        """Convert with a fault; the verdict, and the failure or an empty string."""
        self.reset()
        fault = Fault(kind, number)
        _, status = os.waitpid(forked(lambda: self.writer.new(self.place), fault), 0)
        code = os.waitstatus_to_exitcode(status)
        return self._judged(code, kind)

    def killed_after(self, seconds: float) -> tuple[str, str]:
        """Kill a conversion after some time."""
        self.reset()
        child = forked(lambda: self.writer.new(self.place))
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return self._judged(-signal.SIGKILL, KILL_BEFORE)

    def killed_beside_others(self, seconds: float) -> tuple[str, str]:
        """Kill one of three conversions to the same output; the others must succeed."""
        self.reset()
        children = [forked(lambda: self.writer.new(self.place)) for _ in range(3)]
        time.sleep(seconds)
        os.kill(children[0], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return self._judged(max(codes[1:]), KILL_BEFORE)

    def _judged(self, code: int, kind: str) -> tuple[str, str]:
        verdict, wrong = self.verdict(), ""
        if code == 1:
            wrong = "another exception than a QgemmError"
        elif code == FAILED and kind == KILL_BEFORE:
            wrong = "a conversion failed beside one that was killed"
        elif verdict == MIXED:
            wrong = f"mixed: {sorted(state(self.place))}"
        elif kind == ERROR and left_over(self.place):
            wrong = f"left over after an error: {left_over(self.place)}"
        elif kind == ERROR and verdict == "refused":
            wrong = "refused after one error"
        elif code == 0 and verdict != "new":
            wrong = "no error, but the output is not the new one"
        if not wrong:
            try:
                self.writer.new(self.place)
            except QgemmError as error:
                return verdict, f"the next run fails: {error}"
            if state(self.place) != self.new or left_over(self.place):
                wrong = f"after the next run: {sorted(state(self.place))}, {left_over(self.place)}"
        return verdict, wrong


def campaign(bench: Bench, stride: int, random: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Faults at every `stride`-th call, and kills at random times: fault, verdict, failure."""
    for kind in (KILL_BEFORE, KILL_AFTER, ERROR, ERRORS):
        count = bench.calls(kind)
        for number in range(seed % stride, count, stride):
            yield f"{kind} call {number} of {count}", *bench.fault(kind, number)
    draw = Random(seed)
    for _ in range(random):
        seconds = draw.uniform(0, 1.2 * bench.seconds)
        yield f"killed after {seconds:.4f} s", *bench.killed_after(seconds)
    for _ in range(random // 4):
        seconds = draw.uniform(0, 2 * bench.seconds)
        yield f"killed beside two others after {seconds:.4f} s", *bench.killed_beside_others(seconds)


def main() -> int:
    """Run campaigns and print a line for each writer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writer", default="", help="writers whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="faults at every STRIDE-th call of the system")
    parser.add_argument("--random", type=int, default=200, help="kills at random times, for each writer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for number, (name, writer) in enumerate(writers(place).items()):
            if args.writer not in name:
                continue
            verdicts: Counter[str] = Counter()
            for fault, verdict, wrong in campaign(
                Bench(writer, place / str(number)), args.stride, args.random, args.seed
            ):
                verdicts[f"{' '.join(fault.split()[:2])}: {verdict}"] += 1
                if wrong:
                    failures += 1
                    print(f"{name}, {fault}: {wrong}", flush=True)
            print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in sorted(verdicts.items())), flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
