"""Tensors of torch on the host by the fast path of qgemm/cpu/fast_path.py: the bits of first calls, and of NumPy."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import qgemm
from qgemm.cpu import fast_path
from qgemm.cpu.native import library

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
N, K = 40, 256
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """The calls that take the slow path."""
    monkeypatch.delenv("QGEMM_CPU", raising=False)
    calls, plain = [], fast_path.multiply
    monkeypatch.setattr(fast_path, "multiply", lambda *arguments: calls.append(arguments) or plain(*arguments))
    return calls


@pytest.fixture
def w():
    return qgemm.quantize(np.random.default_rng(0).standard_normal((N, K)), "q4_0")


def without_plans(w):
    return qgemm.Tensor(w.format, w.shape, w.blocks)


@pytest.mark.parametrize("y_type", TYPES)
@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_second_calls_have_the_bits_of_first_ones(x_type, y_type, strided, w, slow):
    """With a bias and a residual, into a new y and into one of the caller."""
    for _ in range(2):
        x = torch.randn(3, 2 * K if strided else K, dtype=torch.float32).to(x_type)[:, :: 2 if strided else 1]
        bias, residual = torch.nn.Parameter(torch.randn(N)), torch.randn(3, N).to(y_type)
        out = torch.empty(3, N, dtype=y_type)
        y = qgemm.matmul(x, w, bias=bias, residual=residual, dtype=y_type)
        assert qgemm.matmul(x, w, bias=bias, residual=residual, out=out) is out
        count = len(slow)
    assert count == 2
    assert y.dtype == y_type
    assert torch.equal(y, qgemm.matmul(x, without_plans(w), bias=bias, residual=residual, dtype=y_type))
    assert torch.equal(y, out)


@pytest.mark.parametrize("step", [1, 2])
def test_a_bias_is_read_where_it_lies(step, w, slow):
    """Also every other number of a tensor, and after it was written to; its storage may be freed, as FSDP does."""
    bias = torch.randn(N * step)[::step]
    x = torch.randn(3, K)
    plain = qgemm.matmul(x, w)
    for _ in range(3):
        assert torch.equal(qgemm.matmul(x, w, bias=bias), plain + bias)
        bias.mul_(2)
    assert len(slow) == 2
    bias.untyped_storage().resize_(0)


def test_what_c_cannot_read_takes_the_slow_path(w):
    """Lazy negation, an out that requires grad, another library's out: after calls that left a plan."""
    x, out = torch.randn(3, K), torch.empty(3, N)
    for _ in range(2):
        qgemm.matmul(x, w, out=out)
        qgemm.matmul(x, w)
    negative = torch.complex(torch.zeros(3, K), x).conj().imag
    assert negative.is_neg()
    with pytest.raises(RuntimeError, match="negative"):
        qgemm.matmul(negative, w)
    with pytest.raises(qgemm.UnsupportedError, match="requires grad"):
        qgemm.matmul(x, w, out=torch.empty(3, N, requires_grad=True))
    memory = np.empty((3, N), np.float32)
    for _ in range(2):
        assert qgemm.matmul(x, w, out=memory) is memory
        np.testing.assert_array_equal(memory, qgemm.matmul(x.numpy(), w))
    y = qgemm.matmul(x.requires_grad_(), w)
    assert not y.requires_grad


def test_a_layer_is_called_by_few_functions(w, slow):
    """A call like the latest runs this much Python, most of it to see that there are no gradients or transforms."""
    from qgemm.torch import QLinear

    frames = []
    for layer in (QLinear.from_tensor(w), QLinear.from_tensor(w, torch.randn(N))):
        x = torch.randn(3, K)
        with torch.inference_mode():
            expected = [layer(x), layer(x)]
            frames.clear()
            sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
            try:
                y = layer(x)
            finally:
                sys.setprofile(None)
        assert torch.equal(y, expected[0])
        assert "facts" not in frames  # one call of C compares all arrays
        assert len(frames) <= 27, frames
    assert len(slow) == 2


def test_the_latest_call_serves_no_other(w, slow):
    """Types, shapes, strides and gradients that differ, each twice and in turns."""
    wide = torch.randn(3, 2 * K)
    inputs = [
        wide[:, :K].clone(), wide[:2, :K].clone(), wide[:, :K], wide[:, :K].double(), wide[:, ::2].half(),
        wide[:, :K].clone().requires_grad_(),
    ]  # fmt: skip
    expected = [qgemm.matmul(x, without_plans(w)) for x in inputs]
    slow.clear()
    for _ in range(3):
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(qgemm.matmul(x, w), y)
    assert len(slow) == len(inputs)
