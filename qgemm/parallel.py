"""Row slices of an array, worked on by every core."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_SLICES = 4  # of one thread: fewer are done sooner than a thread starts
MAX_WORKERS = 16  # each holds a tile or two: this bounds extra memory on machines with many cores


def workers() -> int:
    """How many threads share a job: the cores this process may use, at most MAX_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def for_slices(count: int, step: int, work: Callable[[slice], object]) -> None:
    """Call `work` for each slice of `step` out of `count`; the first slice's error wins.

    The threads live for one call only: a pool kept between calls would hang in a forked child.
    """
    slices = [slice(start, min(start + step, count)) for start in range(0, count, step)]
    threads = min(workers(), len(slices) // MIN_SLICES)
    if threads < 2:
        for part in slices:
            work(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, part) for part in slices]:
            done.result()
