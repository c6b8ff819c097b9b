"""Timing of launches: CUDA graphs of many calls on rotating weights, whose replays alternate.

`qgemm tune`, `qgemm bench` and benchmarks/ share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple

import numpy as np

REPEATS = 9  # timed replays; the median of fewer than 7 is not stable
LOOP_US = 2000  # least duration of a loop on a fast GPU: it spreads the 10 us that a graph needs to start
MAX_CALLS = 256  # the driver queues about 1000 launches, and a loop without a graph must fit
BYTES_A_US, OPERATIONS_A_US = 4e6, 8e8  # throughput of a fast GPU
ROTATE = 300_000_000  # least bytes of weights that a loop reads: several L2 caches
HOLD_NS = 100_000
WARM_UPS = 2
REST = 5  # pause after a replay, in replays: a GPU without pauses reaches its power limit, an H200 after about 40 ms

Call = Callable[[], Any]

# Runs before each replay, so that the time in which the host enqueues the replay is not measured.
HOLD = r"""
extern "C" __global__ void hold(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


class Times(NamedTuple):
    """Microseconds: the median of the replays and their 10th and 90th percentiles."""

    us: float
    p10: float
    p90: float


def quantiles(samples: Sequence[float]) -> Times:
    """Quantiles of samples in microseconds, interpolated between neighbours.

    >>> quantiles([3.0, 1.0, 2.0])
    Times(us=2.0, p10=1.2, p90=2.8)
    """
    low, middle, high = np.percentile(samples, [10, 50, 90])
    return Times(*(round(float(value), 3) for value in (middle, low, high)))


class Loop(NamedTuple):
    """A number of calls that `replay` enqueues on a stream: as one graph, or one by one in `host_s` seconds.

    keep: holds the arrays that the graph reads and writes.
    """

    calls: int
    replay: Call
    keep: Any
    graph: bool = True
    host_s: float = 0.0


def copies_of(nbytes: int, rotate: int) -> int:
    """The number of copies of a matrix of `nbytes` that together exceed `rotate` bytes; at least two."""
    return max(2, -(-rotate // nbytes))


def rotation(weights: Sequence[Any], nbytes: float, operations: float = 0) -> list[Any]:
    """All weights in turn, equally often, for a loop of calls that each read `nbytes` and do `operations`."""
    us = max(nbytes / BYTES_A_US, operations / OPERATIONS_A_US)
    calls = min(MAX_CALLS, ceil(LOOP_US / us))
    return list(weights) * ceil(calls / len(weights))


def capture(stream: Any, calls: Sequence[Call]) -> Loop:
    """The calls as a graph. If a library refuses to be captured, as CuPy's cuBLAS does, the calls themselves."""
    with stream:
        calls[0]()  # compiles, allocates
        stream.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        host_s = time.perf_counter() - start
        stream.synchronize()
        stream.begin_capture()
        try:
            for call in calls:
                call()
            graph = stream.end_capture()
        except Exception:  # each library raises its own
            with suppress(Exception):
                stream.end_capture()
            return Loop(len(calls), lambda: [call() for call in calls], calls, False, host_s)
    return Loop(len(calls), lambda: graph.launch(stream), calls)


def compare(
    stream: Any, loops: Sequence[Loop], repeats: int = REPEATS, before: Call | None = None, rest: int | None = None
) -> list[Times]:
    """Microseconds a call of each loop. Replays alternate, so that a slow phase affects all loops, with pauses between.

    before: enqueued ahead of each replay and not timed, e.g. to start several GPUs together. rest: a pause, in replays;
    REST without a number.
    """
    return [quantiles(loop_samples) for loop_samples in replays(stream, loops, repeats, before, rest)]


def replays(
    stream: Any, loops: Sequence[Loop], repeats: int, before: Call | None = None, rest: int | None = None
) -> list[list[float]]:
    """Microseconds of every replay of each loop; `before` is enqueued ahead of each replay and not timed."""
    rest = REST if rest is None else min(rest, REST)
    samples: list[list[float]] = [[] for _ in loops]
    for repeat in range(WARM_UPS + repeats):
        for loop, loop_samples in zip(loops, samples, strict=True):
            us = replay_us(stream, loop, before)
            time.sleep(rest * 1e-6 * us * loop.calls)
            if repeat >= WARM_UPS:
                loop_samples.append(us)
    return samples


def replay_us(stream: Any, loop: Loop, before: Call | None = None) -> float:
    """Microseconds a call in one replay, between two events."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with stream:
        hold = cupy.RawKernel(HOLD, "hold")
        hold((1,), (1,), (np.int64(HOLD_NS + 1.5e9 * loop.host_s),))
        if before is not None:
            before()
        start.record(stream)
        loop.replay()
        end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / loop.calls
