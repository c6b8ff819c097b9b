"""qgemm/torch/replay.py: a call of QExperts like its latest one is C alone, and no other call is taken for one."""

from __future__ import annotations

import copy
import gc
from weakref import ref

import numpy as np
import pytest

import qgemm
from qgemm.cpu.native import library

torch = pytest.importorskip("torch", reason="torch is not installed")
from qgemm.torch import QExperts, experts  # noqa: E402

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
E, F, K = 5, 96, 64


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)


@pytest.fixture
def products(recorded):
    """The calls that no replay served."""
    return recorded(experts, "moe")


def new_layer(bias=True, seed=0):
    rng = np.random.default_rng(seed)
    weights = [
        qgemm.quantize(rng.standard_normal((E, *shape), np.float32), "q4_0") for shape in ((F, K), (F, K), (K, F))
    ]
    biases = [torch.from_numpy(rng.standard_normal((E, n), np.float32)) if bias else None for n in (F, F, K)]
    return QExperts.from_tensors(*weights, biases)


def inputs(t=3, dtype=torch.float32, ids=torch.int64):
    return torch.randn(t, K).to(dtype), torch.stack([torch.randperm(E)[:2] for _ in range(t)]).to(ids), torch.rand(t, 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_a_second_call_is_a_replay(dtype, bias, ids, products):
    layer = new_layer(bias)
    for _ in range(3):
        x, routes, weights = inputs(dtype=dtype, ids=ids)
        assert torch.equal(layer(x, routes, weights), new_layer(bias)(x, routes, weights))
    assert len(products) == 1 + 3


def under_autocast(layer, x, ids, weights):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x, ids, weights)


def other_bytes(layer, *arrays):
    layer.up.weight.data.copy_(new_layer(seed=1).up.weight)
    return layer(*arrays)


def other_memory(layer, *arrays):
    layer.down.weight.data = new_layer(seed=1).down.weight.detach().clone()
    return layer(*arrays)


def another_parameter(layer, *arrays):
    layer.gate.weight = new_layer(seed=1).gate.weight
    return layer(*arrays)


def another_bias(layer, *arrays):
    layer.up.bias = torch.nn.Parameter(torch.ones(E, F), requires_grad=False)
    return layer(*arrays)


def without_a_bias(layer, *arrays):
    layer.down.bias = None
    return layer(*arrays)


def another_activation(layer, *arrays):
    layer.activation = "geglu"
    return layer(*arrays)


def by_numpy(layer, *arrays):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QGEMM_CPU", "numpy")
        return layer(*arrays)


CALLS = [
    under_autocast, other_bytes, other_memory, another_parameter, another_bias, without_a_bias, another_activation,
    by_numpy,
    lambda layer, x, ids, weights: layer(x.half(), ids, weights),
    lambda layer, x, ids, weights: layer(x[:1], ids[:1], weights[:1]),
    lambda layer, x, ids, weights: layer(x, ids.int(), weights),
    lambda layer, x, ids, weights: layer(x, ids, weights.half()),
    lambda layer, x, ids, weights: layer(x, ids, weights.requires_grad_()),
    lambda layer, x, ids, weights: layer(x.repeat(1, 2)[:, ::2], ids, weights),
    lambda layer, x, ids, weights: copy.deepcopy(layer)(x, ids, weights),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_another_call_is_none(call):
    """Its y is that of a layer without earlier calls, and calls like the first are served again afterwards."""
    layer, fresh, arrays = new_layer(), new_layer(), inputs()
    for _ in range(2):
        layer(*arrays)
    y, expected = (call(module, *(array.clone() for array in arrays)) for module in (layer, fresh))
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    for _ in range(2):
        assert torch.equal(layer(*arrays), fresh(*arrays))


def test_an_error_is_one_at_each_call():
    layer, (x, ids, weights) = new_layer(), inputs()
    for _ in range(2):
        layer(x, ids, weights)
        with pytest.raises(IndexError, match="there are experts 0 to 4"):
            layer(x, ids + E, weights)
        with pytest.raises(TypeError, match="takes a tensor, got numpy"):
            layer(x.numpy(), ids, weights)
        with pytest.raises(qgemm.UnsupportedError, match="no gradient"):
            layer(x.clone().requires_grad_(), ids, weights)


def test_a_weight_that_the_layer_gave_up_is_freed():
    layer, arrays = new_layer(), inputs()
    for _ in range(2):
        layer(*arrays)
    for part in (layer.gate, layer.up, layer.down):
        old = ref(part.weight)
        part.weight = new_layer(seed=1).up.weight
        gc.collect()
        assert old() is None
