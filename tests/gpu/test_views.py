"""Weights in another order of columns, and times a factor, on a GPU: arrays of CuPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
from gates import gated_product
from helpers import check_product, cupy, expected_on_gpu, normal, poisoned

import qgemm

N, K = 200, 512
COLUMNS = np.random.default_rng(5).permutation(K).astype(np.int32)


def views() -> list:
    """A view of each kind, on the host."""
    nvfp4 = qgemm.quantize(normal(N, K, seed=3), "nvfp4")
    return [
        qgemm.Reordered(qgemm.quantize(normal(N, K), "q4_0"), COLUMNS),
        qgemm.Scaled(nvfp4, np.float32(0.37)),
        qgemm.Scaled(nvfp4, np.float32(123.4), divides=True),
        qgemm.Scaled(nvfp4, np.linspace(0.1, 3, N, dtype=np.float32)),
    ]


@pytest.mark.parametrize("m", [1, 5, 100])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products(m, dtype):
    x, bias = normal(m, K, seed=m).astype(dtype), normal(N, seed=1)
    on_gpu, on_gpu_bias = cupy().asarray(x), cupy().asarray(bias)
    for w in views():
        device = w.to_device()
        assert device.to_device() is device
        for _ in range(2):  # the slow path, then the fast path
            check_product(qgemm.matmul(on_gpu, device).get(), x, w)
        out = poisoned((m, N), "float16")
        assert qgemm.matmul(on_gpu, device, bias=on_gpu_bias, out=out) is out
        check_product(out.get(), x, w, bias)
        ys = qgemm.matmul_many(on_gpu, [device, device], dtype=dtype)
        assert {y.dtype.name for y in ys} == {dtype}
        check_product(ys[1].get(), x, w)
        check_product((on_gpu @ device.T).get(), x, w)
        expected = expected_on_gpu(x, w)
        gated_product("silu", expected, expected).check(qgemm.gated(on_gpu, device, device).get())


def test_the_order_is_decoded_on_the_device():
    w = views()[0]
    assert (w.to_device().dequantize().get() == w.dequantize()).all()


def test_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch_layers import assert_gpu_product

    x = normal(5, K, seed=9).astype(np.float16)
    tensor, bias = torch.from_numpy(x).cuda(), torch.ones(N, device="cuda", dtype=torch.float16)
    for w in views():
        y = qgemm.matmul(tensor, w.to_device(), bias=bias, dtype=torch.bfloat16)
        assert (y.dtype, y.device.type) == (torch.bfloat16, "cuda")
        assert_gpu_product(y, tensor, w, bias)
        out = torch.full((5, N), float("nan"), device="cuda", dtype=torch.float16)
        assert qgemm.matmul(tensor, w.to_device(), "a8", bias=bias, out=out) is out
        assert_gpu_product(out, tensor, w, bias, activation="a8")
