"""After `qgemm.prepare` no product compiles."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cupy, random_tensor

import qgemm
from qgemm.cuda.jit import load


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_compile_nothing_afterwards(activation, dtype, monkeypatch):
    cp, rng = cupy(), np.random.default_rng(1)
    weights = [random_tensor(qgemm.FORMATS[name], 320, 512, rng) for name in ("q4_0", "q6_k")]
    rows = (1, 2, 8, 9, 16, 17, 64, 300)
    done = qgemm.prepare(weights, rows, activation=activation, dtype=dtype, progress=False)
    assert done.kernels > 4

    def refuse(*unit):
        pytest.fail(f"{unit[0][:200]} is loaded")

    on_device = [w.to_device() for w in weights]
    monkeypatch.setattr(load, "fetched", refuse)
    for m in rows:
        x = cp.asarray(rng.standard_normal((m, 512), np.float32)).astype(dtype)
        for w in on_device:
            qgemm.matmul(x, w, activation)
        qgemm.matmul_many(x, on_device, activation)
        qgemm.matmul_many(x, on_device[:1] * 2, activation)
