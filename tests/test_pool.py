"""The threads that share a product: who does which rows, when threads run, and how many there are."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import random_tensor
from numpy.testing import assert_array_equal

import qgemm
from qgemm import parallel
from qgemm.cpu.native import compiler, library
from qgemm.cpu.native import pool as pools
from qgemm.cpu.native.calls import POOL
from qgemm.system import process

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
PATIENCE = 60  # seconds that a busy machine may need
LARGE, SMALL = (9000, 256), (1000, 256)  # weights that all threads multiply after a pause as well, and only in a series


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


@pytest.fixture
def pool():
    """The pool's library; the pool ends with as many threads as it had."""
    yield pools.pool()
    pools.pool().qgemm_threads(1)
    pools._threads = 0


@pytest.fixture(scope="module", params=[(), ("-DUSE_CONDITION",)], ids=["futex", "condition"])
def other_pool(request):
    """A pool of its own whose threads wait by a futex, or as on macOS by a condition."""
    source = POOL._replace(words=(*POOL.words, *request.param))
    pool = process.load_library(compiler.compiled(compiler.compiler(), source.file, (*compiler.NATIVE, *source.words)))
    pool.qgemm_run.argtypes = pools.pool().qgemm_run.argtypes
    yield pool
    pool.qgemm_threads(1)


def test_sleeping_threads_wake(other_pool):
    """Each job needs all three threads at once, whether they sleep or not."""
    other_pool.qgemm_threads(3)
    for pause in (0, 0.005, 0, 0.02, 0.005):
        together = threading.Barrier(3, timeout=PATIENCE)
        time.sleep(pause)
        run(other_pool, 3, 1, lambda first, last, together=together: together.wait())
        assert not together.broken


def run(pool, count: int, chunk: int, work) -> None:
    """work(first, last) by the threads of the pool."""
    pool.qgemm_run(ctypes.cast(WORK(lambda _, first, last: work(first, last)), ctypes.c_void_p), None, count, chunk)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("count", "chunk"), [(0, 1), (1, 1), (7, 1), (64, 32), (65, 32), (1000, 32), (999, 7)])
def test_every_row_once(threads, count, chunk, pool):
    pool.qgemm_threads(threads)
    seen, wrong = np.zeros(count, int), []

    def work(first: int, last: int) -> None:
        wrong.extend([(first, last)] * (first % chunk != 0 or not first < last <= count))
        seen[first:last] += 1

    for _ in range(5):
        run(pool, count, chunk, work)
    assert (seen == 5).all()
    assert not wrong


def test_a_thread_has_a_contiguous_run(pool):
    """Where all begin at the same time each begins at a run of its own, and goes on there."""
    pool.qgemm_threads(4)
    begun, places = threading.Barrier(4, timeout=PATIENCE), {}

    def work(first: int, last: int) -> None:
        mine = places.setdefault(threading.get_native_id(), [])
        mine.append(first)
        if len(mine) == 1:
            begun.wait()

    run(pool, 400, 10, work)
    assert sorted(mine[0] for mine in places.values()) == [0, 100, 200, 300]
    assert places[threading.get_native_id()][0] == 0
    for mine in places.values():
        own = [first for first in mine if first // 100 == mine[0] // 100]
        assert mine[: len(own)] == own == sorted(own)  # others' rows come after its own


def test_what_a_slow_thread_does_not_get_to_is_done_by_others(pool):
    pool.qgemm_threads(2)
    rest, done = threading.Event(), []

    def work(first: int, last: int) -> None:
        if first == 50:  # the helper's first chunk
            rest.wait(PATIENCE)
        done.append(first)
        if len(done) == 9:
            rest.set()

    run(pool, 100, 10, work)
    assert sorted(done) == list(range(0, 100, 10))


def test_a_job_within_a_job(pool):
    """The thread that runs the outer job runs the inner one alone."""
    pool.qgemm_threads(3)
    seen, others = np.zeros((8, 100), int), []

    def work(first: int, last: int) -> None:
        me = threading.get_native_id()

        def inner(start: int, stop: int) -> None:
            others.extend([1] * (threading.get_native_id() != me))
            seen[first:last, start:stop] += 1

        run(pool, 100, 10, inner)

    run(pool, 8, 1, work)
    assert (seen == 1).all()
    assert not others


def test_products_of_the_threads_of_a_job_of_slices():
    """Products of several threads at once, as a converter asks for them."""
    rng = np.random.default_rng(0)
    w, x = random_tensor(qgemm.FORMATS["q4_0"], 300, 256, rng), rng.standard_normal((64, 256), np.float32)
    want, ys = [qgemm.matmul(row[None], w) for row in x], np.empty((64, 300), np.float32)

    def work(part: slice) -> None:
        for i in range(part.start, part.stop):
            ys[i] = qgemm.matmul(x[i : i + 1], w)

    parallel.for_slices(64, 2, work)
    assert_array_equal(ys, np.concatenate(want))


def test_the_number_changes_while_others_multiply(monkeypatch):
    rng = np.random.default_rng(1)
    w, x = random_tensor(qgemm.FORMATS["q4_0"], 300, 256, rng), rng.standard_normal((2, 256), np.float32)
    want, wrong, stop = qgemm.matmul(x, w), [], threading.Event()

    def multiply() -> None:
        while not stop.is_set():
            wrong.extend([1] * (not np.array_equal(qgemm.matmul(x, w), want)))

    others = [threading.Thread(target=multiply) for _ in range(3)]
    for thread in others:
        thread.start()
    try:
        for i in range(200):
            monkeypatch.setenv("QGEMM_THREADS", str(1 + i % 5))
            wrong.extend([1] * (not np.array_equal(qgemm.matmul(x, w), want)))
    finally:
        stop.set()
        for thread in others:
            thread.join()
    assert not wrong


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def nanoseconds(task: str) -> int:
    """How long a thread has been on a CPU."""
    return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])


