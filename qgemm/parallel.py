"""Row slices of an array, and tasks, worked on by every core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from operator import index
from queue import Empty, SimpleQueue

from qgemm.system.process import after_fork, cpus, setting

MIN_SLICES = 4  # for one thread: fewer are done sooner than a thread starts
MAX_THREADS = 4096  # threads that may be set; the pool of compiled code starts fewer
MAX_WORKERS = 16  # each holds a tile or two: this bounds extra memory on machines with many cores
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"  # the CPUs of a CPU's core


_chosen: int | None = None
_read_setting = setting("QGEMM_THREADS")


def threads(number: int | None = None) -> int:
    """Set the number of threads that share a product on the CPU; without an argument, return it.

    The default, without a call and without $QGEMM_THREADS, is one thread for each physical core that this process may
    use at the first product. ValueError for another number or $QGEMM_THREADS than 1 to 4096, TypeError for other
    types than whole numbers.
    """
    global _chosen
    if number is not None:
        number = index(number)
        if not 1 <= number <= MAX_THREADS:
            raise ValueError(f"a product needs a thread at least, and may have {MAX_THREADS}, got {number}")
        _chosen = number
    return _configured() or cores()


def workers() -> int:
    """The number of threads that share a job of slices."""
    return _configured() or min(cores(), MAX_WORKERS)


def _configured() -> int:
    """The number set by `threads` or by $QGEMM_THREADS, 0 for none; ValueError for a setting that is no number."""
    if _chosen is not None:
        return _chosen
    text = _read_setting()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_THREADS):
        raise ValueError(f"QGEMM_THREADS is {text!r}, and must be a whole number from 1 to {MAX_THREADS}")
    return int(text)


@cache
def cores() -> int:
    """The number of physical cores in the affinity mask: a second thread of a core adds nothing to a product."""
    return max(1, len({_siblings(cpu) for cpu in cpus()}))


def _siblings(cpu: int) -> str:
    """The CPUs of a CPU's core, as Linux writes them; the CPU alone where Linux does not tell."""
    try:
        with open(SIBLINGS.format(cpu)) as file:
            return file.read().strip() or str(cpu)
    except OSError:
        return str(cpu)


after_fork(cores.cache_clear)  # a child may be given other CPUs


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
        for future in [pool.submit(work, part) for part in slices]:
            future.result()


def run_all(tasks: Sequence[Callable[[], bool]], progress: bool | None) -> int:
    """The number of tasks that compiled, all run on a thread per core; after an error or Ctrl-C no other begins.

    The threads live for one call only, and end before it returns.
    """
    from tqdm import tqdm  # a tenth of the time that a command needs to start

    cores = len(cpus())
    hidden = None if progress is None else not progress
    # Ctrl-C inside submit or as_completed of concurrent.futures may leave a lock held, at which its threads then wait
    # without end. A SimpleQueue has no such lock, and no task begins before all threads have started.
    waiting: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
    results: SimpleQueue[bool | BaseException] = SimpleQueue()

    def work() -> None:
        while (task := waiting.get()) is not None:
            try:
                results.put(task())
            except BaseException as error:
                results.put(error)

    compiled = 0
    with ThreadPoolExecutor(cores) as pool:
        try:
            for _ in range(cores):
                pool.submit(work)
            with tqdm(None, "kernels", len(tasks), disable=hidden, leave=False, delay=1) as bar:
                for task in tasks:
                    waiting.put(task)
                for _ in tasks:
                    result = results.get()
                    if isinstance(result, BaseException):
                        raise result
                    compiled += result
                    bar.update()
        finally:
            while not waiting.empty():
                with suppress(Empty):
                    waiting.get_nowait()
            for _ in range(cores):
                waiting.put(None)
    return compiled
