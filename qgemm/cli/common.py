"""What the commands share: the record of one, and arguments that several take."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from threading import Lock
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from qgemm.converter.source_readers import SOURCES
from qgemm.errors import QgemmError
from qgemm.files.paths import shown_path
from qgemm.tensor import Tensor

OTHERS = tuple(suffix for suffix in SOURCES if suffix != ".gguf")  # ends of names of what `qgemm convert` reads


class UsageError(Exception):
    """A command line that makes no sense: exit code 2."""


class Command(NamedTuple):
    """One word of the command line: how it is called, what it takes, what it does.

    run: returns the exit code, 0 or 1; prints data on stdout; raises what the person should read on stderr.
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


def need_gguf(path: str) -> None:
    """QgemmError for the path of what else `qgemm convert` reads."""
    if os.path.isdir(path) or path.endswith(OTHERS):
        raise QgemmError(f"{shown_path(path)}: is no .gguf file; `qgemm convert` makes one of it")


def add_pattern(parser: argparse.ArgumentParser) -> None:
    """--tensors REGEX."""
    parser.add_argument("--tensors", metavar="REGEX", type=pattern, help="only tensors in whose name it is found")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help=f"{what} as strict JSON: NaN is a string")


def selected(names: Iterable[str], pattern: re.Pattern[str] | None) -> list[str]:
    """The names in which the pattern is found, all without one; an error if there is none."""
    if pattern is None:
        return list(names)
    found = [name for name in names if pattern.search(name)]
    if not found:
        raise QgemmError(f"no tensor's name has {pattern.pattern!r} in it")
    return found


def dims(tensor: Tensor) -> tuple[str, str]:
    """Both orders of a shape: ggml's ne [K, N], fastest first, and NumPy's (N, K)."""
    return str(list(tensor.shape[::-1])), str(tensor.shape)


def random_tokens(m: int, k: int, seed: int) -> NDArray[np.float32]:
    """x [m, k] from the standard normal distribution, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal((m, k), np.float32)


class Progress:
    """A bar of bytes on stderr for work that passes a second; nothing if stderr is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        from tqdm import tqdm

        self._lock = Lock()
        self._bar: tqdm[NoReturn] = tqdm(
            desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024, delay=1, disable=None, leave=False
        )

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done; from any thread."""
        with self._lock:
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def counts(text: str) -> list[int]:
    """An argument of positive whole numbers with commas between."""
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive whole numbers, with commas between")
    return [int(word) for word in words]


def count(text: str) -> int:
    """An argument that is a positive whole number."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive whole number")
    return int(text)


def limit(text: str) -> float:
    """An argument that errors are held against: a number from 0 on, which NaN is not."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 on")
    return found


def pattern(text: str) -> re.Pattern[str]:
    """An argument that is a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
