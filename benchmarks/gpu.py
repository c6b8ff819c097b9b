"""The GPU benchmark: products on random packed weights that are read from memory, not from the L2 cache.

Each shape has more than 300 MB of copies of its weights, which the calls of one CUDA graph use in turn. Replays of our
product, of cuBLAS in float16 and of a kernel that only reads the packed bytes alternate, with pauses between them, so
that the power limit lowers no clock. x and y are float16; the time of "a8" includes the quantization of x. Each product
is checked before it is timed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from qgemm.arguments import Activation
from qgemm.backend import backends
from qgemm.cli.timing import (
    REPEATS,
    ROTATE,
    Call,
    Cublas,
    Loop,
    capture,
    compare,
    copies_of,
    quantiles,
    replay_us,
    rotation,
)
from qgemm.cli.weights import random_blocks, repeated, repeated_rows
from qgemm.codec.format import Format
from qgemm.codec.group_activations import E4M3, GROUP_COLUMNS, INTEGER, multiplies
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import Problem
from qgemm.cuda.tensor import DeviceTensor
from qgemm.errors import UnsupportedError
from qgemm.ops import matmul
from qgemm.tensor import Tensor

from . import baselines, calls, host, mma, pack, planes, step, sweep
from .results import CALLS, KEY, LISTS, MMA, STEPS, SUSTAINED, Results, Row, rates, sources_sha256

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))  # (N, K)
M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
DEQUANTIZE_M = (1, 16, 64)
SUSTAINED_S = 0.5
BASE_ROWS = 512  # random rows packed on the host; a larger matrix repeats them
SAMPLE = 256  # columns of y that are compared with float64
# Relative RMS error: rounding W and y to float16; x to 8 bits; both to 8 bits; x to the 3 bits of e4m3's fraction.
TOLERANCE = {"a16": 2e-3, "a8": 2e-2, **dict.fromkeys(INTEGER, 2e-2), E4M3: 3e-2}
LARGE_READ, NOISE = 4 << 30, 1 << 20  # bytes, and the random bytes that they repeat
LOAD_REPLAYS = 400  # large reads: 0.7 s on an H200, longer than nvidia-smi needs


Product = Callable[[Any, DeviceTensor, Any], Any]  # x, w, y: y = x @ w.T


class Options(NamedTuple):
    """What to measure."""

    formats: Sequence[Format]
    activations: Sequence[Activation]
    shapes: Sequence[tuple[int, int]] = SHAPES
    m: Sequence[int] = M
    repeats: int = REPEATS
    dequantize: bool = False
    sweep: bool = False
    sustained: bool = False
    mma: bool = False
    step: bool = False
    rotate: int = ROTATE


class Matrix(NamedTuple):
    """The packed weights of one format and shape: rotating copies, and sampled rows of the first in float64."""

    copies: list[DeviceTensor]
    rows: NDArray[np.int64]
    sample: Any
    read: Loop
    packed: int  # bytes of the blocks, without padding


def run(options: Options, save: Callable[[Results], None]) -> tuple[Results, list[str]]:
    """Measure everything -> results, and a line for each product that was wrong or unsupported.

    `save` is called with the results so far after each shape.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cublas = Cublas(stream)
    rates_of_packing = pack.rates(stream, options.formats, options.rotate)
    results: Results = {
        **facts(stream), **host.times(options.activations), "pack": rates_of_packing,
        "planes": list(planes.rows(stream, options.formats, options.rotate)), CALLS: calls.rows(), "sweep": {},
        **{name: [] for name in LISTS}, "rows": [],
    }  # fmt: skip
    if options.step:
        results[STEPS] = list(step.rows(stream, options.repeats))
    failures: list[str] = []
    pairs = sum(len(of_format(fmt, options.activations)) for fmt in options.formats)
    with tqdm(total=len(options.shapes) * len(options.m) * pairs, disable=None) as bar:
        for shape in options.shapes:
            for row in rows(stream, cublas, shape, options):
                bar.update()
                if isinstance(row, str):
                    failures.append(row)
                    continue
                key = {name: row[name] for name in KEY}
                for name in LISTS:
                    if name in row:
                        results[name].append({**key, **row.pop(name)})
                results["rows"].append(row)
            if options.sweep:
                results["sweep"].update(sweeps(stream, shape, options))
            cupy.get_default_memory_pool().free_all_blocks()
            save(results)
    return results, failures


