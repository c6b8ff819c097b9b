"""Products on the threads that torch has for its own operations."""

from __future__ import annotations

import ctypes
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import qgemm
from qgemm.cpu.native import library, pool

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
    pytest.mark.skipif(not pool.loaded_libraries(("libgomp", "libiomp5")), reason="torch has no OpenMP runtime"),
]
N, K = 9000, 256  # one row of x is worth the threads of a pool that sleeps


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)
    monkeypatch.setenv("QGEMM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(("rows", "of_torch", "new"), [(4, 2, 0), (40, 2, 0), (1, 2, 0), (4, 1, 1), (1, 1, 1)])
def test_products_run_on_the_threads_of_torch(rows, of_torch, new):
    """Where torch has as many threads: no thread is started then, and y has the bits of one thread."""
    w = qgemm.quantize(np.random.default_rng(0).standard_normal((N, K), np.float32), "q4_0")
    x = torch.randn(rows, K)
    pool.pool().qgemm_threads(1)
    pool._threads = 0
    torch.ones(1 << 20).exp()  # starts the threads of torch
    torch.set_num_threads(of_torch)
    pool._use_openmp(pool.pool())  # forgets waits for late threads, after which one row avoids them
    before = tasks()
    y = qgemm.matmul(x, w)
    assert len(tasks() - before) == new
    pool.pool().qgemm_use_openmp(None, None)
    try:
        assert torch.equal(y, qgemm.matmul(x, w))
    finally:
        pool._use_openmp(pool.pool())


def test_another_runtime_in_the_process_is_not_used(tmp_path):
    """Packages such as sentencepiece bring a libgomp of their own, which may come first in the list of libraries."""
    runtime, *_ = pool.loaded_libraries(("libgomp", "libiomp5"))
    other = shutil.copy(runtime, tmp_path / "libgomp-copy.so.1")
    address = ctypes.cast(ctypes.CDLL(other).GOMP_parallel, ctypes.c_void_p).value
    functions = []
    pool._use_openmp(SimpleNamespace(qgemm_use_openmp=lambda *pointers: functions.extend(p.value for p in pointers)))
    (torch_library,) = pool.loaded_libraries(pool.TORCH)
    linked = [ctypes.cast(getattr(ctypes.CDLL(torch_library), name), ctypes.c_void_p).value for name in pool.OPENMP]
    assert functions == linked
    assert address not in functions
