"""Tensors of torch in repeated calls on the GPU: layouts, modes, streams, devices; the first call to the third."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest
from helpers import at_once
from torch_layers import assert_gpu_product, torch

import qgemm

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

K, N = 256, 320
EIGHTH = 0.125  # x holds multiples of this value, exact in every type


@pytest.fixture(scope="module")
def weights():
    w = qgemm.quantize(np.random.default_rng(41).standard_normal((N, K)).astype(np.float32), "q4_0")
    return w, w.to_device()


def normal(*shape, dtype=torch.float16, device="cuda"):
    return (torch.randn(*shape, device=device) / EIGHTH).round().mul(EIGHTH).to(dtype)


LAYOUTS = {
    "contiguous": lambda m: normal(m, K),
    "every second": lambda m: normal(m, 2 * K)[:, ::2],
    "transposed": lambda m: normal(K, m).t(),
    "rows apart": lambda m: normal(m, K + 8)[:, :K],
    "one row for all": lambda m: normal(1, K).expand(m, K),
    "not aligned": lambda m: normal(m * K + 1)[1:].view(m, K),
    "asks for a gradient": lambda m: normal(m, K).requires_grad_(),
    "a parameter": lambda m: torch.nn.Parameter(normal(m, K)),
    "three axes": lambda m: normal(m, 1, K),
    "a row": lambda m: normal(K),
}


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 3, 40])
def test_layouts_in_turn(weights, activation, m):
    """A call replays the last call of its shapes only where the layout is the same, too."""
    w, on_device = weights
    for _ in range(3):
        for make in LAYOUTS.values():
            x = make(m)
            y = qgemm.matmul(x, on_device, activation, dtype="float16")
            assert (y.shape, y.dtype, y.requires_grad) == ((*x.shape[:-1], N), torch.float16, False)
            assert_gpu_product(y, x, w, activation=activation)
            assert torch.equal(y, qgemm.matmul(x.detach().clone().contiguous(), on_device, activation, dtype="float16"))


@pytest.mark.parametrize("m", [1, 3, 40])
def test_outputs_of_any_layout(weights, m):
    """Views, columns of a wider array, x itself, the residual: nothing beside y is written."""
    w, on_device = weights
    square = qgemm.quantize(np.random.default_rng(42).standard_normal((K, K)).astype(np.float32) / 16, "q8_0")
    square_on_device = square.to_device()
    for _ in range(3):
        x = normal(m, K)
        rows = torch.full((m + 2, N), 7.0, device="cuda")
        assert qgemm.matmul(x, on_device, out=rows[1:-1]).data_ptr() == rows[1:-1].data_ptr()
        assert_gpu_product(rows[1:-1], x, w)
        assert (rows[[0, -1]] == 7).all()
        wide = torch.full((m, 2 * N), 7.0, device="cuda", dtype=torch.float16)
        qgemm.matmul(x, on_device, out=wide[:, ::2])
        assert_gpu_product(wide[:, ::2], x, w)
        assert (wide[:, 1::2] == 7).all()
        before = x.clone()
        qgemm.matmul(x, square_on_device, out=x)
        assert_gpu_product(x, before, square)
        residual = normal(m, N)
        y = residual.clone()
        qgemm.matmul(before, on_device, residual=y, out=y)
        assert_gpu_product(y, before, w, residual)
        with pytest.raises(qgemm.UnsupportedError, match="out requires grad"):
            qgemm.matmul(before, on_device, out=torch.zeros(m, N, device="cuda", requires_grad=True))


def test_nothing_to_compute(weights):
    """No rows of x."""
    _, on_device = weights
    for _ in range(3):
        for shape in ((0, K), (2, 0, K)):
            x = torch.zeros(shape, device="cuda", dtype=torch.float16)
            assert qgemm.matmul(x, on_device).shape == (*shape[:-1], N)
            out = torch.zeros(*shape[:-1], N, device="cuda")
            assert qgemm.matmul(x, on_device, out=out) is out


def test_modes_in_turn(weights):
    """Inference mode, no_grad and autocast, in which a plan of any other is met: the same bits, outputs of the mode."""
    _, on_device = weights
    x = normal(3, K)
    want = qgemm.matmul(x, on_device, dtype="float16")
    for _ in range(3):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.autocast("cuda")):
            with mode():
                inside = normal(3, K).copy_(x)
                for array in (x, inside):
                    y = qgemm.matmul(array, on_device, dtype="float16")
                    assert torch.equal(y, want)
                    assert y.is_inference() == torch.is_inference_mode_enabled()
                    out = torch.empty_like(y)
                    assert torch.equal(qgemm.matmul(array, on_device, out=out), want)


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_threads_with_streams(weights, activation, m):
    """Threads share a weight and a plan: none launches with another's pointers or on another's stream."""
    _, on_device = weights
    xs = [normal(m, K) for _ in range(6)]
    wants = [qgemm.matmul(x, on_device, activation, dtype="float16") for x in xs]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def turns(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(100):
                x = xs[index].clone() if turn % 3 else xs[index]
                out = torch.empty_like(wants[index]) if turn % 2 else None
                y = qgemm.matmul(x, on_device, activation, out=out, dtype=None if turn % 2 else "float16")
                stream.synchronize()
                if not torch.equal(y, wants[index]):
                    wrong.append((index, turn))

    def work(index: int) -> None:
        try:
            turns(index)
        except Exception:
            wrong.append(traceback.format_exc())

    at_once(work, range(len(xs)))
    assert wrong == []


@pytest.mark.parametrize("m", [1, 40])
def test_many_addresses_of_x(weights, m):
    """The call uses more addresses of x than a launch caches tensor maps for."""
    w, on_device = weights
    xs = [normal(m, K) for _ in range(40)]
    for _ in range(2):
        for x in xs:
            assert_gpu_product(qgemm.matmul(x, on_device), x, w)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone")
def test_two_devices(weights):
    """Weights and x are on either device, whichever is current; a plan of one device never serves the other."""
    w, first = weights
    with torch.cuda.device(1):
        second = w.to_device()
    for _ in range(3):
        for current in (0, 1):
            with torch.cuda.device(current):
                for number, on_device in enumerate((first, second)):
                    x = normal(3, K, device=f"cuda:{number}")
                    y = qgemm.matmul(x, on_device)
                    assert y.device == x.device
                    assert_gpu_product(y, x, w)
                with pytest.raises(qgemm.UnsupportedError, match="x is on cuda:1, w on cuda:0"):
                    qgemm.matmul(normal(3, K, device="cuda:1"), first)
