"""Code shared by the commands: the record of a command, and arguments that several of them accept."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from qgemm.errors import QgemmError
from qgemm.files.gguf.layout import MAGIC
from qgemm.files.paths import RegularFile, shown_path
from qgemm.locks import new_lock
from qgemm.tensor import Tensor


class UsageError(Exception):
    """A wrong command line: exit code 2."""


class Command(NamedTuple):
    """One command of `qgemm`: its name, texts and arguments, and the function that runs it.

    run: returns the exit code, 0 or 1; prints data on stdout; raises errors whose message the user should read.
    """

    name: str
    summary: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_file(parser: argparse.ArgumentParser) -> None:
    """FILE."""
    parser.add_argument("file", metavar="FILE", help="a .gguf file, or the first shard of a split model")


def is_gguf(path: str) -> bool:
    """Whether a path is read as a .gguf file. Other kinds are known to the converter, imported for those alone."""
    if os.path.isdir(path):
        return False
    with suppress(QgemmError, OSError), closing(RegularFile(path, QgemmError)) as file:
        if file.read(0, min(len(MAGIC), file.size)).tobytes() == MAGIC:
            return True
    from qgemm.converter.source_readers import source_kind

    return source_kind(path) in ("", ".gguf")


def need_gguf(path: str) -> None:
    """QgemmError for a path that only `qgemm convert` reads."""
    if not is_gguf(path):
        raise QgemmError(f"{shown_path(path)}: is no .gguf file; `qgemm convert` makes one of it")


def add_pattern(parser: argparse.ArgumentParser) -> None:
    """--tensors REGEX."""
    parser.add_argument("--tensors", metavar="REGEX", type=pattern, help="only tensors whose name matches REGEX")


def add_json(parser: argparse.ArgumentParser, subject: str) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help=f"{subject} as strict JSON: NaN is a string")


def selected(names: Iterable[str], pattern: re.Pattern[str] | None) -> list[str]:
    """The names that match the pattern, all names without one; an error if nothing matches."""
    if pattern is None:
        return list(names)
    matches = [name for name in names if pattern.search(name)]
    if not matches:
        raise QgemmError(f"no tensor's name has {pattern.pattern!r} in it")
    return matches


def dims(tensor: Tensor) -> tuple[str, str]:
    """A shape in both orders: ggml's ne [K, N], fastest axis first, and NumPy's (N, K)."""
    return str(list(tensor.shape[::-1])), str(tensor.shape)


def random_tokens(m: int, k: int, seed: int) -> NDArray[np.float32]:
    """x [m, k] from the standard normal distribution, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal((m, k), np.float32)


class Progress:
    """A bar of bytes, or of another unit, on stderr for work longer than a second, with the time that is left.

    Nothing is printed if stderr is no terminal.
    """

    def __init__(self, title: str, total: int, unit: str = "B") -> None:
        from tqdm import tqdm

        self._lock = new_lock()
        scaled = unit == "B"
        self._bar: tqdm[NoReturn] = tqdm(
            desc=title, total=total, unit=unit, unit_scale=scaled, unit_divisor=1024, delay=1, disable=None, leave=False
        )

    def advance(self, amount: int) -> None:
        """Count `amount` more as done; from any thread."""
        with self._lock:
            self._bar.update(amount)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def counts(text: str) -> list[int]:
    """An argument: positive whole numbers separated by commas."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive whole numbers, separated by commas")
    return [int(word) for word in words]


def count(text: str) -> int:
    """An argument: a positive whole number."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive whole number")
    return int(text)


def limit(text: str) -> float:
    """An argument: an upper bound of errors, a number from 0 on and not NaN."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 on")
    return number


def pattern(text: str) -> re.Pattern[str]:
    """An argument: a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
