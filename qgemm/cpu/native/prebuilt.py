"""Libraries that a platform wheel brings, in qgemm/prebuilt/: made by tools/build_wheel.py, for kinds of CPUs.

The name of a library is the hash of its sources and flags; the file ends with that name and is sealed. So a library of
other sources is not found, a damaged or renamed one not loaded. This is no signature: whoever can write to the package
can change its Python as well.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

from qgemm.files.compiled import unsealed
from qgemm.system.process import cpu, machine

from .compiler import FLAGS, WAITING, stamped
from .sources import Source, digest


class Target(NamedTuple):
    """The CPUs that one set of libraries serves.

    name: of the folder. machine: the kind of CPU. needs: features, as Linux calls them, for the instructions that the
    compiler may use. beyond: features for instructions of kernels/cpu/vec/ that these libraries do without. march:
    words for GCC, none where only Zig serves; zig: words for `zig cc`, with the oldest glibc that the libraries
    support. system: the value of sys.platform.
    """

    name: str
    machine: str
    needs: frozenset[str]
    beyond: frozenset[str]
    march: tuple[str, ...]
    zig: tuple[str, ...]
    system: str = "linux"


# The instructions of x86-64-v3, those that x86-64-v4 adds, and those of armv8.2-a, as Linux calls them.
_V3 = frozenset({
    "pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm",
    "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave",
})  # fmt: skip
_V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_V8_2 = frozenset({"asimd", "asimdrdm", "atomics", "crc32"})

TARGETS = (  # the best first
    Target(
        "x86-64-v4-vnni", "x86_64", _V3 | _V4 | {"avx512_vnni"}, frozenset(),
        ("-march=x86-64-v4", "-mavx512vnni"), ("-target", "x86_64-linux-gnu.2.17", "-march=x86_64_v4+avx512vnni"),
    ),
    Target(
        "x86-64-v3", "x86_64", _V3, frozenset({"avx_vnni"}),
        ("-march=x86-64-v3",), ("-target", "x86_64-linux-gnu.2.17", "-march=x86_64_v3"),
    ),
    Target(
        "aarch64-dotprod", "aarch64", _V8_2 | {"asimddp"}, frozenset({"i8mm"}),
        ("-march=armv8.2-a+dotprod",), ("-target", "aarch64-linux-gnu.2.17", "-mcpu=generic+v8_2a+dotprod"),
    ),
    Target(
        "aarch64-macos", "aarch64", _V8_2 | {"asimddp"}, frozenset({"i8mm"}),
        (), ("-target", "aarch64-macos.11.0", "-mcpu=apple_m1"), "darwin",
    ),
    Target(
        "x86-64-v3-macos", "x86_64", _V3, frozenset(),
        (), ("-target", "x86_64-macos.11.0", "-march=x86_64_v3"), "darwin",
    ),
    Target(
        "x86-64-v3-windows", "x86_64", _V3, frozenset(),
        (), ("-target", "x86_64-windows-gnu", "-march=x86_64_v3", WAITING), "win32",
    ),
)  # fmt: skip


def folder() -> Path:
    """The folder of libraries in a wheel; a checkout has none."""
    return Path(__file__).parents[2] / "prebuilt"


def runs(candidate: Target) -> bool:
    """Whether this CPU can run the libraries of a target."""
    here = candidate.machine == machine() and candidate.system == sys.platform
    return here and candidate.needs <= set(cpu().split())


@cache
def target() -> Target | None:
    """The best of TARGETS that this CPU can run and that there are libraries for."""
    return next((candidate for candidate in TARGETS if runs(candidate) and (folder() / candidate.name).is_dir()), None)


def outdone() -> bool:
    """Whether this CPU has instructions that the kernels would use and the prebuilt libraries do without."""
    best = target()
    return best is not None and not best.beyond.isdisjoint(cpu().split())


def entry(cpus: Target, source: Source) -> str:
    """The name of a library's file: the hash of all that determines it."""
    facts = (*source, digest(), FLAGS, cpus.name, cpus.march or cpus.zig, sorted(cpus.needs))
    return f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"


def has(source: Source) -> bool:
    """Whether there is a file for a library of these sources, for this CPU."""
    best = target()
    return best is not None and (folder() / best.name / entry(best, source)).is_file()


def code(source: Source) -> bytes | None:
    """The library of exactly these sources for this CPU; None without one, or with a warning if it is damaged."""
    best = target()
    if best is None:
        return None
    name = entry(best, source)
    path = folder() / best.name / name
    try:
        library = unsealed(path.read_bytes())
        if stamped(library, name):
            return library
        reason: Exception | str = "it was made of other sources"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error
    warnings.warn(f"{path} is passed over: {reason}; install the package anew", RuntimeWarning, stacklevel=2)
    return None
