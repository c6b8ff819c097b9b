"""Compile every kernel x format x architecture with NVRTC, without a GPU; report registers and spills.

On the tuned architecture every template that a product can get is compiled, elsewhere one set of types.
Exit 1 if anything fails to compile, with the log, or if a kernel that is tuned for its architecture spills registers.
With --fill-cache the kernels go into the cache where a GPU looks first (qgemm/cuda/jit/cache.py); nothing is reported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from qgemm import FORMATS
from qgemm.cuda.jit import cache, codegen, nvrtc
from qgemm.cuda.kernels.routes import common_variants, variants
from qgemm.cuda.problem import Q8_1

TUNED = "sm_90a"
TUNED_KERNELS = ("decode", "decode_a8", "prefill")  # there; for x of 16 bits or Q8_1 they may spill no registers
ELSEWHERE = {"In": ("half", Q8_1), "Out": ("float",)}  # the types compiled for the other architectures


class Unit(NamedTuple):
    """One translation unit: kernel, format name ("" if it knows none), template, architecture."""

    kernel: str
    format: str
    template: tuple[tuple[str, Any], ...]
    arch: str

    def __str__(self) -> str:
        parameters = " ".join(f"{name}={value}" for name, value in self.template)
        return f"{self.arch:7} {self.kernel} {self.format} {parameters}"


def units(archs: tuple[str, ...] = nvrtc.ARCHS) -> Iterator[Unit]:
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
        source = codegen.compose(unit.kernel, FORMATS.get(unit.format), **dict(unit.template))
        return unit, nvrtc.compile_cubin(source, unit.arch)[1], ""
    except nvrtc.CompileError as error:
        return unit, "", str(error)


def cache_unit(unit: Unit) -> str:
    """Compile into the cache -> the error, or ""."""
    try:
        cache.cached_cubin(codegen.compose(unit.kernel, FORMATS.get(unit.format), **dict(unit.template)), unit.arch)
        return ""
    except nvrtc.CompileError as error:
        return f"{unit}: {error}"


class Resources(NamedTuple):
    """What a thread of a kernel takes: registers, and bytes of them that are spilled to memory."""

    registers: int
    spilled: int


def resources(report: str) -> Resources:
    """What ptxas reports of a kernel."""
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Resources(int(registers), sum(map(int, re.findall(r"(\d+) bytes spill stores", report))))


def problem(unit: Unit, report: str, error: str) -> str:
    """Why a compiled unit is not good enough, or ""."""
    if error:
        return f"{unit}: {error}"
    if unit.arch != TUNED or unit.kernel not in TUNED_KERNELS or ("In", "float") in unit.template:
        return ""
    spilled = resources(report).spilled
    return f"{unit}: spills {spilled} bytes of registers" if spilled else ""


def summary(found: dict[Unit, Resources]) -> Iterator[str]:
    """A line for each architecture and kernel: the most registers, and how many units spill how much."""
    for arch, kernel in sorted({(unit.arch, unit.kernel) for unit in found}):
        some = [taken for unit, taken in found.items() if (unit.arch, unit.kernel) == (arch, kernel)]
        spills = [taken.spilled for taken in some if taken.spilled]
        spilling = f", {len(spills)} of {len(some)} spill up to {max(spills)} bytes" if spills else ""
        yield f"{arch:7} {kernel:22} {max(taken.registers for taken in some):3} registers{spilling}"


def main() -> int:
    """Compile, print a line per architecture and kernel; with --report write one per unit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=nvrtc.ARCHS, help="only this architecture (repeatable)")
    parser.add_argument("--kernel", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--report", metavar="PATH", type=Path, help="write registers and spilled bytes of every unit")
    parser.add_argument("--fill-cache", action="store_true", help="only compile what is not in the cache, into it")
    options = parser.parse_args()
    todo = [
        unit for unit in units(tuple(options.arch or nvrtc.ARCHS)) if unit.kernel in (options.kernel or [unit.kernel])
    ]
    if options.fill_cache:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            done = tqdm(pool.map(cache_unit, todo, chunksize=8), total=len(todo), delay=1, disable=None)
            errors = [error for error in done if error]
        print(*errors, f"{len(todo) - len(errors)} of {len(todo)} kernels are in {cache.cache_dir()}", sep="\n")
        return 1 if errors else 0
    found: dict[Unit, Resources] = {}
    failed = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(compile_unit, todo, chunksize=8)
        for unit, report, error in tqdm(done, total=len(todo), delay=1, disable=None):
            if wrong := problem(unit, report, error):
                failed += 1
                print(wrong, file=sys.stderr)
            if not error:
                found[unit] = resources(report)
    print(*summary(found), sep="\n")
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{taken.registers}\t{taken.spilled}\t{unit}\n" for unit, taken in found.items())
        options.report.write_text("registers\tbytes spilled\tunit\n" + "".join(lines))
    archs = sorted({unit.arch for unit in todo})
    print(f"{len(todo) - failed} of {len(todo)} kernels are good for {', '.join(archs)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
