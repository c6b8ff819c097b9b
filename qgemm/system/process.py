"""CPUs, forks and shared libraries, as far as the system has them."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

CPU_INFO = "/proc/cpuinfo"
FACTS = "model name", "flags", "Features", "CPU part", "CPU implementer"  # lines of CPU_INFO
# Variables of macOS that describe the CPU.
SYSCTL = (
    "machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features", "machdep.cpu.extfeatures",
    "hw.optional",
)  # fmt: skip
# Features of CPUs: their names on macOS and on Linux.
ON_MACOS = {
    "avx1.0": "avx", "sse3": "pni", "lzcnt": "abm", "lahf": "lahf_lm", "feat_dotprod": "asimddp", "feat_i8mm": "i8mm",
}  # fmt: skip
ARM_64 = "asimd asimdrdm atomics crc32"  # every CPU of Apple has these
AVX2, AVX512F = 40, 41  # arguments of IsProcessorFeaturePresent
# Every CPU with AVX2 has these.
V3 = "pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
LIBRARIES = "qgemm-library-"  # the start of the name of a temporary folder
KEPT = 86400.0  # seconds until another process removes the folder of a library that was loaded
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def machine() -> str:
    """The kind of CPU by its name on Linux: x86_64, aarch64."""
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}.get(name, name)


def cpus() -> set[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def switch(name: str) -> bool:
    """Whether a plugin is on: its variable of the environment is "1" or missing; ValueError unless it is "0" then."""
    text = os.environ.get(name, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{name} is {text!r}, and must be 0 (off) or 1 (on)")
    return text == "1"


def setting(name: str) -> Callable[[], str]:
    """A function that returns a variable of the environment, "" without it, as it is now.

    os.environ.get costs 1 us for a variable that is missing, and each product reads two.
    """
    if sys.platform == "win32" or not isinstance(getattr(os.environ, "_data", None), dict):
        return lambda: os.environ.get(name, "")
    values: dict[bytes, bytes] = getattr(os.environ, "_data")  # noqa: B009 - mypy knows no private names
    key = os.fsencode(name)

    def read() -> str:
        value = values.get(key)
        return "" if value is None else os.fsdecode(value)

    return read


def after_fork(function: Callable[[], object]) -> None:
    """Call a function in each forked child, on a system that forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


MADV_COLD = 20  # Linux has it from 5.4 on


def advise_unused(address: int, size: int) -> None:
    """Tell the system that memory will hardly be read again, so that its pages are the first to go where it is short.

    Pages keep their contents: those of a file are read again, others swapped. Does nothing where no such advice exists.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and length > 0:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_COLD)


@cache
def cpu() -> str:
    """The model of this CPU and its features by their names on Linux: the key by which machine code differs."""
    facts = {"darwin": _sysctl, "win32": _windows}.get(sys.platform, _cpu_info)
    return "\n".join([platform.machine(), *facts()])


def _cpu_info() -> list[str]:
    try:
        lines = Path(CPU_INFO).read_text().split("\n\n")[0].splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(FACTS)]


def _sysctl() -> list[str]:
    lines = []
    for name in SYSCTL:
        with suppress(OSError):
            done = subprocess.run(["sysctl", name], capture_output=True, text=True, errors="replace")
            lines += done.stdout.splitlines()
    return of_sysctl(lines)


def of_sysctl(lines: list[str]) -> list[str]:
    """The lines of sysctl, and the features in them by their names on Linux."""
    features = [ARM_64] if machine() == "aarch64" else []
    for line in lines:
        name, _, value = line.lower().partition(": ")
        words = value.split() if name.startswith("machdep") else [name.rpartition(".")[2]] * (value == "1")
        features += [ON_MACOS.get(word, word).replace(".", "_") for word in words]
    return [*lines, " ".join(features)]


def _windows() -> list[str]:
    present = getattr(ctypes, "windll").kernel32.IsProcessorFeaturePresent  # noqa: B009 - absent elsewhere
    return [os.environ.get("PROCESSOR_IDENTIFIER", ""), V3 if present(AVX2) else "", "avx512f" * bool(present(AVX512F))]


def load_library(code: bytes) -> ctypes.CDLL:
    """A library from its bytes, which no other user can replace.

    A file in memory has no name under which others could swap it. Its descriptor stays open: dlopen would take another
    library under the same number for this one. A system without such files gets one in a private folder, which is
    removed at once or, where a loaded library cannot be removed, by a later process.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("qgemm", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{fd}")
    _remove_old_libraries()
    path = Path(tempfile.mkdtemp(prefix=LIBRARIES), f"library{SUFFIX}")
    try:
        path.write_bytes(code)
        return ctypes.CDLL(str(path))
    finally:
        _remove(path.parent)


def loaded_libraries(names: tuple[str, ...]) -> list[str]:
    """The paths of the libraries in this process whose file names begin with one of these; none where Linux is not."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
    return [path for path in paths if os.path.basename(path).startswith(names)]


@cache
def _remove_old_libraries() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{LIBRARIES}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > KEPT:
                _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
