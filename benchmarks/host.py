"""Host time of `qgemm.matmul` on prepared tensors; the calls never wait for the GPU.

The same call lasts 6.6 us on one CPU of a virtual machine and 10.4 us on another, permanently, perhaps because another
machine uses the second thread of the core. Therefore each CPU is timed separately.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from qgemm.ops import matmul, quantize

from .results import Results

SHAPE, CALLS, QUEUE, WARM_UP_S = (1024, 1024), 1000, 50, 0.05
MAX_CPUS = 16  # timed CPUs, 0.1 s each


def times(activations: Sequence[str]) -> Results:
    """host_us and host_slowest_us: the median of the calls for each activation, on the fastest and the slowest CPU."""
    import cupy

    (n, k), rng = SHAPE, np.random.default_rng(0)
    w = quantize(rng.standard_normal((n, k), np.float32), "q4_0").to_device()
    x, y = cupy.asarray(rng.standard_normal((1, k)).astype(np.float16)), cupy.empty((1, n), np.float16)
    calls = {activation: partial(matmul, x, w, activation, out=y) for activation in activations}
    return on_each_cpu(calls, cupy.cuda.Device().synchronize)


def on_each_cpu(calls: Mapping[str, Callable[[], object]], wait: Callable[[], object]) -> Results:
    """host_us and host_slowest_us of calls by name; `wait` lets the GPU catch up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for cpu in some_cpus():
        with running_on(cpu):
            for name, call in calls.items():
                samples[name].append(typical(call, wait))
    return {
        "host_us": {name: min(us) for name, us in samples.items()},
        "host_slowest_us": {name: max(us) for name, us in samples.items()},
    }


def some_cpus() -> list[int]:
    """Up to MAX_CPUS of the CPUs that the process may use, evenly spread; [-1], any CPU, without affinity."""
    if not hasattr(os, "sched_getaffinity"):
        return [-1]
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[:: -(-len(cpus) // MAX_CPUS)]


@contextmanager
def running_on(cpu: int) -> Iterator[None]:
    """Pin this thread to one CPU, and restore its affinity afterwards."""
    if cpu < 0:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def typical(
    call: Callable[[], object], wait: Callable[[], object], calls: int = CALLS, warm_up_s: float = WARM_UP_S
) -> float:
    """The median us of `calls` calls, timed one by one. `wait` lets the GPU catch up after every QUEUE calls."""

    def samples(count: int) -> Iterator[float]:
        for index in range(count):
            if index % QUEUE == 0:
                wait()
            start = perf_counter()
            call()
            yield 1e6 * (perf_counter() - start)

    end = perf_counter() + warm_up_s  # an idle CPU raises its clock slowly
    while perf_counter() < end:
        for _ in samples(QUEUE):
            pass
    return round(median(samples(calls)), 2)
