"""Bench: stands for a GPU and its clock in tests of `qgemm tune`, so that every test knows the fastest config."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import cupy_like
import numpy as np

import qgemm
from qgemm import cuda
from qgemm.cuda import tuner, tuning
from qgemm.cuda.driver import tuned
from qgemm.cuda.kernels import routes
from qgemm.cuda.problem import Gpu, Output, Problem
from qgemm.files import compiled
from qgemm.once import Once

MACHINE = tuned.Machine("NVIDIA GeForce RTX 4090", "580.95")
ADA = Gpu(0, 89, 128)


def shaped(fmt, n, k):
    """Zeros, which the system makes when they are read: the tuner reads none."""
    return qgemm.Tensor(fmt, (n, k), np.zeros((n, k // fmt.weights), fmt.dtype))


class Bench:
    """Stands for a GPU, its clock and `run_all`.

    us: (problem, candidate) -> its time, a pseudo-random number of the two names unless a test says otherwise.
    """

    def __init__(self):
        self.now, self.calls, self.matrices = 0.0, [], []
        self.us_of = lambda p, candidate: 10 + zlib.crc32(repr((p.m, *candidate.name)).encode()) % 1000 / 100
        self.before = lambda: None

    def matrix(self, w):
        self.matrices.append(w)

    def us(self, p, candidates, repeats):
        self.before()
        self.now += 1
        self.calls += [(p.m, *candidate.name) for candidate in candidates]
        return [self.us_of(p, candidate) for candidate in candidates]


def installed(monkeypatch, folder):
    """Put a Bench in the place of an RTX 4090, for a test -> the Bench."""
    bench = Bench()
    cupy_like.install(monkeypatch)
    monkeypatch.setenv("QGEMM_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(compiled, "_warned", set())
    monkeypatch.setattr(cuda, "require", lambda who: None)
    monkeypatch.setattr(tuning, "GpuClock", lambda: bench)
    monkeypatch.setattr(tuning, "gpu", lambda device: ADA)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: bench.now))
    monkeypatch.setattr(tuning, "run_all", lambda tasks, progress: len(tasks))
    monkeypatch.setattr(tuned, "machine", lambda device: MACHINE)
    monkeypatch.setattr(tuned, "_times", Once())
    return bench


def problem(fmt, m, n, k, activation="a16", x="half", **more):
    return Problem(fmt, activation, m, n, k, 89, x, (Output(n, "float16"),), sms=128, times=tuned.times_of(0), **more)


def fastest(bench, p):
    """The names of the fastest candidate of a problem, by the clock."""
    return min((c.name for c in tuner.candidates(p._replace(times=None))), key=lambda name: bench.us_of(p, named(name)))


def named(name):
    return SimpleNamespace(name=name)


def chosen(p):
    """The names of the kernel and config that a plan launches."""
    kernel = routes.route(p._replace(outputs=())).kernel
    return kernel.name, str(kernel.choose(p._replace(x=kernel.reads(p)[0])))
