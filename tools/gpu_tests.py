"""Run tests/gpu on the GPUs of this machine: compile their kernels, then start a pytest worker on all cores but two.

    tools/gpu_tests.py                          all tests; writes the ledger, or $QGEMM_LEDGER
    tools/gpu_tests.py --fill --arch sm_90a     only compile, on any machine, into QGEMM_CACHE_DIR

Workers are spread over the GPUs (tests/conftest.py). The kernels of all configs that the tests iterate over, and of
products of other types and shapes, are compiled first; workers compile the rest. Other arguments are passed to pytest
(-k, -x, --durations=40), and the ledger stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from unittest.mock import patch

import fill_cache
import ledger
from compile_kernels import every_unit, filled, sm_of
from kernel_batches import Unit

import qgemm
from qgemm import FORMATS
from qgemm.arguments import ACTIVATIONS
from qgemm.cuda.jit import nvrtc
from qgemm.cuda.kernels import decode, decode_config, prefill_sm80, routes
from qgemm.cuda.kernels.decode import DECODE, DECODE_A8, DECODE_SLICES, MOE_DECODE, MOE_DECODE_TILES
from qgemm.cuda.kernels.gemv import GEMV_DP4A, GEMV_SIMT
from qgemm.cuda.kernels.kernel import Kernel
from qgemm.cuda.kernels.moe_prefill_sm80 import MOE_PREFILL_SM80
from qgemm.cuda.kernels.panels import DEQUANTIZE
from qgemm.cuda.kernels.prefill_sm80 import PREFILL_SM80, PREFILL_SM80_A8
from qgemm.cuda.kernels.prefill_sm90 import MOE_PREFILL_SM90, PREFILL_SM90
from qgemm.cuda.problem import Q8_1, TUNED_SMS, TYPES, Output, Problem, Routed
from qgemm.files.compiled import cache_dir

ROOT = Path(__file__).parents[1]
# Kernels that tests run in every config for float16 or prepared x, and for other types of x only with SHAPES.
EVERY_CONFIG = (DECODE.name, DECODE_A8.name, DECODE_SLICES.name, PREFILL_SM90.name)
MOE = (MOE_DECODE.name, MOE_DECODE_TILES.name, MOE_PREFILL_SM80.name, MOE_PREFILL_SM90.name)
FEW = (GEMV_SIMT.name, GEMV_DP4A.name)  # kernels of sm_75, for few tokens
OTHER_TYPES = ("float", "bf16")
SHAPES = ((130, 256), (200, 512))  # (N, K) of products with every type of x
ROWS = (*range(1, 18), 20, 33, 40, 64, 70, 130, 300, 519)
CORES_LEFT = 2


def units(arch: str) -> Iterator[Unit]:
    """The kernels that the tests need on this architecture."""
    sm, formats = sm_of(arch), [fmt for fmt in FORMATS.values() if fmt.tiled]
    for unit in every_unit([arch]):
        other = dict(unit.template).get("In") in OTHER_TYPES
        if unit.kernel not in (PREFILL_SM80.name, PREFILL_SM80_A8.name, *MOE) and not (
            other and unit.kernel in EVERY_CONFIG
        ):
            yield unit
    yield from (unit._replace(arch=arch) for unit in (*shaped(sm, SHAPES, ROWS, TYPES), *by_experts(sm)))
    with (
        patch.object(decode, "BULK_COPIES", 1000),
        patch.object(decode_config, "BULK_COPIES", 1000),
        patch.object(routes, "ROUTES", tuple(row for row in routes.ROUTES if row.kernel is not PREFILL_SM90)),
    ):  # pipelines without bulk copies
        yield from (unit._replace(arch=arch) for unit in shaped(sm, ((200, 352),), (1, 8, 9, 16), ("half", "float")))
    for fmt, config in product(formats, prefill_sm80.SM80_CONFIGS):
        a8 = config.kernel == PREFILL_SM80_A8.name
        for x in () if a8 and not fmt.integer else (Q8_1,) if a8 else ("half", "bf16"):
            template = prefill_sm80.template(fmt, config, x, "float", sm)
            yield Unit(config.kernel, fmt.name, tuple(template.items()), arch)
    for unit in every_unit(["sm_75"]):
        values = dict(unit.template)
        if unit.kernel in FEW and values["Out"] == "float" and values["In"] in ("float", Q8_1):
            yield unit._replace(arch=arch)


def shaped(sm: int, shapes: Iterable[tuple[int, int]], rows: Sequence[int], types: Sequence[str]) -> Iterator[Unit]:
    """Kernels of products with one weight, for several types of x."""
    formats = [fmt for fmt in FORMATS.values() if fmt.tiled]
    for fmt, activation, x, m, (n, k) in product(formats, ACTIVATIONS, types, rows, shapes):
        if activation == "a16" or fmt.integer:
            p = Problem(fmt, activation, m, n, -(-k // fmt.weights) * fmt.weights, sm, x, (Output(n),), sms=TUNED_SMS)
            kernel = routes.route(p).kernel
            for source in kernel.reads(p) if kernel is not DEQUANTIZE else ():
                yield chosen(kernel, p._replace(x=source))


def by_experts(sm: int) -> Iterator[Unit]:
    """Kernels of products by experts, as in tests/gpu/test_experts.py."""
    for fmt, x, (tokens, top_k) in product(FORMATS.values(), TYPES, ((1, 4), (5, 2), (40, 3))):
        if fmt.tiled and (fmt.integer or x != "float"):
            routed = Routed(experts=6, top_k=top_k)
            k = -(-544 // fmt.weights) * fmt.weights
            p = Problem(fmt, "a16", tokens, 200, k, sm, x, (Output(200),), sms=TUNED_SMS, routed=routed)
            yield chosen(MOE_DECODE, p)


def chosen(kernel: Kernel, p: Problem) -> Unit:
    """The unit of a kernel in the config that it chooses."""
    return Unit(kernel.name, p.format.name, tuple(kernel.template(p, kernel.choose(p)).items()), "")


def fill(arch: str) -> int:
    """Compile the kernels that the cache lacks, with a process for each core -> the number of failures."""
    start = time.monotonic()
    todo = list(dict.fromkeys(units(arch)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(filled, todo, chunksize=4)
        results = list(fill_cache.progress(done, len(todo), "kernels"))
    print(fill_cache.summary(results, time.monotonic() - start, cache_dir()), flush=True)
    for unit, result in zip(todo, results, strict=True):
        if result.error:
            print(f"{unit}: {result.error}", file=sys.stderr)
    return sum(bool(result.error) for result in results)


def main() -> int:
    """Fill the cache, then run the tests; returns their exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", action="store_true", help="only compile the kernels")
    parser.add_argument("--arch", choices=nvrtc.ARCHS, help="for this architecture (default: of this machine's GPU)")
    parser.add_argument("-n", "--workers", type=int, default=max(1, (os.cpu_count() or 1) - CORES_LEFT))
    arguments, pytest_arguments = parser.parse_known_args()
    if not (arch := arguments.arch or fill_cache.arch_here()):
        parser.error("there is no GPU here: --fill --arch sm_90a compiles for one")
    failed = fill(arch)
    if arguments.fill:
        return 1 if failed else 0
    pytest = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--dist", "loadgroup"]
    pytest += ["-n", str(arguments.workers)]
    if pytest_arguments:
        return subprocess.run([*pytest, *pytest_arguments], cwd=ROOT).returncode
    by_file = ledger.collected()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([*pytest, f"--junit-xml={report}"], cwd=ROOT).returncode
        facts = {**qgemm.backends()["cuda"].facts, "driver": driver()}
        content = ledger.entry(facts, by_file, report)
    target = Path(os.environ.get("QGEMM_LEDGER", ledger.LEDGER))
    target.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {target}")
    return status


def driver() -> str:
    """The version of the NVIDIA driver, e.g. 580.65.06."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