def rows(stream: Any, cublas: Cublas, shape: tuple[int, int], options: Options) -> Iterator[Row | str]:
    """The rows of one shape, or why there is none."""
    import cupy

    n, k = shape
    rng = np.random.default_rng(0)
    dense = dense_copies(shape, rng, options.rotate)
    matrices = {fmt: matrix(stream, fmt, shape, rng, options.rotate) for fmt in options.formats}
    for m in options.m:
        x = cupy.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16))
        y = cupy.empty((m, n), np.float16)
        cupy.cuda.Device().synchronize()
        via, baseline = baselines.dense(stream, cublas, x, dense, y)
        eight_bits = baselines.fp8(stream, x, dense) if set(options.activations) & set(GROUP_COLUMNS) else None
        for fmt, w in matrices.items():
            for activation in of_format(fmt, options.activations):
                row: Row = {"format": fmt.name, "activation": activation, "M": m, "N": n, "K": k}
                try:
                    row["route"] = route(Problem(fmt, activation, m, n, k, compute_capability())).kernel.name
                    ours = public(activation)
                    row["error"] = check(stream, ours, x, w, y, TOLERANCE[activation])
                    loop = capture(stream, products(ours, x, w, y))
                    beside = {"cublas_fp16_us": baseline, "stream_us": w.read}
                    if eight_bits and activation in GROUP_COLUMNS:
                        beside["fp8_us"] = eight_bits
                    if options.dequantize and m in DEQUANTIZE_M:
                        beside["dequantize_us"] = capture(stream, products(dequantized(cublas), x, w, y))
                    if options.mma and m >= mma.MIN_M and activation in mma.KERNELS:
                        check(stream, by_mma(activation), x, w, y, TOLERANCE[activation])
                        beside[MMA] = capture(stream, products(by_mma(activation), x, w, y))
                except (UnsupportedError, RuntimeError, ArithmeticError) as error:
                    yield f"{fmt} {activation} M={m} N={n} K={k}: {error}"
                    continue
                times, *others = compare(stream, [loop, *beside.values()], options.repeats)
                us = {name: other.us for name, other in zip(beside, others, strict=True)}
                if MMA in us:
                    row[MMA] = mma.row(activation, us.pop(MMA), us["cublas_fp16_us"])
                row.update({**times._asdict(), **us})
                if options.sustained:
                    row[SUSTAINED] = {"us": sustained(stream, loop), "cublas_fp16_us": sustained(stream, baseline)}
                yield rates({**row, "cublas_via": via, "graph": loop.graph}, w.packed)


def sweeps(stream: Any, shape: tuple[int, int], options: Options) -> Iterator[tuple[str, sweep.Sweep]]:
    """A name, e.g. "q4_0 a16 4096x4096", and the times of its sweep, for each format and activation."""
    import cupy

    (n, k), rng = shape, np.random.default_rng(0)
    for fmt in options.formats:
        w = matrix(stream, fmt, shape, rng, options.rotate)
        for activation in of_format(fmt, options.activations):

            def loops(w: Matrix = w, activation: Activation = activation) -> Iterator[tuple[int, Loop]]:
                for m in sweep.counts():
                    x = cupy.asarray(rng.standard_normal((m, k), np.float32).astype(np.float16))
                    cupy.cuda.Device().synchronize()
                    yield m, capture(stream, products(public(activation), x, w, cupy.empty((m, n), np.float16)))

            yield f"{fmt.name} {activation} {n}x{k}", sweep.measure(stream, loops(), options.repeats)


def of_format(fmt: Format, activations: Sequence[Activation]) -> list[Activation]:
    """The subset of activations that products with this format support."""
    return [activation for activation in activations if multiplies(activation, fmt)]


def public(activation: Activation) -> Product:
    """The product by the public function."""
    return lambda x, w, y: matmul(x, w, activation, out=y)


def dequantized(cublas: Cublas) -> Product:
    """The product by decoding the whole matrix to float16, then cuBLAS."""
    return lambda x, w, y: cublas(x, w.dequantize(np.float16), y)


def by_mma(activation: Activation) -> Product:
    """The product by the kernels for GPUs without wgmma."""
    return lambda x, w, y: mma.product(x, w, activation, y)


def products(multiply: Product, x: Any, w: Matrix, y: Any) -> list[Call]:
    """y = x @ copy.T for each copy in turn."""
    turns = rotation(w.copies, w.packed, 2 * y.size * x.shape[1])
    return [lambda c=c: multiply(x, c, y) for c in turns]  # type: ignore[misc]


