"""Compile kernels/cpu/ for macOS and Windows by `zig cc`: `python tools/cross_compile.py`.

Nobody runs these libraries here. A CI step is short by compiling without optimization, and one library of each kind:
threads, activations, products in eight bits, an encoder, products of integers and of floats. tools/build_wheel.py
compiles everything, for a wheel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from time import perf_counter

from build_wheel import platform_of

from qgemm.cpu.native import encoders, libraries, prebuilt, products
from qgemm.cpu.native.calls import POOL
from qgemm.cpu.native.compiler import Compiler, compiled, zig
from qgemm.cpu.native.prebuilt import Target
from qgemm.cpu.native.sources import Source
from qgemm.formats import FORMATS
from qgemm.system.process import cpus

FORMAT_NAMES = "q4_0", "f16"
TARGETS = [target for target in prebuilt.TARGETS if target.system != "linux"]
STARTS = {"darwin": b"\xcf\xfa\xed\xfe", "win32": b"MZ"}  # the first bytes of a library for 64 bits


def check(cc: Compiler, target: Target, source: Source) -> str:
    """Compile one library; a line for a person if it is none of the target's system."""
    code = compiled(cc, source.file, (*target.zig, *source.words, "-O0"))
    return "" if code.startswith(STARTS[target.system]) else f"{source.name} for {target.name}: no library"


def main(words: Sequence[str] | None = None) -> int:
    """0 if everything compiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(words)
    cc = zig()
    if cc is None:
        print("cross_compile: needs the ziglang wheel")
        return 1
    format_sources = (source for name in FORMAT_NAMES if (source := libraries.source(FORMATS[name])) is not None)
    sources = [POOL, products.QUANTIZER, products.EIGHT_BITS, encoders.BLOCKS, *format_sources]
    jobs = [(cc, target, source) for target in TARGETS for source in sources]
    start = perf_counter()
    with ThreadPool(len(cpus())) as pool:
        failures = [line for line in pool.starmap(check, jobs) if line]
    print("\n".join([*failures, f"{len(jobs) - len(failures)} libraries in {perf_counter() - start:.0f} s"]))
    print(f"compiled, not run: {', '.join(map(platform_of, TARGETS))}")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
