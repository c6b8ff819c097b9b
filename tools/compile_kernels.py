"""Compile every kernel x format x architecture with NVRTC, without a GPU; report registers and spills.

On the tuned architecture every template that the routes can ask for is compiled, elsewhere one set of types.
Exit 1 if anything fails to compile, with the log.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from tqdm import tqdm

from qgemm import FORMATS, jit
from qgemm.routes import PREPARED, common_variants, variants

TUNED = "sm_90a"
ELSEWHERE = {"In": ("half", PREPARED), "Out": ("float",)}  # the types compiled for the other architectures


class Unit(NamedTuple):
    """One translation unit: kernel, format name ("" if it knows none), template, architecture."""

    kernel: str
    format: str
    template: tuple[tuple[str, Any], ...]
    arch: str

    def __str__(self) -> str:
        parameters = " ".join(f"{name}={value}" for name, value in self.template)
        return f"{self.arch:7} {self.kernel} {self.format} {parameters}"


def units(archs: tuple[str, ...] = jit.ARCHS) -> Iterator[Unit]:
    """Everything that CI compiles."""
    tiled = [fmt for fmt in FORMATS.values() if fmt.slots]
    for arch in archs:
        sm = int("".join(filter(str.isdigit, arch)))
        wanted = [(kernel, fmt.name, template) for fmt in tiled for kernel, template in variants(fmt, sm)]
        wanted += [(kernel, "", template) for kernel, template in common_variants()]
        for kernel, name, template in wanted:
            common = all(template.get(key, some[0]) in some for key, some in ELSEWHERE.items())
            floats = kernel == "fused" and template["In"] == template["Out"] == "float"  # the one for exact levels
            if arch == TUNED or common or floats or not name:
                yield Unit(kernel, name, tuple(template.items()), arch)


def compile_unit(unit: Unit) -> tuple[Unit, str, str]:
    """(unit, ptxas' report, error); one of the two texts is empty."""
    try:
        source = jit.compose(unit.kernel, FORMATS.get(unit.format), **dict(unit.template))
        return unit, jit.compile_cubin(source, unit.arch)[1], ""
    except jit.CompileError as error:
        return unit, "", str(error)


def resources(report: str) -> str:
    """Registers and spills of a ptxas report, e.g. "64 registers, 4 bytes spilled"."""
    registers = re.search(r"Used (\d+) registers", report)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))
    return f"{registers.group(1) if registers else '?'} registers, {spills} bytes spilled"


def main() -> int:
    """Compile, print a line per unit with -v, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=jit.ARCHS, help="only this architecture (repeatable)")
    parser.add_argument("-v", "--verbose", action="store_true", help="registers and spills of every unit")
    options = parser.parse_args()
    todo = list(units(tuple(options.arch or jit.ARCHS)))
    failed = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(compile_unit, todo, chunksize=8)
        for unit, report, error in tqdm(done, total=len(todo), delay=1, disable=None):
            if error:
                failed += 1
                print(f"{unit}: {error}", file=sys.stderr)
            elif options.verbose:
                print(f"{unit}: {resources(report)}")
    archs = sorted({unit.arch for unit in todo})
    print(f"{len(todo) - failed} of {len(todo)} kernels compiled for {', '.join(archs)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
