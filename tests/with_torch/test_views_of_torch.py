"""QLinear of weights with act-order (Reordered) or a float32 factor (Scaled): products, gradients, graphs, states."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers import normal as values
from torch_layers import DTYPES, assert_same, normal, torch, weights

import qgemm
from qgemm.torch import QLinear
from qgemm.torch.parallel import ColumnParallelLinear
from qgemm.torch.parallelize import Cut, _layer

N, K = 40, 128
VIEWS = {
    "act-order": lambda: qgemm.Reordered(weights("q8_0"), np.random.default_rng(1).permutation(K).astype(np.int32)),
    "factor": lambda: qgemm.Scaled(qgemm.quantize(values(N, K), "nvfp4"), np.float32(0.37)),
    "divisor": lambda: qgemm.Scaled(qgemm.quantize(values(N, K), "nvfp4"), np.float32(123.4), divides=True),
    "rows": lambda: qgemm.Scaled(qgemm.quantize(values(N, K), "q4_0"), np.linspace(0.1, 3, N, dtype=np.float32)),
}
each_view = pytest.mark.parametrize("name", VIEWS)


@each_view
@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_view(name, activation, dtype):
    """Bit for bit, with a bias, which is added to the float32 product."""
    w, bias = VIEWS[name](), normal(N, seed=1)
    layer = QLinear.from_tensor(w, bias, activation)
    x = normal(2, 3, K, dtype=dtype)
    y = layer(x)
    assert y.dtype is x.dtype
    assert_same(y, qgemm.matmul(x, w, activation, bias=bias, dtype=x.dtype))
    assert ("column_order" if name == "act-order" else "divisor" if name == "divisor" else "factor") in repr(layer)


def test_a_product_that_overflows_half_before_its_factor():
    """The factor is taken from sums in float32: of 128 products of 448 * 6 none may pass through half."""
    large = qgemm.quantize(np.full((N, K), 2688, np.float32), "nvfp4")
    y = QLinear.from_tensor(qgemm.Scaled(large, np.float32(2.0**-10)))(torch.ones(1, K, dtype=torch.float16))
    assert_same(y, torch.full((1, N), 2688 * K * 2.0**-10, dtype=torch.float16))


@each_view
def test_dequantize_and_gradients(name):
    w = VIEWS[name]()
    layer = QLinear.from_tensor(w, torch.nn.Parameter(normal(N, seed=1)))
    dense = layer.dequantize()
    assert_same(dense, torch.from_numpy(w.dequantize()))
    x = normal(3, K, seed=2).requires_grad_()
    gradients = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    y = torch.nn.functional.linear(x, dense, layer.bias)
    for got, want in zip(gradients, torch.autograd.grad(y.square().sum(), (x, layer.bias)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    half = x.detach().half().requires_grad_()
    layer(half).sum().backward()
    assert half.grad.dtype is torch.float16


@each_view
def test_a_graph_has_the_view(name):
    torch._dynamo.reset()  # its limit counts the graphs of all tests of this process
    layer = QLinear.from_tensor(VIEWS[name](), torch.nn.Parameter(normal(N, seed=1)))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for m in (2, 5):
        x, other = (normal(m, K, dtype="float16").requires_grad_() for _ in range(2))
        y = compiled(x)
        assert_same(y, layer(other))
        y.sum().backward()
        layer(other).sum().backward()
        assert_same(x.grad, other.grad)


@each_view
def test_states_copies_and_types(name):
    """An empty layer takes the view of a state dict; no type touches it; one with another view says so."""
    layer, x = QLinear.from_tensor(VIEWS[name]()), normal(3, K)
    want, state = layer(x), layer.state_dict()
    empty = QLinear(K, N, str(layer.format), bias=False)
    empty.load_state_dict(state)
    for other in (empty, copy.deepcopy(layer), copy.deepcopy(layer).half().to("cpu", torch.bfloat16)):
        assert_same(other(x), want)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict(QLinear.from_tensor(weights("q8_0")).state_dict())
    kind = next(key for key in state if key in ("column_order", "factor", "divisor"))
    with pytest.raises(RuntimeError, match=f"{kind}.*does not fit"):
        QLinear(K, N, "q8_0", bias=False).load_state_dict({**state, kind: state[kind].double()})


def test_what_views_do_not_do():
    layer = QLinear.from_tensor(VIEWS["act-order"]())
    with pytest.raises(qgemm.UnsupportedError, match="reordered or scaled, which is not cut"):
        _layer(layer, Cut("a", ColumnParallelLinear, False, None), None)
    with pytest.raises(qgemm.QgemmError, match="128"):
        layer(normal(2, K + 1))
