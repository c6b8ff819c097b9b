"""The first product of a layer on the CPU copies its weights in the order of vectors; nothing else sees the copy."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from torch_layers import assert_same, normal, torch, weights

import qgemm
from qgemm.cpu.native import interleave, library
from qgemm.torch import QLinear

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
N, BLOCKS = 37, 4
X = normal(3, 64 * BLOCKS)


@pytest.fixture(autouse=True)
def _small_weights_are_packed(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)
    monkeypatch.setattr(interleave, "LEAST_PACKED", N * 64 * BLOCKS)


def new_weights(seed=0, name="q4_0"):
    return weights(name, N, BLOCKS * 64 // max(64, qgemm.FORMATS[name].weights), seed)


def mapped_layer(tmp_path, activation="a16"):
    qgemm.write(tmp_path / "model.gguf", {"w": new_weights()})
    with qgemm.open(tmp_path / "model.gguf") as file:
        return QLinear.from_tensor(file["w"], activation=activation)


def by_the_copy(w, activation="a16"):
    return torch.from_numpy(qgemm.matmul(X.numpy(), w.packed_for_cpu(), activation))


@pytest.mark.parametrize("activation", ["a8", "a16"])
def test_a_layer_multiplies_by_a_copy(tmp_path, activation):
    """From its first product on, and with the same bits each time; the parameter stays over the mapping."""
    layer = mapped_layer(tmp_path, activation)
    address, want = layer.weight.data_ptr(), by_the_copy(new_weights(), activation)
    assert layer.packed.interleaved is None
    for _ in range(3):
        assert_same(layer(X), want)
    assert layer.packed.interleaved is not None
    assert layer.weight.data_ptr() == address
    assert layer.state_dict()["weight"].numpy().tobytes() == new_weights().blocks.tobytes()
    assert_same(layer.dequantize(), torch.from_numpy(new_weights().dequantize()))


def test_blocks_alone_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("QGEMM_CPU", "blocks")
    layer = mapped_layer(tmp_path)
    assert_same(layer(X), torch.from_numpy(qgemm.matmul(X.numpy(), new_weights())))
    assert layer.packed.interleaved is None


@pytest.mark.parametrize("name", ["f16", "tq1_0", "iq2_xs"])
def test_no_copy_where_it_does_not_pay(name, monkeypatch):
    """Numbers and one scale a lane have no kernel for it; points of a grid would need several times the memory."""
    layer = QLinear.from_tensor(new_weights(name=name))
    layer(X)
    assert layer.packed.interleaved is None


def test_small_weights_have_no_copy(monkeypatch):
    monkeypatch.setattr(interleave, "LEAST_PACKED", N * 64 * BLOCKS + 1)
    layer = QLinear.from_tensor(new_weights())
    layer(X)
    assert layer.packed.interleaved is None


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda w, new: w.copy_(new),
        lambda w, new: w.data.copy_(new),
        lambda w, new: w.numpy().__setitem__(..., new.numpy()),
    ],
)
def test_a_write_into_the_weight(tmp_path, write, replayed):
    """The next product is by the new bytes, and by the first ones when these are back."""
    layer, x = mapped_layer(tmp_path), X if replayed else X[:2]
    first, other = layer.weight.detach().clone(), QLinear.from_tensor(new_weights(1))
    layer(X)
    for new, seed in ((other.weight.detach(), 1), (first, 0), (other.weight.detach(), 1)):
        with torch.no_grad():
            write(layer.weight, new)
        want = qgemm.matmul(x, new_weights(seed))  # a tensor, as x is
        for _ in range(2):
            torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eighth", range(8))
def test_a_write_into_a_part_of_the_weight(tmp_path, eighth):
    """That torch does not count: a word of each eighth of the bytes is looked at."""
    layer, other = mapped_layer(tmp_path), QLinear.from_tensor(new_weights(1))
    layer(X)
    raw, new = (packed.weight.detach().numpy().reshape(-1) for packed in (layer, other))
    words = len(raw) // 8 // 8
    part = slice(8 * eighth * words, 8 * (eighth + 1) * words)
    raw[part] = new[part]
    torch.testing.assert_close(layer(X), X @ layer.dequantize().T, rtol=1e-4, atol=1e-3)


def test_a_write_frees_the_copy_and_its_plans(tmp_path):
    layer = mapped_layer(tmp_path)
    layer(X), qgemm.matmul(X, layer.packed), qgemm.matmul(X[:1], layer.packed)
    interleaved = weakref.ref(layer.packed.interleaved)
    layer.weight.data.copy_(QLinear.from_tensor(new_weights(1)).weight)
    layer(X)
    gc.collect()
    assert interleaved() is None


def test_a_write_into_one_weight_of_several():
    """The plan of their call reads a copy of each."""
    layers = [QLinear.from_tensor(new_weights(seed)) for seed in (0, 1)]
    for seed in (0, 1, 2, 3):
        layers[seed % 2].weight.detach().numpy()[...] = new_weights(seed).blocks.view(np.uint8).reshape(N, -1)
        products = qgemm.matmul_many(X, [layer.packed for layer in layers])
        for layer, y in zip(layers, products, strict=True):
            torch.testing.assert_close(y, X @ layer.dequantize().T, rtol=1e-4, atol=1e-3)


def test_bytes_that_move_after_a_product_are_multiplied_as_they_are():
    """Offload and FSDP move them before each product, so that a copy would serve one."""
    layer = QLinear.from_tensor(new_weights())
    layer(X)
    layer.weight.data = layer.weight.data.clone()
    assert_same(layer(X), torch.from_numpy(qgemm.matmul(X.numpy(), new_weights())))
    assert layer.packed.interleaved is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_duplicate_has_the_bytes_of_the_file(tmp_path, duplicate):
    layer = mapped_layer(tmp_path)
    y = layer(X)
    other = duplicate(layer)
    assert torch.equal(other.weight, layer.weight)
    assert other.packed.interleaved is None
    assert_same(other(X), y)
    layer.share_memory()
    assert layer.weight.numpy().tobytes() == new_weights().blocks.tobytes()
