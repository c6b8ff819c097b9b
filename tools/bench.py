"""Benchmarks. `tools/bench.py --cpu` compares the NumPy backend with the gguf package, side by side in one run.

Every row alternates the two competitors and reports the median of their times, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from tqdm import tqdm

import qgemm
from qgemm.parallel import workers

SHAPE = (4096, 4096)  # (N, K)
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16")
M = (1, 8, 64, 512)
REPEATS = 7


class Row(NamedTuple):
    """One comparison: milliseconds of qgemm and of the gguf package, and what the issue asks of their ratio."""

    job: str
    format: str
    qgemm_ms: float
    gguf_ms: float
    wanted: float  # least gguf / qgemm, 0 where nothing is asked

    @property
    def ratio(self) -> float:
        """How many times faster than the gguf package."""
        return self.gguf_ms / self.qgemm_ms


def alternate(*calls: Callable[[], Any]) -> list[float]:
    """The median time of each call in milliseconds, the calls taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS + 1):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if repeat:  # the first round warms up
                mine.append(1e3 * (time.perf_counter() - start))
    return [median(mine) for mine in times]


def cpu_rows() -> Iterator[Row]:
    """Encode, decode and products of one random matrix in every format."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SHAPE, dtype=np.float32)
    for name in FORMATS:
        kind = GGMLQuantizationType[name.upper()]
        tensor = qgemm.quantize(weights, name)
        packed = tensor.blocks.view(np.uint8)

        def row(job: str, ours: Callable[[], Any], theirs: Callable[[], Any], wanted: float, name: str = name) -> Row:
            return Row(job, name, *alternate(ours, theirs), wanted)

        least = 0.0 if name in ("f16", "bf16") else 1.0
        yield row("encode", lambda t=name: qgemm.quantize(weights, t), lambda k=kind: gguf.quantize(weights, k), least)
        yield row("decode", tensor.dequantize, lambda p=packed, k=kind: gguf.dequantize(p, k), 0)
        for m in M:
            x = rng.standard_normal((m, SHAPE[1]), dtype=np.float32)
            goal = {1: {"q4_0": 3.0, "q8_0": 2.0}.get(name, 0.0), 512: least}.get(m, 0.0)
            dense = lambda p=packed, k=kind, x=x: x @ gguf.dequantize(p, k).T  # noqa: E731
            yield row(f"a16 M={m}", lambda t=tensor, x=x: qgemm.matmul(x, t), dense, goal)
            if name not in ("f16", "bf16"):
                yield row(f"a8 M={m}", lambda t=tensor, x=x: qgemm.matmul(x, t, "a8"), dense, 0)


def main() -> int:
    """Print the table; write it as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", required=True, help="the NumPy backend against the gguf package")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = list(tqdm(cpu_rows(), total=len(FORMATS) * (2 + 2 * len(M)) - 2 * len(M), disable=None))
    print(f"{SHAPE[0]} x {SHAPE[1]}, {workers()} threads, NumPy {np.__version__}, {platform.machine()}")
    print(f"{'job':12}{'format':8}{'qgemm ms':>10}{'gguf ms':>10}{'ratio':>8}{'wanted':>8}")
    for row in rows:
        wanted = f"{row.wanted:.1f}" if row.wanted else ""
        print(f"{row.job:12}{row.format:8}{row.qgemm_ms:10.1f}{row.gguf_ms:10.1f}{row.ratio:8.2f}{wanted:>8}")
    if options.json:
        options.json.write_text(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.ratio < row.wanted]
    print(f"{len(missed)} of {sum(row.wanted > 0 for row in rows)} goals missed", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
