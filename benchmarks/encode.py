"""Encoding on the GPU: as `qgemm convert --backend cuda` does but without the disk, and the kernel alone."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from qgemm.cli.timing import capture, compare, rotation
from qgemm.codec.format import Format
from qgemm.converter.device import KINDS, RANGE, STREAMS, Device
from qgemm.converter.job import ordered_results
from qgemm.converter.range_encoding import ranges
from qgemm.converter.rules import Step
from qgemm.converter.weight import weight_from_tensor
from qgemm.cuda.encode import encode
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor
from qgemm.text import columns

from .goals import ENCODE_GBS
from .pack import NOISE

PAIRS = (  # from, to
    ("f16", "q4_0"), ("f16", "q4_1"), ("f16", "q5_0"), ("f16", "q5_1"), ("f16", "q8_0"), ("f16", "mxfp4"),
    ("f16", "kbit4"), ("bf16", "q4_0"), ("f32", "q4_0"),
    ("f16", "q4_k"), ("f16", "q5_k"), ("f16", "q6_k"), ("f16", "iq4_nl"), ("f16", "iq4_xs"), ("f16", "nvfp4"),
    ("f16", "q2_k"), ("f16", "q3_k"),
)  # fmt: skip
SHAPE = 16384, 8192  # (N, K); its blocks exceed every cache
TENSORS = 8  # jobs of that shape, which share one array: 2 GiB in F16
REPEATS = 5


class Row(NamedTuple):
    """One pair of types: GB/s of weights from host memory, through the GPU, to blocks in host memory.

    kernel_gbs: bytes that the kernel reads and writes. share: its speed relative to a device copy. Both are 0 for kbit,
    whose kernels have their own benchmark.
    """

    source: str
    format: str
    gbs: float
    kernel_gbs: float
    share: float
    goal: float = ENCODE_GBS

    @property
    def missed(self) -> bool:
        """Whether it is slower than its goal."""
        return self.gbs < self.goal


def run(tensors: int = TENSORS, shape: tuple[int, int] = SHAPE) -> list[Row]:
    """All rows."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return [row(stream, FORMATS[source], FORMATS[name], tensors, shape) for source, name in PAIRS]


def row(stream: Any, source: Format, fmt: Format, tensors: int, shape: tuple[int, int]) -> Row:
    """One pair of types."""
    noise = np.random.default_rng(0).standard_normal((NOISE, 1), np.float32)
    assert source.encode is not None
    numbers = np.resize(source.encode(noise), shape)
    gbs = host_rate(numbers, source, fmt, tensors)
    kernel, share = kernel_rate(stream, numbers.reshape(-1), source, fmt) if fmt.integer else (0.0, 0.0)
    return Row(source.name, fmt.name, *(float(f"{value:.3g}") for value in (gbs, kernel, share)))


def host_rate(numbers: Any, source: Format, fmt: Format, tensors: int) -> float:
    """GB/s of the converter's ranges; the encoded blocks are discarded."""
    step, device = Step(weight_from_tensor(Tensor(source, numbers.shape, numbers)), fmt), Device()
    jobs = ranges(step, RANGE) * tensors

    def seconds() -> float:
        start = time.perf_counter()
        for _ in ordered_results(lambda job: device.encode_range(step, *job), jobs, STREAMS):
            pass
        return time.perf_counter() - start

    seconds()  # compiles, allocates
    return float(tensors * numbers.nbytes / median(seconds() for _ in range(REPEATS)) / 1e9)


def kernel_rate(stream: Any, numbers: Any, source: Format, fmt: Format) -> tuple[float, float]:
    """GB/s that the kernel reads and writes, and its share of the speed of a device copy."""
    import cupy

    weights = [cupy.asarray(numbers) for _ in range(2)]
    moved = numbers.nbytes + numbers.size // fmt.weights * fmt.block_bytes
    target = cupy.empty(moved // 2, np.uint8)
    cupy.cuda.Device().synchronize()
    turns = rotation(weights, moved)
    with stream:
        ours = capture(stream, [partial(encode, values, KINDS[source.name], fmt) for values in turns])
        copies = [partial(target.data.copy_from_device_async, values.data, moved // 2, stream) for values in turns]
        times, copy = compare(stream, [ours, capture(stream, copies)])
    return moved / times.us / 1e3, copy.us / times.us


def table(rows: list[Row], goals: bool = False) -> str:
    """The rows for a terminal; goals: with the project's own goals."""
    head = ("from", "to", "GB/s", "kernel GB/s", "share", *["goal"] * goals)
    cells = [
        (
            row.source, row.format, f"{row.gbs:.1f}", f"{row.kernel_gbs:.0f}", f"{row.share:.2f}",
            *[f"{row.goal:.0f}"] * goals,
        )
        for row in rows
    ]  # fmt: skip
    return columns("<<>>>>", [head, *cells])
