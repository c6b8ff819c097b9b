"""Host time of a call beside torch's own dense product of the same shapes, with arrays of CuPy and torch.

All calls alternate on each of several CPUs, for several rounds; the fastest round of each call counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qgemm.ops import matmul, matmul_many, quantize, quantize_activations

from .host import SHAPE, running_on, some_cpus, typical
from .results import Row

ROUNDS, CALLS, WARM_UP_S = 3, 200, 0.005  # for each call and CPU
MANY = 3  # weights in a matmul_many
M = 1, 16, 256  # rows of x: decode, and both kinds of prefill
WITH_OUT, NEW = "torch.mm(out=)", "torch.matmul"  # baselines


class Case(NamedTuple):
    """One call: the library of its arrays, its name, the name of its baseline, the call itself."""

    library: str
    call: str
    beside: str
    run: Callable[[], Any]


def rows() -> list[Row]:
    """A row for each call: library, call, us, beside, beside_us; no rows if torch is not installed."""
    try:
        import torch
    except ImportError:
        return []
    import cupy

    weights = [quantize(normal(*SHAPE), "q4_0").to_device() for _ in range(MANY)]
    torch_cases = list(cases("torch", weights, lambda x: torch.from_numpy(x).cuda()))
    every_case = [*baselines(torch), *torch_cases, *cases("cupy", weights, cupy.asarray)]
    best = dict.fromkeys(every_case, np.inf)
    for cpu in some_cpus() * ROUNDS:
        with running_on(cpu):
            for case in every_case:
                best[case] = min(best[case], typical(case.run, torch.cuda.synchronize, CALLS, WARM_UP_S))
    beside = {case.call: best[case] for case in every_case if not case.beside}
    named = {(case.library, case.call): best[case] for case in every_case}
    return [
        {
            "library": case.library, "call": case.call, "us": best[case], "beside": case.beside,
            "beside_us": beside.get(case.beside) or named[case.library, case.beside],
        }
        for case in every_case if case.beside
    ]  # fmt: skip


def baselines(torch: Any) -> Iterator[Case]:
    """torch's products of x [1, K] by dense float16 weights."""
    n, k = SHAPE
    x, w, y = (torch.from_numpy(normal(*shape).astype(np.float16)).cuda() for shape in ((1, k), (k, n), (1, n)))
    yield Case("torch", WITH_OUT, "", lambda: torch.mm(x, w, out=y))
    yield Case("torch", NEW, "", lambda: torch.matmul(x, w))


def cases(library: str, weights: list[Any], array: Callable[[Any], Any]) -> Iterator[Case]:
    """Calls with arrays of one library, on prepared arguments."""
    n, k = SHAPE

    def normal_array(*shape: int) -> Any:
        return array(normal(*shape).astype(np.float16))

    w, x, y, bias, residual = weights[0], normal_array(1, k), normal_array(1, n), normal_array(n), normal_array(1, n)
    outs, prepared = [normal_array(1, n) for _ in weights], quantize_activations(x)
    first = "M = 1, out"
    yield Case(library, first, WITH_OUT, lambda: matmul(x, w, out=y))
    yield Case(library, "M = 1, new y", NEW, lambda: matmul(x, w, dtype="float16"))
    yield Case(library, "a8, M = 1, out", WITH_OUT, lambda: matmul(x, w, "a8", out=y))
    yield Case(library, "prepared, M = 1, out", WITH_OUT, lambda: matmul(prepared, w, out=y))
    yield Case(
        library, "bias, residual, M = 1, out", WITH_OUT, lambda: matmul(x, w, bias=bias, residual=residual, out=y)
    )
    yield Case(library, f"{MANY} weights, M = 1, outs", first, lambda: matmul_many(x, weights, outs=outs))
    for m in M[1:]:
        yield Case(library, f"M = {m}, out", WITH_OUT, partial(matmul, normal_array(m, k), w, out=normal_array(m, n)))


def normal(*shape: int) -> Any:
    """Standard normal float32."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)
