"""Row slices of an array, worked on by every core."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_SLICES = 4  # of one thread: fewer are done sooner than a thread starts
MAX_WORKERS = 16  # each holds a tile or two: this bounds extra memory on machines with many cores


_chosen: int | None = None


def threads(number: int | None = None) -> int:
    """How many threads share a product on the CPU from now on, or, without a number, share it now.

    Without a choice, of this function or of $QGEMM_THREADS, one for each core that this process may use, at most 16.
    ValueError for a number below 1.
    """
    global _chosen
    if number is not None:
        if number < 1:
            raise ValueError(f"a product needs a thread at least, got {number}")
        _chosen = number
    return workers()


def workers() -> int:
    """How many threads share a job."""
    if _chosen is not None:
        return _chosen
    said = os.environ.get("QGEMM_THREADS", "")
    if said.isascii() and said.isdigit() and int(said):
        return int(said)
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
