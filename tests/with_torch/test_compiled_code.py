"""Layers over the compiled products of the CPU (qgemm/cpu/native/), as users run them; the other tests take NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import at_once
from torch_layers import DTYPES, assert_product, normal, torch, weights

import qgemm
from qgemm.cpu.native import library
from qgemm.torch import QLinear

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["q4_0", "q6_k"])
def test_products(name, dtype, tmp_path):
    """From the mapping of a file, by one row and by many, with and without a copy of strided x."""
    qgemm.write(tmp_path / "model.gguf", {"w": weights(name, n=70)})
    with qgemm.open(tmp_path / "model.gguf") as file:
        layer = QLinear.from_tensor(file["w"], normal(70, dtype=dtype))
    for m in (1, 3, 40):
        x = normal(m, 2 * layer.in_features, dtype=dtype)
        assert_product(layer(x[:, ::2]), x[:, ::2], weights(name, n=70), layer.bias)
        assert_product(layer(x[:, : layer.in_features]), x[:, : layer.in_features], weights(name, n=70), layer.bias)


def test_threads_of_torch_and_ours():
    """Callers from many threads, while torch's own threads work, each get their own y."""
    layer = QLinear.from_tensor(weights("q4_k", n=200))
    xs = [normal(m, layer.in_features, seed=m) for m in (1, 2, 17, 64)]
    wants, wrong = [layer(x) for x in xs], []

    def work(x, want):
        for _ in range(30):
            torch.mm(torch.ones(200, 200), torch.ones(200, 200))
            if not torch.equal(layer(x), want):
                wrong.append(len(x))

    at_once(work, xs, wants)
    assert wrong == []
    np.testing.assert_array_equal(layer(xs[0]).numpy(), qgemm.matmul(xs[0].numpy(), weights("q4_k", n=200)))
