"""The CPU benchmark: the NumPy backend beside the gguf package, which knows the same formats.

Every row alternates the two competitors and reports the median of their times, so that a busy machine slows both.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from tqdm import tqdm

from qgemm.ops import matmul, quantize
from qgemm.parallel import workers
from qgemm.text import columns

SHAPE = (4096, 4096)  # (N, K)
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16")
M = (1, 8, 64, 512)
REPEATS = 7


class Row(NamedTuple):
    """One comparison: milliseconds of qgemm and of the gguf package, and the ratio that is aimed at."""

    job: str
    format: str
    qgemm_ms: float
    gguf_ms: float
    wanted: float  # least gguf / qgemm, 0 where nothing is asked

    @property
    def ratio(self) -> float:
        """How many times faster than the gguf package."""
        return self.gguf_ms / self.qgemm_ms

    @property
    def missed(self) -> bool:
        """Whether it is slower than it should be."""
        return self.ratio < self.wanted


def run() -> list[Row]:
    """All rows, with a bar on stderr."""
    return list(tqdm(rows(), total=len(FORMATS) * (2 + 2 * len(M)) - 2 * len(M), disable=None))


def rows() -> Iterator[Row]:
    """Encode, decode and products of one random matrix in every format."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SHAPE, dtype=np.float32)
    for name in FORMATS:
        kind = GGMLQuantizationType[name.upper()]
        tensor = quantize(weights, name)
        packed = tensor.blocks.view(np.uint8)
        pairs = pairs_of(name, weights, tensor, packed, kind, rng)
        for job, ours, theirs, wanted in pairs:
            qgemm_ms, gguf_ms = alternate(ours, theirs)
            yield Row(job, name, qgemm_ms, gguf_ms, wanted)


def pairs_of(
    name: str, weights: Any, tensor: Any, packed: Any, kind: Any, rng: np.random.Generator
) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any], float]]:
    """(job, ours, theirs, wanted) of one format."""
    plain = name in ("f16", "bf16")
    least = 0.0 if plain else 1.0
    yield "encode", lambda: quantize(weights, name), lambda: gguf.quantize(weights, kind), least
    yield "decode", tensor.dequantize, lambda: gguf.dequantize(packed, kind), 0.0
    for m in M:
        x = rng.standard_normal((m, SHAPE[1]), dtype=np.float32)
        goal = {1: {"q4_0": 3.0, "q8_0": 2.0}.get(name, 0.0), 512: least}.get(m, 0.0)
        dense = lambda x=x: x @ gguf.dequantize(packed, kind).T  # noqa: E731
        yield f"a16 M={m}", lambda x=x: matmul(x, tensor), dense, goal  # type: ignore[misc]
        if not plain:
            yield f"a8 M={m}", lambda x=x: matmul(x, tensor, "a8"), dense, 0.0  # type: ignore[misc]


def alternate(*calls: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """The median time of each call in milliseconds, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                mine.append(1e3 * (time.perf_counter() - start))
    return [median(mine) for mine in times]


def table(rows: list[Row], what: str) -> str:
    """The rows for a terminal, under a line that says what was measured and where."""
    head = ("job", "format", "qgemm ms", "gguf ms", "ratio", "wanted")
    cells = [
        (row.job, row.format, f"{row.qgemm_ms:.1f}", f"{row.gguf_ms:.1f}", f"{row.ratio:.2f}",
         f"{row.wanted:.1f}" if row.wanted else "")
        for row in rows
    ]  # fmt: skip
    machine = f"{what}, {workers()} threads, NumPy {np.__version__}, {platform.machine()}"
    return f"{machine}\n{columns('<<>>>>', [head, *cells])}"
