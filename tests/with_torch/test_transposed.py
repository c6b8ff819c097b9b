"""x @ w.T of tensors of torch, and what torch says where transposed weights stand for a tensor."""

from __future__ import annotations

import pytest
from torch_layers import assert_same, normal, torch, weights

import qgemm


@pytest.mark.parametrize("product", [torch.Tensor.__matmul__, torch.matmul], ids=["x @ w.T", "torch.matmul"])
def test_a_tensor_multiplies_by_transposed_weights(product, monkeypatch):
    """At once: torch writes no error for Python to ask __rmatmul__ after it, which took three products' time."""
    w = weights()
    monkeypatch.setattr("qgemm.packed.Transposed.__rmatmul__", None)
    for x in (normal(3, 128), torch.nn.Parameter(normal(128)), normal(0, 128), normal(2, 3, 128).half()):
        y = product(x, w.T)
        assert not y.requires_grad
        assert_same(y, qgemm.matmul(x, w))
    with pytest.raises(qgemm.ShapeError, match="x has rows of 64"):
        product(normal(3, 64), w.T)


def test_transposed_weights_are_no_tensor():
    w, x = weights(), normal(40, 128)
    with pytest.raises(TypeError, match=r"has rows along K: write x @ tensor\.T"):
        x @ w
    with pytest.raises(TypeError, match="unsupported operand"):
        x + w.T
    for function in (torch.add, torch.mm, torch.nn.functional.linear, lambda x, y: torch.matmul(y, x)):
        with pytest.raises(TypeError, match=r"takes no transposed weights: they are for x @ tensor\.T alone"):
            function(x, w.T)
    for wrong in (lambda: torch.cat([x, w.T]), lambda: torch.matmul(x, w.T, out=torch.empty(40, 40))):
        with pytest.raises(TypeError, match="takes no transposed weights"):
            wrong()
