"""The system's C compiler, and the machine code that it makes for the CPU at hand."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from qgemm.errors import QgemmError

NAMES = ("cc", "gcc", "clang")  # of a compiler, after the one in $CC
# The same result whatever the compiler: fused multiplications are written as such or not at all, no sum is reordered.
FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-Wno-psabi",
)  # fmt: skip
TIMEOUT = 120  # seconds


class Compiler(NamedTuple):
    """A compiler: the words that call it, and what tells it from another of its name."""

    command: tuple[str, ...]
    identity: tuple[str, int, int]


class CompileError(QgemmError):
    """A C compiler that failed, with what it printed."""


@cache
def compiler() -> Compiler | None:
    """The first that is there; asked for without running it."""
    for name in (os.environ.get("CC", ""), *NAMES):
        words = name.split()
        found = shutil.which(words[0]) if words else None
        if found is not None:
            path = os.path.realpath(found)
            state = os.stat(path)
            return Compiler((found, *words[1:]), (path, state.st_size, state.st_mtime_ns))
    return None


@cache
def cpu() -> str:
    """What tells this CPU from others: its model and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(wanted))])


def compiled(by: Compiler, source: Path, definitions: Sequence[str]) -> bytes:
    """A shared library of one C file, whose includes lie beside it; CompileError with the compiler's message."""
    with tempfile.TemporaryDirectory(prefix="qgemm-") as folder:
        library = Path(folder, "library.so")
        command = [*by.command, *FLAGS, *definitions, "-o", str(library), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{by.command[0]}: {error}") from None
        if done.returncode or not library.is_file():
            message = (done.stderr or done.stdout).strip().splitlines()[:12]
            raise CompileError("\n".join([f"{by.command[0]} failed ({done.returncode}):", *message]))
        return library.read_bytes()
