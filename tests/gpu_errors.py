"""Measure the RMS errors of the GPU's products, relative to what tests/measured_errors.py predicts.

    tests/gpu_errors.py                    every format by every kernel that serves it on this GPU, a few minutes
    tests/gpu_errors.py q4_0 q4_k          some formats
    tests/gpu_errors.py --rows errors.txt  all measurements, one a line, beside the summary

Prints the least, median and largest ratio of each kernel, activation and type of x, with the format of the largest.
Tests accept ratios up to SLACK; a ratio far below 1 means that the prediction is loose. Exits with 1 if a product fails
its check.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import measured_errors
import numpy as np
from eight_bit_codes import codes_of
from measured_errors import Expected

import qgemm
from qgemm.codec.eight_bits import e4m3_weights
from qgemm.codec.format import Format, float_dtype
from qgemm.cuda.kernels import routes
from qgemm.errors import UnsupportedError

N, SHAPES = 200, ((1, 768), (9, 768), (70, 4096), (300, 768))
DECODE = ("decode", "decode_slices", "gemv_simt")  # kernels that round neither weights nor x
FEWEST = {"prefill_sm90": 9, "gemm_sm90_s8": 241}  # rows of x
INTEGER_DOTS = ("decode_a8", "prefill_sm80_a8", "gemv_dp4a")


class Measured(NamedTuple):
    """The error of one product. failure: why its check failed, or an empty string."""

    kernel: str
    activation: str
    dtype: str
    format: str
    m: int
    k: int
    ratio: float
    failure: str


def expected(kernel: str, activation: str, x: np.ndarray, w: qgemm.Tensor, on_device: Any) -> Expected:
    """The product of x [M, K] and W by a correct kernel."""
    if activation == "a16":
        return helpers.expected_decode(x, w) if kernel in DECODE else helpers.expected_product(x, w, x.dtype)
    blocks = qgemm.quantize_activations(x, activation).blocks
    if activation == "a8":
        return measured_errors.of_integer_dots(blocks, w) if kernel in INTEGER_DOTS else helpers.expected_a8(x, w)
    if activation == "e4m3_g256":
        return measured_errors.of_e4m3(blocks, e4m3_weights(w.format, w.blocks, w.shape[1]))
    identity = helpers.cupy().eye(w.shape[1], dtype=np.float32)
    return measured_errors.of_groups(blocks, codes_of(w, qgemm.matmul(identity, on_device, activation).get()))


def measured(name: str) -> list[Measured]:
    """All products of one format; runs in a process of its own, whose routes it changes."""
    os.environ["QGEMM_CPU"] = "numpy"
    return list(products(qgemm.FORMATS[name]))


def products(fmt: Format) -> Iterator[Measured]:
    """Every kernel that serves the format, alone in the table of routes."""
    cp, table = helpers.cupy(), routes.DENSE
    sm = int(cp.cuda.Device().compute_capability)
    weights = {k: helpers.random_tensor(fmt, N, k, np.random.default_rng(k)) for _, k in SHAPES}
    on_device = {k: w.to_device() for k, w in weights.items()}
    kernels = dict.fromkeys((row.kernel.name, *row.activations) for row in table if row.formats.holds(fmt))
    for kernel, activation in kernels:
        rows = [row for row in table if (row.kernel.name, *row.activations) == (kernel, activation)]
        if sm < min(row.least for row in rows) or ("sm90" in kernel and not any(row.runs_on(sm) for row in rows)):
            continue
        routes.ROUTES = tuple(row._replace(below=routes.ANY, pays=lambda p: True) for row in rows)
        routes.launch.cache_clear()
        for w in on_device.values():
            w.plans.clear()
        for dtype in ("float16", "bfloat16", "float32"):
            for m, k in (shape for shape in SHAPES if shape[0] >= FEWEST.get(kernel, 1)):
                w, x = weights[k], helpers.normal(m, weights[k].shape[1], seed=m).astype(float_dtype(dtype))
                y = helpers.poisoned((m, N))
                try:
                    qgemm.matmul(cp.asarray(x), on_device[k], activation, out=y)
                    prediction, failure = expected(kernel, activation, x, w, on_device[k]), ""
                except UnsupportedError:
                    continue
                try:
                    prediction.check(y.get())
                except AssertionError as error:
                    failure = str(error)
                yield Measured(kernel, activation, dtype, fmt.name, m, k, prediction.ratio(y.get()), failure)


def summary(rows: list[Measured]) -> Iterator[str]:
    """A line for each kernel, activation and type of x."""
    by_family = defaultdict(list)
    for row in rows:
        by_family[row.kernel, row.activation, row.dtype].append(row)
    yield f"{'kernel':24}{'activation':11}{'x':10}{'least':>8}{'median':>8}{'largest':>8}  of"
    for family, members in sorted(by_family.items()):
        ratios, largest = [row.ratio for row in members], max(members, key=lambda row: row.ratio)
        numbers = "".join(f"{ratio:8.3f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios)))
        yield f"{family[0]:24}{family[1]:11}{family[2]:10}{numbers}  {largest.format} M={largest.m} K={largest.k}"


def main() -> int:
    """Print the summary; 1 if a product fails its check."""
    formats = [name for name, fmt in qgemm.FORMATS.items() if fmt.tiled or fmt.plain]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=formats, metavar="FORMAT")
    parser.add_argument("--rows", type=Path, help="write all measurements to this file")
    parser.add_argument("-n", "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    arguments = parser.parse_args()
    rows: list[Measured] = []
    errors = []
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(measured, name): name for name in arguments.formats}
        for future in as_completed(futures):
            if error := future.exception():
                errors.append(f"{futures[future]}: {type(error).__name__}: {error}")
            else:
                rows += future.result()
    rows.sort()
    print("\n".join(summary(rows)))
    if arguments.rows is not None:
        arguments.rows.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    failures = [f"{' '.join(map(str, row[:-1]))}: {row.failure}" for row in rows if row.failure]
    print("\n".join([*errors, *failures, f"{len(rows)} products, {len(failures)} failed"]))
    return 1 if errors or failures else 0


if __name__ == "__main__":
    sys.exit(main())
