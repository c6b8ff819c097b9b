"""GpuClock: the least time of a product by a kernel and config, on weights that come from memory and not from a cache.

A product is the whole call: x brought into the form that the kernel reads, then the kernel. It is compared with the
product by decoded weights before it is timed, so that a kernel that fails on a GPU is never chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from qgemm.codec.format import float_dtype
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from .call.plan import Served
from .call.products import multiply_by
from .copies import repeated_rows
from .libraries import default_library
from .problem import C_TYPES, Problem
from .tensor import DeviceTensor
from .times import Key, Row, Times
from .timing import MAX_CALLS, ROTATE, capture, copies_of, replays, rotation
from .tuner import Candidate

SHARE = 0.3  # part of the GPU's free memory for copies of weights
DRAWN = 64  # rows of x that are drawn; a larger x repeats them
SAMPLE = 128  # rows of W whose products are compared
TOLERANCE = {"a16": 1e-2}  # relative RMS error; a broken kernel has errors near 1
EIGHT_BITS = 6e-2  # relative RMS error of activations of eight bits
NAMES = {c: name for name, c in C_TYPES.items()}


class GpuClock:
    """`tuner.Clock` on the current device."""

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._copies: list[DeviceTensor] = []
        self._kept: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def matrix(self, w: Packed) -> None:
        """Upload weights, and enough copies of them with their rows in another order."""
        import cupy

        self._copies.clear()
        self._kept.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        if isinstance(w, DeviceTensor) and w.library is not default_library():
            w = w.to_host()
        base = w.to_device() if isinstance(w, Tensor) else w
        assert isinstance(base, DeviceTensor)
        budget = min(ROTATE, int(SHARE * cupy.cuda.runtime.memGetInfo()[0]))
        shifts = range(1, min(copies_of(base.nbytes, budget), MAX_CALLS))
        self._copies += [base, *(repeated_rows(base, base.shape, shift) for shift in shifts)]
        rng = np.random.default_rng(0)
        self._picked = cupy.asarray(np.sort(rng.choice(w.shape[0], min(w.shape[0], SAMPLE), replace=False)))
        self._sample = base.rows(self._picked)
        cupy.cuda.Device().synchronize()

    def us(self, p: Problem, candidates: Sequence[Candidate], repeats: int) -> list[float | None]:
        """The least us of each candidate, replayed in turns; None for one that raises or whose product is wrong."""
        x, y, exact = self._arrays(p)
        loops: dict[int, Any] = {}
        for number, candidate in enumerate(candidates):
            try:
                self._check(p, candidate, x, y, exact)
                calls = [partial(self._multiply, p, candidate, x, w, y) for w in self._turns(p)]
                loops[number] = capture(self._stream, calls)
            except (ValueError, RuntimeError, ArithmeticError, MemoryError):  # CUDA raises RuntimeError
                continue
        samples = dict(zip(loops, replays(self._stream, list(loops.values()), repeats), strict=True))
        return [min(samples[number]) if number in samples else None for number in range(len(candidates))]

    def _arrays(self, p: Problem) -> tuple[Any, Any, Any]:
        """x, y, and the exact product by some rows of W, kept for one format, shape, type and number of rows."""
        import cupy

        if (p.m, p.x) not in self._kept:
            rows = np.random.default_rng(0).standard_normal((min(p.m, DRAWN), p.k), np.float32)
            x = cupy.asarray(np.resize(rows, (p.m, p.k))).astype(float_dtype(NAMES[p.x]))
            exact = x.astype(np.float32) @ self._sample.T
            self._kept[p.m, p.x] = x, cupy.empty((p.m, p.n), float_dtype(p.outputs[0].y)), exact
            cupy.cuda.Device().synchronize()
        return self._kept[p.m, p.x]

    def _turns(self, p: Problem) -> list[DeviceTensor]:
        """The weights of the calls of a loop: no more copies than a loop of the least duration needs calls."""
        nbytes, operations = self._copies[0].nbytes, 2.0 * p.m * p.n * p.k
        calls = len(rotation([None], nbytes, operations))
        return rotation(self._copies[: max(2, calls)], nbytes, operations)

    def _check(self, p: Problem, candidate: Candidate, x: Any, y: Any, exact: Any) -> None:
        """ArithmeticError for a product that is far from that by decoded weights."""
        import cupy

        y.fill(np.nan)
        cupy.cuda.Device().synchronize()
        with self._stream:
            self._multiply(p, candidate, x, self._copies[0], y)
        self._stream.synchronize()
        off = y.astype(np.float32)[:, self._picked] - exact
        limit = TOLERANCE.get(p.activation, EIGHT_BITS)
        if not float((off**2).sum()) <= limit**2 * float((exact**2).sum()) + np.finfo(np.float32).tiny:
            raise ArithmeticError(f"{p}: {candidate.kernel.name} computes a wrong product")

    def _multiply(self, p: Problem, candidate: Candidate, x: Any, w: DeviceTensor, y: Any) -> None:
        multiply_by(x, w, y, chosen(p._replace(exponent=w.exponent), candidate))


def chosen(p: Problem, candidate: Candidate) -> Served:
    """A problem whose times know this candidate alone, so that all that depends on the config follows from it."""
    kernel, config = candidate.name
    row = Row(Key(p.format.name, p.activation, p.x, p.n, p.k), p.m, {kernel: {config: 1.0}})
    return Served(p._replace(outputs=(), times=Times([row])), candidate.kernel)
