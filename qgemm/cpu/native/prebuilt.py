"""Libraries that a platform wheel brings, in qgemm/prebuilt/: made by tools/build_wheel.py, for kinds of CPUs.

A library is named after the hash of what it was made of, ends with that name, and is sealed: one of other sources is
not found, a damaged or renamed one not loaded. That is no signature: who can write to the package can change its Python
as well.
"""

from __future__ import annotations

import hashlib
import platform
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

from qgemm.files.compiled import unsealed

from .compiler import FLAGS, cpu, stamped
from .sources import Source, digest


class Target(NamedTuple):
    """CPUs that one set of libraries is for.

    name: of the folder. machine: as platform.machine() says it. needs: flags of /proc/cpuinfo, of the instructions that
    the compiler may use. beyond: of those that kernels/cpu/vec/ knows and these libraries do without. march: words for
    GCC; zig: for `zig cc`, with the oldest glibc that the libraries shall run on.
    """

    name: str
    machine: str
    needs: frozenset[str]
    beyond: frozenset[str]
    march: tuple[str, ...]
    zig: tuple[str, ...]


# The instructions of x86-64-v3, what x86-64-v4 adds, and those of armv8.2-a, as Linux calls them.
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
)  # fmt: skip


def folder() -> Path:
    """Where a wheel has the libraries; a checkout has no such folder."""
    return Path(__file__).parents[2] / "prebuilt"


def runs(of: Target) -> bool:
    """Whether this CPU can run the libraries of a target."""
    return of.machine == platform.machine() and of.needs <= set(cpu().split())


@cache
def target() -> Target | None:
    """The best of TARGETS that this CPU can run and that there are libraries for."""
    return next((each for each in TARGETS if runs(each) and (folder() / each.name).is_dir()), None)


def outdone() -> bool:
    """Whether this CPU has instructions that the kernels would use and the prebuilt libraries do without."""
    found = target()
    return found is not None and not found.beyond.isdisjoint(cpu().split())


def entry(of: Target, source: Source) -> str:
    """The name of a library's file: the hash of what it was made of."""
    facts = (*source, digest(), FLAGS, of.name, of.march, sorted(of.needs))
    return f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"


def has(source: Source) -> bool:
    """Whether there is a file for a library of these sources, for this CPU."""
    found = target()
    return found is not None and (folder() / found.name / entry(found, source)).is_file()


def code(source: Source) -> bytes | None:
    """The library of these very sources for this CPU; None without one, or for a damaged one, which warns."""
    found = target()
    if found is None:
        return None
    name = entry(found, source)
    path = folder() / found.name / name
    try:
        library = unsealed(path.read_bytes())
        if stamped(library, name):
            return library
        why: Exception | str = "it was made of other sources"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error
    warnings.warn(f"{path} is passed over: {why}; install the package anew", RuntimeWarning, stacklevel=2)
    return None
