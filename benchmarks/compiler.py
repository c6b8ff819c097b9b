"""Kernels compiled into the cache by other processes, while this one measures."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from types import TracebackType

from qgemm.cuda.jit import cache
from qgemm.cuda.jit.codegen import Template, compose, headers
from qgemm.cuda.kernels.needed import Key
from qgemm.cuda.kernels.routes import source_of
from qgemm.formats import format_named
from qgemm.system.process import cpus

SPARE_CPUS = 2  # for the process that measures


class Compiler:
    """Processes that compile for an architecture, e.g. "sm_90a", in the order in which kernels were submitted.

    An error is not reported here: the product that needs the kernel compiles it once more, and fails itself.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        workers = max(1, len(cpus()) - SPARE_CPUS)
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a fork would break CUDA
        self.kernels: dict[Key, Future[None]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, kernels: Iterable[Key]) -> None:
        """Compile these kernels after those submitted before."""
        for key in kernels:
            if key not in self.kernels:
                kernel, fmt, template = key
                name = "" if fmt is None else fmt.name
                self.kernels[key] = self._pool.submit(compile_one, kernel, name, dict(template), self._arch)

    def wait(self, kernels: Iterable[Key]) -> None:
        """Return once these kernels are compiled, or have failed; kernels that were not submitted are not awaited."""
        for key in kernels:
            if key in self.kernels:
                with suppress(Exception):
                    self.kernels[key].result()


def compile_one(kernel: str, fmt_name: str, template: Template, arch: str) -> None:
    """Compile one kernel into the cache unless it is there. fmt_name: "" for a kernel without a format."""
    fmt = format_named(fmt_name) if fmt_name else None
    cache.cached(compose(source_of(kernel), fmt, **template), arch, headers(fmt))
