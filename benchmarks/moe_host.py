"""Host time of the call of a layer of experts, beside that of one product.

Experts are small, so that calls never wait for the GPU. Their launches are as many as for large experts: two if each
slot looks up its expert, four if tokens are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from qgemm.cli.timing import Call
from qgemm.experts import moe
from qgemm.ops import matmul, quantize
from qgemm.preparation import prepare
from qgemm.tensor import Tensor

from .host import running_on, some_cpus, typical
from .results import Row

EXPERTS, TOP_K, K, F = 16, 4, 256, 256
TOKENS = {"layer, 1 token": 1, "layer, 512 tokens": 512}
CPUS, CALLS, WARM_UP_S = 4, 200, 0.01


def rows() -> list[Row]:
    """us of a layer's call and of a product's on the fastest of several CPUs: a row for each number of tokens."""
    import cupy

    rng = np.random.default_rng(0)

    def experts(n: int, k: int) -> Tensor:
        return quantize(rng.standard_normal((EXPERTS, n, k), np.float32), "q4_0")

    gate, up, down = (experts(*shape).to_device() for shape in ((F, K), (F, K), (K, F)))
    expert, x = gate[0], cupy.asarray(rng.standard_normal((1, K)).astype(np.float16))
    y = cupy.empty((1, F), np.float16)
    prepare((gate, up, down), (1, *TOKENS.values()), dtype="float16", progress=False)
    calls: dict[str, Call] = {"product": partial(matmul, x, expert, out=y)}
    for name, t in TOKENS.items():
        rows = cupy.asarray(rng.standard_normal((t, K)).astype(np.float16))
        ids = cupy.asarray(np.argsort(rng.random((t, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32))
        weights, out = cupy.full((t, TOP_K), np.float32(0.25)), cupy.empty((t, K), np.float16)

        calls[name] = partial(moe, rows, (gate, up), down, ids, weights, out=out)
    best = dict.fromkeys(calls, np.inf)
    for cpu in some_cpus()[:CPUS]:
        with running_on(cpu):
            for name, call in calls.items():
                us = typical(call, cupy.cuda.Device().synchronize, CALLS, WARM_UP_S)
                best[name] = min(best[name], us)
    product = best.pop("product")
    return [{"call": name, "us": us, "product_us": product} for name, us in best.items()]


def line(rows: Sequence[Row]) -> str:
    """The rows as a line for a terminal."""
    layers = (f"{row['call']} {row['us']:.1f} ({row['us'] / row['product_us']:.2f})" for row in rows)
    return f"us of the host for a call (times a product's): {', '.join(layers)}"
