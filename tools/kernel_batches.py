"""Many units of one kernel as one program, of which NVRTC's front end is asked: what CI checks of every unit.

Most of a unit's time is NVRTC's optimizer and ptxas; of the rest, the front end, most is spent on headers, which the
units of a program share. So a unit takes 0.015 core-seconds for 0.3, and what has passed it then are templates, types
and static_asserts: shared memory, tiles, stages, twins of the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from qgemm import FORMATS
from qgemm.cuda.jit import cache, codegen, nvrtc, sources
from qgemm.cuda.kernels.routes import source_of
from qgemm.files.compiled import kept

MOST = 40  # units of a program
INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)


class Unit(NamedTuple):
    """One translation unit: kernel, format name ("" if it knows none), template, architecture."""

    kernel: str
    format: str
    template: tuple[tuple[str, Any], ...]
    arch: str

    def __str__(self) -> str:
        parameters = " ".join(f"{name}={value}" for name, value in self.template)
        return f"{self.arch:7} {self.kernel} {self.format} {parameters}"


def batches(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """The units by kernel and architecture, those of a format beside each other, at most MOST together."""

    def program(unit: Unit) -> tuple[str, str]:
        return unit.kernel, unit.arch

    for _, some in groupby(sorted(units, key=program), program):
        every = list(some)
        yield from (every[i : i + MOST] for i in range(0, len(every), MOST))


def compose(units: list[Unit]) -> tuple[str, Mapping[str, str]]:
    """(source, headers made in memory) of units of one kernel: each in a namespace, its entry with its number.

    Headers are templates over a Config, so they come once, before all; the kernel's own file is read for each.
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
    """Units of one kernel and architecture by the front end: those that fail, with the log. A pass is cached.

    Where a program fails its units are checked one by one, which tells whose fault it is.
    """
    try:
        source, headers = compose(units)
        passes_front_end(source, units[0].arch, headers)
        return []
    except nvrtc.CompileError as error:
        if len(units) == 1:
            return [(units[0], str(error))]
    return [found for unit in units for found in check([unit])]


def passes_front_end(source: str, arch: str, headers: Mapping[str, str]) -> None:
    """nvrtc.check of a program, whose CompileError has the log; a pass is cached."""

    def passed() -> bytes:
        nvrtc.check(source, arch, headers)
        return b"passed"

    kept(f"{cache.key(source, arch, headers)}.checked", passed)
