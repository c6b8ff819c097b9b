"""Programs of many units of one kernel for NVRTC's front end, which checks every unit in CI.

Most of a unit's time is NVRTC's optimizer and ptxas; most of the front end's time is spent on headers, and the units in
a program share them. A unit then costs 0.015 core-seconds instead of 0.3. The front end checks templates, types and
static_asserts: shared memory, tiles, stages, twins of the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from qgemm import FORMATS
from qgemm.cuda.jit import cache, codegen, nvrtc, sources
from qgemm.cuda.kernels.routes import source_of
from qgemm.files.compiled import load_or_make

MAX_UNITS = 40  # in a program
INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)


class Unit(NamedTuple):
    """One translation unit: kernel, format name ("" if it has none), template, architecture."""

    kernel: str
    format: str
    template: tuple[tuple[str, Any], ...]
    arch: str

    def __str__(self) -> str:
        parameters = " ".join(f"{name}={value}" for name, value in self.template)
        return f"{self.arch:7} {self.kernel} {self.format} {parameters}"


def batches(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """The units by kernel and architecture, units of a format next to each other, at most MAX_UNITS together."""

    def program(unit: Unit) -> tuple[str, str]:
        return unit.kernel, unit.arch

    for _, group in groupby(sorted(units, key=program), program):
        every = list(group)
        yield from (every[i : i + MAX_UNITS] for i in range(0, len(every), MAX_UNITS))


def compose(units: list[Unit]) -> tuple[str, Mapping[str, str]]:
    """(source, generated headers) of units of one kernel: each unit in its own namespace, with a numbered entry point.

    Headers are templates over a Config and are included once, first; the file of the kernel is included for each unit.
    """
    (kernel,) = {source_of(unit.kernel) for unit in units}
    headers: dict[str, str] = {}
    includes: dict[str, None] = {}  # each once, in order
    instances = []
    for number, unit in enumerate(units):
        fmt = FORMATS.get(unit.format)
        headers |= codegen.headers(fmt)
        config = codegen.config(fmt, **dict(unit.template))
        includes |= dict.fromkeys(INCLUDE.findall(config))
        own = INCLUDE.sub("", config).replace("namespace qgemm {\n", "namespace qgemm {\nusing namespace ::qgemm;\n", 1)
        path = sources.kernel_path(kernel)
        instances.append(
            f'namespace unit_{number} {{\n{own}#define {kernel} {kernel}_{number}\n#include "{path}"\n'
            f"#undef {kernel}\n}}  // namespace unit_{number}\n"
        )
    includes |= dict.fromkeys(INCLUDE.findall(sources.kernel_text(kernel)))
    return "".join([*includes, *instances]), headers


def check(units: list[Unit]) -> list[tuple[Unit, str]]:
    """Check units of one kernel and architecture by the front end -> the failing units, with logs. Passes are cached.

    If a program fails, its units are checked one by one to find the failing ones.
    """
    try:
        source, headers = compose(units)
        passes_front_end(source, units[0].arch, headers)
        return []
    except nvrtc.CompileError as error:
        if len(units) == 1:
            return [(units[0], str(error))]
    return [failure for unit in units for failure in check([unit])]


def passes_front_end(source: str, arch: str, headers: Mapping[str, str]) -> None:
    """nvrtc.check of a program, cached if it passes; its CompileError has the log."""

    def passed() -> bytes:
        nvrtc.check(source, arch, headers)
        return b"passed"

    load_or_make(f"{cache.key(source, arch, headers)}.checked", passed)