def check(stream: Any, multiply: Product, x: Any, w: Matrix, y: Any, tolerance: float) -> float:
    """The relative RMS error of a product against float64; ArithmeticError beyond `tolerance` or for a hole in y."""
    import cupy

    y.fill(np.nan)
    cupy.cuda.Device().synchronize()
    with stream:
        multiply(x, w.copies[0], y)
    stream.synchronize()
    holes = int(cupy.count_nonzero(~cupy.isfinite(y)))
    exact = x.astype(np.float64) @ w.sample.T
    off = y[:, cupy.asarray(w.rows)].astype(np.float64) - exact
    error = float(cupy.sqrt((off**2).mean() / (exact**2).mean()))
    if holes or not error <= tolerance:
        raise ArithmeticError(f"wrong product: relative RMS error {error:.3g}, {holes} outputs not finite")
    return float(f"{error:.3g}")


def matrix(stream: Any, fmt: Format, shape: tuple[int, int], rng: np.random.Generator, rotate: int) -> Matrix:
    """Random packed weights. Copies hold the same rows in different orders, so that no two reads are alike."""
    import cupy

    n, k = shape
    base_rows = min(n, BASE_ROWS)
    if n % base_rows:
        raise UnsupportedError(f"N = {n} is not a multiple of {BASE_ROWS}, the rows that a large matrix repeats")
    base = Tensor(fmt, (base_rows, k), random_blocks(fmt, base_rows, k, rng)).to_device()
    packed = n * k // fmt.weights * fmt.block_bytes
    copies = [repeated_rows(base, shape, shift) for shift in range(copies_of(packed, rotate))]
    picked = np.sort(rng.choice(n, min(n, SAMPLE), replace=False))
    sample = copies[0].dequantize(np.float32)[cupy.asarray(picked)].astype(np.float64)
    cupy.cuda.Device().synchronize()
    return Matrix(copies, picked, sample, baselines.read(stream, [copy.data for copy in copies]), packed)


def dense_copies(shape: tuple[int, int], rng: np.random.Generator, rotate: int) -> list[Any]:
    """Random float16 weights [N, K] for cuBLAS, of the same total size."""
    import cupy

    n, k = shape
    base_rows = min(n, BASE_ROWS)
    base = cupy.asarray((rng.standard_normal((base_rows, k), np.float32) / 32).astype(np.float16))
    return [repeated(base, n // base_rows, shift) for shift in range(copies_of(2 * n * k, rotate))]


def sustained(stream: Any, loop: Loop) -> float:
    """Microseconds a call after SUSTAINED_S seconds without a pause, at the clock that the power limit allows."""
    samples, end = [], perf_counter() + SUSTAINED_S
    while perf_counter() < end:
        samples.append(replay_us(stream, loop))
    sleep(SUSTAINED_S)
    return quantiles(samples[-max(1, len(samples) // 4) :]).us


def facts(stream: Any) -> Results:
    """The machine: GPU, driver, clocks under load, speed of a large read; and the digest of the sources."""
    import cupy

    state = backends()["cuda"].facts
    size = min(LARGE_READ, cupy.cuda.runtime.memGetInfo()[0] // 4) // NOISE * NOISE
    noise = cupy.asarray(np.frombuffer(np.random.default_rng(0).bytes(NOISE), np.uint8)[None])
    large = repeated(noise, size // NOISE, 0)
    cupy.cuda.Device().synchronize()
    loop = baselines.read(stream, [large])
    for _ in range(LOAD_REPLAYS):
        loop.replay()
    smi = nvidia_smi("driver_version", "clocks.sm", "clocks.mem")
    (read,) = compare(stream, [loop])
    return {
        "device": state["device"],
        "sm": compute_capability(),
        "sms": int(cupy.cuda.Device().attributes["MultiProcessorCount"]),
        "driver": smi[0],
        "cuda": state["driver_cuda"],
        "clocks": {"sm_mhz": smi[1], "mem_mhz": smi[2]},
        "cupy": state["cupy"],
        "nvrtc": state["nvrtc"],
        "kernels_sha256": sources_sha256(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "read_gbs": round(size / read.us / 1e3, 1),
    }


def nvidia_smi(*queries: str) -> list[Any]:
    """The answers of nvidia-smi for the current GPU, numbers as int; all None without nvidia-smi."""
    import cupy

    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
    bus = cupy.cuda.Device().pci_bus_id
    try:
        answer = subprocess.run([*command, f"--id={bus}"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"nvidia-smi does not answer: {error}", file=sys.stderr)
        return [None] * len(queries)
    return [int(word) if word.isdigit() else word for word in answer.splitlines()[0].split(", ")]


def compute_capability() -> int:
    """Compute capability of the current GPU: 90 is 9.0."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)
