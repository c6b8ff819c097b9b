"""A C compiler: the system's, or Zig's of the ziglang wheel; and the machine code that it makes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from qgemm.errors import QgemmError

NAMES = ("cc", "gcc", "clang")  # of a compiler, after the one in $CC
# The same result whatever the compiler: fused multiplications are written as such or not at all, no sum is reordered.
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fno-tree-slp-vectorize", "-Wno-psabi",
)  # fmt: skip
NATIVE = ("-march=native",)  # machine code for the CPU at hand
TIMEOUT = 300  # seconds: for a machine that is busy, and a first run of Zig, which compiles its own runtime


class Compiler(NamedTuple):
    """A compiler: the words that call it, and what tells it from another of its name."""

    command: tuple[str, ...]
    identity: tuple[str, int, int]


class CompileError(QgemmError):
    """A C compiler that failed, with what it printed."""


@cache
def compiler() -> Compiler | None:
    """The first that is there: $CC, the system's, Zig's; asked for without running it."""
    for name in (os.environ.get("CC", ""), *NAMES):
        if (found := named(*name.split())) is not None:
            return found
    return zig()


def named(*command: str) -> Compiler | None:
    """The compiler that a command calls, None where there is no such program."""
    found = shutil.which(command[0]) if command else None
    if found is None:
        return None
    path = os.path.realpath(found)
    state = os.stat(path)
    return Compiler((found, *command[1:]), (path, state.st_size, state.st_mtime_ns))


def zig() -> Compiler | None:
    """`zig cc` of the ziglang wheel, the extra `cpu`: a C compiler that needs no other package of the system."""
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        return None
    return named(str(Path(found.origin).with_name("zig")), "cc")


@cache
def cpu() -> str:
    """What tells this CPU from others: its model and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(wanted))])


def compiled(by: Compiler, file: Path, words: Sequence[str]) -> bytes:
    """A shared library of one C file, whose includes lie beside it, by FLAGS and further words of the command.

    CompileError has the compiler's message.
    """
    with tempfile.TemporaryDirectory(prefix="qgemm-") as folder:
        library = Path(folder, "library.so")
        command = [*by.command, *FLAGS, *words, "-o", str(library), str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{by.command[0]}: {error}") from None
        if done.returncode or not library.is_file():
            message = (done.stderr or done.stdout).strip().splitlines()[:12]
            raise CompileError("\n".join([f"{by.command[0]} failed ({done.returncode}):", *message]))
        return library.read_bytes()


def stamp(code: bytes, name: str) -> bytes:
    """A library and behind its end, which no loader reads, the name under which it may be found."""
    return code + name.encode()


def stamped(code: bytes, name: str) -> bool:
    """Whether a library was stamped with this name, and so is none that was put in its place."""
    return code.endswith(name.encode())