def sleepers(before: set[str]) -> dict[str, int]:
    """The nanoseconds on a CPU of each thread that was started since, once all of them sleep."""
    helpers, states = tasks() - before, {}
    for _ in range(PATIENCE * 100):
        time.sleep(0.01)
        states = {task: Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0] for task in helpers}
        if set(states.values()) == {"S"}:
            break
    assert set(states.values()) == {"S"}, states
    return {task: nanoseconds(task) for task in helpers}


tells_when_threads_run = pytest.mark.skipif(
    not Path("/proc/self/schedstat").is_file(), reason="the system does not say when threads run"
)


@tells_when_threads_run
def test_idle_threads_do_not_run(pool):
    """Threads wait for a millisecond, then sleep: their time on a CPU stands still."""
    pool.qgemm_threads(1)
    before = tasks()
    pool.qgemm_threads(4)
    run(pool, 100, 10, lambda first, last: None)
    used = sleepers(before)
    assert len(used) == 3
    time.sleep(0.1)
    assert {task: nanoseconds(task) for task in used} == used


@tells_when_threads_run
def test_a_small_product_wakes_no_thread_after_a_pause(pool, monkeypatch):
    """The caller computes it alone; in a series of them the threads wake."""
    monkeypatch.setenv("QGEMM_THREADS", "2")
    monkeypatch.setattr(parallel, "_chosen", None)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 256), np.float32)
    small, large = (random_tensor(qgemm.FORMATS["q4_0"], *shape, rng) for shape in (SMALL, LARGE))
    qgemm.matmul(x, small)  # compiles
    pool.qgemm_threads(1)
    pools._threads, before = 0, tasks()
    qgemm.matmul(x, large)
    used = sleepers(before)
    assert len(used) == 1
    for _ in range(3):
        time.sleep(0.02)
        qgemm.matmul(x, small)
    assert sleepers(before) == used
    end = time.monotonic() + PATIENCE
    while {task: nanoseconds(task) for task in used} == used and time.monotonic() < end:
        qgemm.matmul(x, small)
    assert sleepers(before) != used


def test_one_row_avoids_an_openmp_whose_threads_are_late(pool, monkeypatch):
    """For a while after a region that waited for a thread without work; several rows stay there."""
    monkeypatch.setenv("QGEMM_THREADS", "2")
    monkeypatch.setattr(parallel, "_chosen", None)
    rng, regions = np.random.default_rng(4), []
    w = random_tensor(qgemm.FORMATS["q4_0"], *LARGE, rng)
    x = rng.standard_normal((4, LARGE[1]), np.float32)
    expected = qgemm.matmul(x, w)
    body_of = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def region(body, argument, threads, flags):
        regions.append(threads)
        body_of(body)(argument)  # works on all chunks
        time.sleep(0.002)
        body_of(body)(argument)

    two = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 2)
    pool.qgemm_use_openmp(ctypes.cast(region, ctypes.c_void_p), ctypes.cast(two, ctypes.c_void_p))
    try:
        avoided = False
        for _ in range(PATIENCE):  # a busy machine may need longer than the while between two products
            assert_array_equal(qgemm.matmul(x, w), expected)
            before = len(regions)
            assert_array_equal(qgemm.matmul(x[:1], w), qgemm.matmul(x[:1], w))
            avoided |= len(regions) == before
        assert avoided
        before = len(regions)
        qgemm.matmul(x, w)
        assert len(regions) > before
        before, end = len(regions), time.monotonic() + PATIENCE
        while len(regions) == before and time.monotonic() < end:
            time.sleep(0.02)
            qgemm.matmul(x[:1], w)
        assert len(regions) > before
    finally:
        pool.qgemm_use_openmp(None, None)
        monkeypatch.setattr(pools, "_knows_torch", False)


def test_as_many_threads_as_are_chosen(monkeypatch, pool):
    """By the environment or by qgemm.threads; the caller is one of them."""
    rng = np.random.default_rng(2)
    w, x = random_tensor(qgemm.FORMATS["q4_0"], *LARGE, rng), rng.standard_normal((1, LARGE[1]), np.float32)
    pool.qgemm_threads(1)
    before = tasks()
    monkeypatch.setattr(parallel, "_chosen", None)
    for number in (3, 5, 2):
        monkeypatch.setenv("QGEMM_THREADS", str(number))
        qgemm.matmul(x, w)
        assert len(tasks() - before) == number - 1
        assert qgemm.threads() == number
    qgemm.threads(4)
    qgemm.matmul(x, w)
    assert len(tasks() - before) == 3


@pytest.mark.parametrize(
    ("mask", "siblings", "cores"),
    [
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),  # two threads a core
        ({0, 1}, {0: "0,2", 1: "1,3"}, 2),  # one thread of each core is allowed
        ({0, 2}, {0: "0,2", 2: "0,2"}, 1),
        ({4, 5, 6}, {}, 3),  # a system that does not say
        (set(range(40)), {i: str(i) for i in range(40)}, 40),
    ],
)
def test_a_thread_a_physical_core(mask, siblings, cores, monkeypatch, tmp_path):
    for cpu, others in siblings.items():
        (tmp_path / str(cpu)).write_text(others + "\n")
    monkeypatch.setattr(parallel, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(parallel, "_chosen", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
    monkeypatch.delenv("QGEMM_THREADS", raising=False)
    parallel.cores.cache_clear()
    try:
        assert qgemm.threads() == cores
        assert parallel.workers() == min(cores, parallel.MAX_WORKERS)
    finally:
        parallel.cores.cache_clear()
