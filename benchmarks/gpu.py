"""The GPU benchmark: products on random packed weights that are read from memory, not from the L2 cache.

Each shape has more than 300 MB of copies of its weights, which the calls of one CUDA graph use in turn. All products of
a shape and number of rows of x take turns, with pauses between their replays, so that the power limit lowers no clock:
those of every format, activation and type of x, cuBLAS in each type, and, at the first number of rows, a kernel that
only reads the packed bytes. x and y have one type; the time of "a8" includes the quantization of x. Each product is
checked before it is timed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime, timezone
from itertools import product
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from qgemm.arguments import Activation
from qgemm.backend import backends
from qgemm.cli.timing import ROTATE, Cublas, Loop, capture, compare, quantiles, replay_us
from qgemm.cli.weights import repeated
from qgemm.codec.format import Format
from qgemm.codec.group_activations import GROUP_COLUMNS, multiplies
from qgemm.cuda.kernels.routes import route
from qgemm.cuda.problem import C_TYPES, Output, Problem
from qgemm.formats import format_named
from qgemm.ops import matmul

from . import baselines, calls, host, mma, pack, planes, step, sweep
from .operands import Matrix, Operands, Product, check, dequantized, matrix, products, tolerance
from .plan import Case
from .results import CALLS, DENSE_US, LISTS, MMA, STEPS, SUSTAINED, X_TYPES, Results, Row, rates, sources_sha256

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))  # (N, K)
M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
REPEATS = 7  # timed replays
DEQUANTIZE_M = (1, 16, 64)
SUSTAINED_S = 0.5
FEW = 16  # rows of x, up to which memory is the limit and the GPU stays far from its power limit
REST, LESS_REST = 3, 1  # pause after a replay, in replays: with more rows of x than FEW, and up to FEW
LARGE_READ, NOISE = 4 << 30, 1 << 20  # bytes, and the random bytes that they repeat
LOAD_REPLAYS = 400  # large reads: 0.7 s on an H200, longer than nvidia-smi needs


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
    x: Sequence[str] = X_TYPES

    def cases(self, shape: tuple[int, int]) -> list[Case]:
        """The products of a shape."""
        return [
            Case(fmt.name, activation, m, *shape, x)
            for m, fmt, x in product(self.m, self.formats, self.x)
            for activation in of_format(fmt, self.activations)
        ]


class Extras(NamedTuple):
    """The cases that are also measured in another way: decoding W first, by mma.sync, without pauses."""

    dequantize: Collection[Case] = ()
    mma: Collection[Case] = ()
    sustained: Collection[Case] = ()


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
        results[STEPS] = list(step.rows(stream, options.repeats, options.x))
    failures: list[str] = []
    every_case = {shape: options.cases(shape) for shape in options.shapes}
    with tqdm(total=sum(map(len, every_case.values())), disable=None) as bar:
        for shape, cases in every_case.items():
            operands = operands_of(stream, shape, cases, options.rotate)
            failures += operands.failures
            extras = Extras(
                [case for case in cases if options.dequantize and case.m in DEQUANTIZE_M],
                [case for case in cases if options.mma and case.m >= mma.MIN_M and case.activation in mma.KERNELS],
                cases if options.sustained else (),
            )
            for m in options.m:
                of_m = [case for case in cases if case.m == m]
                for item in measure(stream, cublas, operands, of_m, extras, options.repeats):
                    if isinstance(item, str):
                        failures.append(item)
                    else:
                        results[item[0]].append(item[1])
                bar.update(len(of_m))
            if options.sweep:
                results["sweep"].update(sweeps(stream, shape, options))
            del operands
            cupy.get_default_memory_pool().free_all_blocks()
            save(results)
    return results, failures


def operands_of(stream: Any, shape: tuple[int, int], cases: Sequence[Case], rotate: int = ROTATE) -> Operands:
    """The operands of products of one shape."""
    formats, types = dict.fromkeys(case.format for case in cases), dict.fromkeys(case.x for case in cases)
    packed = [format_named(name) for name in formats]
    return Operands(stream, shape, packed, types, max(case.m for case in cases), rotate)


def measure(
    stream: Any, cublas: Cublas, operands: Operands, cases: Sequence[Case], extras: Extras, repeats: int = REPEATS
) -> Iterator[tuple[str, Row] | str]:
    """Products of one shape and number of rows of x, in turns -> each row with the name of its list, or its error."""
    import cupy

    loops: dict[tuple[Any, ...], Loop] = {}  # keys: the kind of loop, then its case, type or format
    rows: dict[Case, Row] = {}
    for x_type in dict.fromkeys(case.x for case in cases):
        of_type = [case for case in cases if case.x == x_type and case.format in operands.matrices]
        try:
            x = operands.x(cases[0].m, x_type)
            y = cupy.empty((len(x), operands.shape[0]), x.dtype)
            cupy.cuda.Device().synchronize()
            dense = baselines.dense(stream, cublas, x, operands.dense[x_type], y)
            if {case.activation for case in of_type} & set(GROUP_COLUMNS) and ("fp8",) not in loops:
                eight_bits = baselines.fp8(stream, x, operands.dense[x_type])
                loops.update({("fp8",): eight_bits} if eight_bits else {})
        except Exception as error:  # e.g. bfloat16 without ml_dtypes: rows of the other type are measured
            yield from (f"{case}: {error}" for case in of_type)
            continue
        loops.update({("dense", x_type, via): loop for via, loop in dense.items()})
        for case in of_type:
            w = operands.matrices[case.format]
            try:
                rows[case], of_case = prepared(stream, cublas, case, x, w, y, extras)
            except Exception as error:  # no product ends the run
                yield f"{case}: {error}"
                continue
            loops.update(of_case)
            if case.format not in operands.read_us:
                loops["read", case.format] = w.read
    rest = LESS_REST if cases[0].m <= FEW else REST
    times = dict(zip(loops, compare(stream, list(loops.values()), repeats, rest=rest), strict=True))
    operands.read_us.update({key[1]: time.us for key, time in times.items() if key[0] == "read"})
    for case, row in rows.items():
        dense_name = DENSE_US[case.x]
        us, via = min((times[key].us, key[2]) for key in times if key[:2] == ("dense", case.x))
        row.update({**times["product", case]._asdict(), dense_name: us, "stream_us": operands.read_us[case.format]})
        if ("fp8",) in times and case.activation in GROUP_COLUMNS:
            row["fp8_us"] = times["fp8",].us
        if ("dequantize", case) in times:
            row["dequantize_us"] = times["dequantize", case].us
        row.update(cublas_via=via, graph=loops["product", case].graph)
        yield "rows", rates(row, operands.matrices[case.format].packed)
        if (MMA, case) in times:
            yield MMA, {**case.row, **mma.row(case.activation, case.x, times[MMA, case].us, us)}
        if case in extras.sustained:
            pair = {"us": loops["product", case], dense_name: loops["dense", case.x, via]}
            yield SUSTAINED, {**case.row, **{name: sustained(stream, loop) for name, loop in pair.items()}}


def prepared(
    stream: Any, cublas: Cublas, case: Case, x: Any, w: Matrix, y: Any, extras: Extras
) -> tuple[Row, dict[tuple[Any, ...], Loop]]:
    """A row with the route and the error of a product that was checked, and its loops by their keys."""
    ours, limit, kind = public(case.activation), tolerance(case.activation, case.x), C_TYPES[case.x]
    outputs = (Output(case.n, case.x),)
    p = Problem(format_named(case.format), case.activation, case.m, case.n, case.k, compute_capability(), kind, outputs)
    row = {**case.row, "route": route(p).kernel.name, "error": check(stream, ours, x, w, y, limit)}
    loops = {("product", case): capture(stream, products(ours, x, w, y))}
    if case in extras.dequantize:
        loops["dequantize", case] = capture(stream, products(dequantized(cublas), x, w, y))
    if case in extras.mma:
        check(stream, by_mma(case.activation), x, w, y, limit)
        loops[MMA, case] = capture(stream, products(by_mma(case.activation), x, w, y))
    return row, loops


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


def by_mma(activation: Activation) -> Product:
    """The product by the kernels for GPUs without wgmma."""
    return lambda x, w, y: mma.product(x, w, activation, y)


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
