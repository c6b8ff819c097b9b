"""Times on the GPU: a loop of many calls is captured in a CUDA graph, and loops take turns at being replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from .results import Times, times

REPEATS = 9  # replays that count; the median of fewer than 7 says little
LOOP_US = 2000  # what a loop takes at least on a fast GPU: starting its graph, some 10 us, is spread over its calls
MAX_CALLS = 256  # what is not captured must fit into the driver's queue, of about 1000 launches
BYTES_A_US, OPERATIONS_A_US = 4e6, 8e8  # of a fast GPU
HOLD_NS = 100_000
WARM_UPS = 2
REST = 5  # times as long as a replay took: a GPU always at work meets its power limit, an H200 after some 40 ms
SUSTAINED_S = 0.5

Call = Callable[[], Any]

# A replay is enqueued behind this, so that the time of the host to enqueue it is not in its own.
HOLD = r"""
extern "C" __global__ void hold(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


class Loop(NamedTuple):
    """So many calls, which `replay` enqueues on a stream: one graph, or else one by one in `host_s` seconds.

    keep: holds the arrays that the graph reads and writes.
    """

    calls: int
    replay: Call
    keep: Any
    graph: bool = True
    host_s: float = 0.0


def rotation(weights: Sequence[Any], nbytes: float, operations: float = 0) -> list[Any]:
    """All weights in turn, equally often: a loop of calls that each read so many bytes and do so many operations."""
    us = max(nbytes / BYTES_A_US, operations / OPERATIONS_A_US)
    calls = min(MAX_CALLS, ceil(LOOP_US / us))
    return list(weights) * ceil(calls / len(weights))


def capture(stream: Any, calls: Sequence[Call]) -> Loop:
    """The calls as a graph. Where a library refuses to be captured, as CuPy's cuBLAS does, the calls themselves."""
    with stream:
        calls[0]()  # compiles, allocates
        stream.synchronize()
        start = perf_counter()
        for call in calls:
            call()
        host_s = perf_counter() - start
        stream.synchronize()
        stream.begin_capture()
        try:
            for call in calls:
                call()
            graph = stream.end_capture()
        except Exception:  # each library has its own for this
            with suppress(Exception):
                stream.end_capture()
            return Loop(len(calls), lambda: [call() for call in calls], calls, False, host_s)
    return Loop(len(calls), lambda: graph.launch(stream), calls)


def compare(stream: Any, loops: Sequence[Loop], repeats: int = REPEATS, before: Call | None = None) -> list[Times]:
    """Microseconds a call of each loop. They take turns, so that what slows one replay slows all, and rest between.

    before: enqueued ahead of each replay and not timed, as what lets several GPUs begin together.
    """
    samples: list[list[float]] = [[] for _ in loops]
    for repeat in range(WARM_UPS + repeats):
        for loop, mine in zip(loops, samples, strict=True):
            taken = replay_us(stream, loop, before)
            sleep(REST * 1e-6 * taken * loop.calls)
            if repeat >= WARM_UPS:
                mine.append(taken)
    return [times(mine) for mine in samples]


def sustained(stream: Any, loop: Loop) -> float:
    """Microseconds a call after SUSTAINED_S seconds without a rest: at the clock that the power limit leaves."""
    samples, end = [], perf_counter() + SUSTAINED_S
    while perf_counter() < end:
        samples.append(replay_us(stream, loop))
    sleep(SUSTAINED_S)
    return times(samples[-max(1, len(samples) // 4) :]).us


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
