"""A C compiler: the system's, or Zig's of the ziglang wheel; and compilation by it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from qgemm.errors import QgemmError

NAMES = ("cc", "gcc", "clang")  # compilers that are tried after $CC
# Results do not depend on the compiler: the C writes fused multiplications as such, and no sum is reordered.
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fno-tree-slp-vectorize", "-Wno-psabi",
)  # fmt: skip
WAITING = "-lapi-ms-win-core-synch-l1-2-0"  # the library of WaitOnAddress on Windows (kernels/cpu/threads.h)
NATIVE = {  # machine code for the CPU at hand
    "darwin": ("-mcpu=native",),
    "win32": ("-march=native", WAITING),
}.get(sys.platform, ("-march=native",))
TIMEOUT = 900  # seconds: a first run of Zig compiles its own runtime, in 250 s of processor time for three systems
SHORTAGES = errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE  # errors of fork and pipe that pass


class Compiler(NamedTuple):
    """A compiler: the words that call it, and its path, size and time, which tell it from another of its name."""

    command: tuple[str, ...]
    identity: tuple[str, int, int]


class CompileError(QgemmError):
    """A C compiler that failed, with its output."""


class CompilerStopped(CompileError):
    """A C compiler that was stopped by TIMEOUT, a signal or a shortage: the next run may succeed."""


@cache
def compiler() -> Compiler | None:
    """The first that exists: $CC, the system's, Zig's; none is run."""
    for name in (os.environ.get("CC", ""), *NAMES):
        if (candidate := named(*name.split())) is not None:
            return candidate
    return zig()


def named(*command: str) -> Compiler | None:
    """The compiler that a command calls, None where there is no such program."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        return None
    path = os.path.realpath(program)
    state = os.stat(path)
    return Compiler((program, *command[1:]), (path, state.st_size, state.st_mtime_ns))


def zig() -> Compiler | None:
    """`zig cc` of the ziglang wheel, the extra `cpu`: a C compiler that needs no other package of the system."""
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    return named(str(Path(spec.origin).with_name("zig")), "cc")


def compiled(cc: Compiler, file: Path, words: Sequence[str]) -> bytes:
    """A shared library of one C file, whose includes lie beside it, with FLAGS and further words of the command.

    CompileError has the compiler's message; it is CompilerStopped where another run may succeed.
    """
    with tempfile.TemporaryDirectory(prefix="qgemm-") as folder:
        library = Path(folder, "library.so")
        command = [*cc.command, *FLAGS, *words, "-o", str(library), str(file)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise CompilerStopped(f"{cc.command[0]} was stopped after {TIMEOUT} s") from None
        except OSError as error:
            kind = CompilerStopped if error.errno in SHORTAGES else CompileError
            raise kind(f"{cc.command[0]}: {error}") from None
        if result.returncode or not library.is_file():
            message = (result.stderr or result.stdout).strip().splitlines()[:12]
            # A compiler driver fails with "Killed" when its child gets SIGKILL, as from a system short of memory.
            killed = result.returncode < 0 or "Killed" in "\n".join(message)
            kind = CompilerStopped if killed else CompileError
            raise kind("\n".join([f"{cc.command[0]} failed ({result.returncode}):", *message]))
        return library.read_bytes()


def stamp(code: bytes, name: str) -> bytes:
    """A library with the name of its file appended, where no loader reads."""
    return code + name.encode()


def stamped(code: bytes, name: str) -> bool:
    """Whether a library was stamped with this name; another in its place was not."""
    return code.endswith(name.encode())
