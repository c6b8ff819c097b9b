"""Row slices of an array, worked on by every core."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

MIN_SLICES = 4  # of one thread: fewer are done sooner than a thread starts
MAX_WORKERS = 16  # each holds a tile or two: this bounds extra memory on machines with many cores
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"  # of a CPU: those of its core


_chosen: int | None = None


def threads(number: int | None = None) -> int:
    """How many threads share a product on the CPU from now on, or, without a number, share it now.

    Without a choice, of this function or of $QGEMM_THREADS, one for each physical core that this process might use when
    it was first asked. ValueError for a number below 1.
    """
    global _chosen
    if number is not None:
        if number < 1:
            raise ValueError(f"a product needs a thread at least, got {number}")
        _chosen = number
    return _said() or cores()


def workers() -> int:
    """How many threads share a job of slices."""
    return _said() or min(cores(), MAX_WORKERS)


def _said() -> int:
    """The number that somebody chose, 0 for none."""
    if _chosen is not None:
        return _chosen
    said = os.environ.get("QGEMM_THREADS", "")
    return int(said) if said.isascii() and said.isdigit() else 0


@cache
def cores() -> int:
    """The physical cores of the affinity mask, asked for once: a second thread of a core adds nothing to a product."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return max(1, len({_siblings(cpu) for cpu in os.sched_getaffinity(0)}))


def _siblings(cpu: int) -> str:
    """The CPUs of a core, as Linux writes them; those that it does not know of are a core each."""
    try:
        with open(SIBLINGS.format(cpu)) as file:
            return file.read().strip() or str(cpu)
    except OSError:
        return str(cpu)


os.register_at_fork(after_in_child=cores.cache_clear)  # a child may be given other CPUs


def for_slices(total: int, step: int, work: Callable[[slice], object]) -> None:
    """Call `work` for each slice of `step` out of `total`; the first slice's error wins.

    The threads live for one call only: a pool kept between calls would hang in a forked child.
    """
    slices = [slice(start, min(start + step, total)) for start in range(0, total, step)]
    count = min(workers(), len(slices) // MIN_SLICES)
    if count < 2:
        for part in slices:
            work(part)
        return
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, part) for part in slices]:
            done.result()
