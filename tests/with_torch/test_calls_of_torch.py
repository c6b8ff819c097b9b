"""Calls with tensors of torch without a GPU, slow paths and fast ones: host tensors claim to lie on one."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from launches_like import installed
from torch_layers import torch

import qgemm
from qgemm.cuda import libraries

K = 64


@pytest.fixture
def gpus(monkeypatch):
    """Kernels that compute on the host, and torch's own functions but for devices and streams."""
    kernels = installed(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    library = dataclasses.replace(
        libraries._torch(torch), device=lambda x: 0, stream={0: 7}.get, current_device=None,
        device_context=nullcontext, new=lambda shape, dtype, device: partial(torch.empty, shape, dtype=dtype),
    )  # fmt: skip
    libraries.LIBRARIES[torch.Tensor] = libraries.LIBRARIES[torch.nn.Parameter] = library
    return kernels


def values(rng, *shape, dtype=torch.float16):
    """Small integers, exact in every type."""
    return torch.from_numpy(rng.integers(-4, 5, shape)).to(dtype)


def near(y, want, relative=2.0**-22):
    np.testing.assert_allclose(y.detach().double().numpy(), want, rtol=relative)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_products_of_every_kind(gpus, activation, m):
    """New outputs and given ones, epilogues, x in other types and layouts, overlaps, several weights, prepared x."""
    rng = np.random.default_rng(m)
    w = rng.integers(-4, 5, (K, K))
    on_device, slow_paths = gpus.tensor(w), []
    multiply = partial(qgemm.matmul, w=on_device, activation=activation)
    for _ in range(3):
        x, bias, residual = values(rng, m, K), values(rng, K, dtype=torch.float32), values(rng, m, K)
        want = x.double().numpy() @ w.T
        y = multiply(x, dtype="bfloat16")
        assert (type(y), y.dtype) == (torch.Tensor, torch.bfloat16)
        near(y, want, 2.0**-8)
        out = torch.empty(m, K)
        assert multiply(x, out=out) is out
        near(out, want)
        near(multiply(x, bias=bias, residual=residual), want + bias.numpy() + residual.numpy())
        near(multiply(torch.nn.Parameter(x)), want)
        near(multiply(x.repeat_interleave(2, 1)[:, ::2]), want)
        near(multiply(x.double()), want)
        near(multiply(x, out=torch.zeros(m, 2 * K)[:, ::2]), want)
        for y in qgemm.matmul_many(x, [on_device, on_device], activation):
            near(y, want)
        near(qgemm.matmul(qgemm.quantize_activations(x), on_device), want)
        total = want + residual.double().numpy()
        near(multiply(x, residual=residual, out=residual), total, 2.0**-10)
        near(multiply(x, out=x), want, 2.0**-10)
        slow_paths.append(gpus.slow_paths)
    assert slow_paths[2] - slow_paths[1] == 2  # float64 x and a strided y are never replayed


def test_errors_name_the_argument(gpus):
    x, on_device = torch.ones(2, K).half(), gpus.tensor(np.ones((K, K)))
    for _ in range(2):
        with pytest.raises(TypeError, match="int32"):
            qgemm.matmul(x.int(), on_device)
        with pytest.raises(qgemm.UnsupportedError, match="out requires grad"):
            qgemm.matmul(x, on_device, out=torch.zeros(2, K).requires_grad_())
        with pytest.raises(qgemm.ShapeError, match="K = 64"):
            qgemm.matmul(x[:, :32], on_device)
        qgemm.matmul(x, on_device, out=torch.zeros(2, K))
