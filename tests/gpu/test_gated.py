"""qgemm.gated on the GPU: by one launch, by two, and by CuPy where kernels do not add."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cupy, poisoned, random_tensor
from measured_errors import Expected, check_rms
from strategies import each_product

import qgemm
from qgemm.gating import GATES, gated_by

UNITS = {"float32": 2.0**-22, "float16": 2.0**-11}


@each_product
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 64, 300])
def test_of_the_products_by_each(fmt, activation, m):
    """The gate is applied to products of matmul, whose tests bound their error; here only the order of sums differs."""
    rng = np.random.default_rng(m)
    n = 200
    gate, up = (random_tensor(fmt, n, 512, rng).to_device() for _ in range(2))
    scale = np.float16(2.0**-8)  # float16 holds the gated products of the largest formats
    x = cupy().asarray(rng.standard_normal((m, 512)).astype(np.float16) * scale)
    biases = [cupy().asarray(rng.standard_normal(n).astype(kind)) for kind in (np.float32, np.float16)]
    for pair in ([None, None], biases):
        g, u = (y.get() for y in qgemm.matmul_many(x, [gate, up], activation, biases=pair))
        largest = np.abs(g).max(), np.abs(u).max()
        for name, dtype in zip(GATES, ("float32", "float16", "float32", "float16"), strict=True):
            y = poisoned((m, n), dtype)
            for _ in range(2):  # the slow path, then the fast path
                qgemm.gated(x, gate, up, name, activation, biases=pair, out=y)
                want = gated_by(name, g.astype(np.float64), u.astype(np.float64))
                # gated() may split K in another way than matmul
                sums = 2.0**-12 * (largest[0] * np.abs(u) + largest[1] * np.abs(g))
                bound = sums + 1.1 * UNITS[dtype] * np.abs(want) + 2.0**-24
                Expected(want, bound, 2.0**-11 * np.abs(want) + 2.0**-25).check(y.get())


def test_torch_and_graphs():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(5)
    gate, up = (random_tensor(qgemm.FORMATS["q4_k"], 512, 1024, rng).to_device() for _ in range(2))
    for m in (1, 40):
        x = torch.randn(m, 1024, device="cuda", dtype=torch.float16) / 256  # float16 holds the gated products
        g, u = (qgemm.matmul(x, w) for w in (gate, up))
        want = torch.nn.functional.silu(g) * u
        y = qgemm.gated(x, gate, up, dtype=torch.float16)
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3 * want.abs().max().item())
        check_rms(y.cpu().numpy(), want.cpu().numpy(), "float16")
        out = torch.empty_like(y)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            qgemm.gated(x, gate, up, out=out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                qgemm.gated(x, gate, up, out=out)
            out.zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, y)
