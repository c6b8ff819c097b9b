"""What a call costs the host: the time of `qgemm.matmul` on prepared tensors, with the GPU never in the way.

One and the same call takes 6.6 us on one CPU of a virtual machine and 10.4 on the next, for as long as one looks,
perhaps where a neighbour has the other half of the core. So each CPU that the process may use is timed alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from ..matmul import matmul
from ..tensor import quantize
from .results import Results

SHAPE, CALLS, QUEUE, WARM_UP_S = (1024, 1024), 1000, 50, 0.05


def times(activations: Sequence[str]) -> Results:
    """host_us and host_slowest_us: the median of the calls for each activation, on the fastest and the slowest CPU."""
    import cupy

    (n, k), rng = SHAPE, np.random.default_rng(0)
    w = quantize(rng.standard_normal((n, k), np.float32), "q4_0").to_device()
    x, y = cupy.asarray(rng.standard_normal((1, k)).astype(np.float16)), cupy.empty((1, n), np.float16)

    def medians(activation: str) -> list[float]:
        return [typical(lambda: matmul(x, w, activation, out=y), cupy.cuda.Device().synchronize) for _ in every_cpu()]

    found = {activation: medians(activation) for activation in activations}
    return {
        "host_us": {activation: min(us) for activation, us in found.items()},
        "host_slowest_us": {activation: max(us) for activation, us in found.items()},
    }


def every_cpu() -> Iterator[None]:
    """Run on each CPU in turn that the process may use, in the end again on all; once where a system cannot say so."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cpus = os.sched_getaffinity(0)
    try:
        for cpu in sorted(cpus):
            os.sched_setaffinity(0, {cpu})
            yield
    finally:
        os.sched_setaffinity(0, cpus)


def typical(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median of CALLS calls in us, each timed alone. After every QUEUE of them `wait` lets the GPU catch up."""

    def samples(count: int) -> Iterator[float]:
        for index in range(count):
            if index % QUEUE == 0:
                wait()
            start = perf_counter()
            call()
            yield 1e6 * (perf_counter() - start)

    end = perf_counter() + WARM_UP_S  # a CPU that was idle takes its time to raise its clock
    while perf_counter() < end:
        for _ in samples(QUEUE):
            pass
    return round(median(samples(CALLS)), 2)
