"""qgemm/torch/replay.py: a call of a layer like its latest one is C alone, and no other call is taken for one."""

from __future__ import annotations

import copy
import gc
import io
from weakref import ref

import numpy as np
import pytest

import qgemm
from qgemm.cpu.native import library

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.autograd import forward_ad  # noqa: E402

from qgemm.torch import QLinear, linear  # noqa: E402

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
N, K = 40, 64


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)


@pytest.fixture
def products(recorded):
    """The products that no replay served."""
    return recorded(linear, "product")


def new_layer(bias=True, seed=0):
    rng = np.random.default_rng(seed)
    w = qgemm.quantize(rng.standard_normal((N, K), np.float32), "q4_0")
    term = torch.from_numpy(rng.standard_normal(N, np.float32)) if bias else None
    return QLinear.from_tensor(w, term)


def inputs(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (3, K))).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 5, K), (40, K)])
def test_a_second_call_is_a_replay(shape, dtype, bias, products):
    layer = new_layer(bias)
    for _ in range(3):
        x = inputs(*shape, dtype=dtype)
        y = layer(x)
        assert torch.equal(y, qgemm.matmul(x, new_layer(bias).packed, bias=layer.bias, dtype=dtype))
    assert len(products) == 1


def with_gradient(layer, x):
    y = layer(x.requires_grad_())
    return torch.autograd.grad(y.sum(), x)[0]


def with_gradient_of_the_bias(layer, x):
    layer.bias.requires_grad_()
    return torch.autograd.grad(layer(x).sum(), layer.bias)[0]


def under_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def in_inference_mode(layer, x):
    with torch.inference_mode():
        return layer(x).clone()


def a_tangent(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def a_tangent_of_the_bias(layer, x):
    with forward_ad.dual_level():
        bias = forward_ad.make_dual(layer.bias.detach(), torch.ones(N))
        return forward_ad.unpack_dual(torch.func.functional_call(layer, {"bias": bias}, (x,))).tangent


def a_graph_of_jit(layer, x):
    traced = torch.jit.trace(layer, x)
    assert "qgemm::linear" in str(traced.graph)
    return traced(x)


def other_bytes(layer, x):
    layer.weight.data.copy_(new_layer(seed=1).weight)
    return layer(x)


def other_memory(layer, x):
    layer.weight.data = new_layer(seed=1).weight.detach().clone()
    return layer(x)


def another_parameter(layer, x):
    layer.weight = new_layer(seed=1).weight
    return layer(x)


def another_bias(layer, x):
    layer.bias = torch.nn.Parameter(torch.ones(N), requires_grad=False)
    return layer(x)


def bias_of_another_type(layer, x):
    return layer.half()(x)


def without_bias(layer, x):
    layer.bias = None
    return layer(x)


def another_activation(layer, x):
    layer.activation = "a8"
    return layer(x)


def with_lora(layer, x):
    layer.add_lora(torch.ones(2, K), torch.ones(N, 2))
    return layer(x).detach()


def by_numpy(layer, x):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QGEMM_CPU", "numpy")
        return layer(x)


CALLS = [
    with_gradient, with_gradient_of_the_bias, under_autocast, in_inference_mode, a_tangent, a_tangent_of_the_bias,
    a_graph_of_jit, other_bytes, other_memory, another_parameter, another_bias, bias_of_another_type, without_bias,
    another_activation, with_lora, by_numpy,
    lambda layer, x: torch.func.vmap(layer)(x),
    lambda layer, x: torch.func.grad(lambda v: layer(v).sum())(x),
    lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    lambda layer, x: layer(x.to("meta")).shape,
    lambda layer, x: layer(x[:, ::2].repeat(1, 2)),
    lambda layer, x: layer(x.double()),
    lambda layer, x: layer(x[:0]),
    lambda layer, x: layer(torch.nn.Parameter(x)).detach(),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_another_call_is_none(call, mode):
    """Its y is that of a layer without earlier calls, and calls like the first are served again afterwards."""
    layer, fresh, x = new_layer(), new_layer(), inputs()
    with mode():
        for _ in range(2):
            layer(x)
    y, expected = call(layer, x.clone()), call(fresh, x.clone())
    assert type(y) is type(expected)
    assert torch.equal(y, expected) if isinstance(y, torch.Tensor) else y == expected
    with mode():
        for _ in range(2):
            assert torch.equal(layer(x), fresh(x))


def test_an_error_is_one_at_each_call():
    layer = new_layer()
    for _ in range(2):
        layer(inputs())
        with pytest.raises(TypeError, match="takes a tensor, got numpy"):
            layer(np.ones((3, K), np.float32))
        with pytest.raises(qgemm.ShapeError):
            layer(inputs(3, K + 32))


def test_copies_and_pickles_have_calls_of_their_own():
    layer, x = new_layer(), inputs()
    expected = layer(x)
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    for other in (copy.copy(layer), copy.deepcopy(layer), torch.load(memory, weights_only=False)):
        for _ in range(2):
            assert torch.equal(other(x), expected)
    other.weight.data.copy_(new_layer(seed=1).weight)
    assert not torch.equal(other(x), expected)
    assert torch.equal(layer(x), expected)


def test_a_weight_that_the_layer_gave_up_is_freed():
    layer, x = new_layer(), inputs()
    layer(x)
    old = ref(layer.weight)
    layer.weight = new_layer(seed=1).weight
    gc.collect()
    assert old() is None
