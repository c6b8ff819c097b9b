"""What the commands share: the record of one, and arguments that several take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import QgemmError
from ..tensor import Tensor


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


def add_pattern(parser: argparse.ArgumentParser) -> None:
    """--tensors REGEX."""
    parser.add_argument("--tensors", metavar="REGEX", type=_pattern, help="only tensors in whose name it is found")


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


def progress(total: int, unit: str, what: str) -> Any:
    """A tqdm bar on stderr for work that passes a second; nothing if stderr is no terminal."""
    from tqdm import tqdm

    scaled = unit == "B"
    return tqdm(
        total=total, unit=unit, desc=what, unit_scale=scaled, unit_divisor=1024, delay=1, disable=None, leave=False
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
