"""Products by experts on the GPU: formats, types, routing, outputs, graphs, guards."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from experts import (
    assert_a_graph_follows_ids,
    assert_within,
    golden_experts,
    known_layer,
    known_matmul,
    random_experts,
    routed,
)
from helpers import assert_same_bits, cupy
from strategies import FORMATS, TILED, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import grouped, plan
from qgemm.cuda.problem import gpu
from qgemm.routing import GATE_OF

TYPES = ("float16", "bfloat16", "float32")
LAYERS = ("q4_0", "q4_k", "q6_k", "mxfp4", "q8_0", "kbit4")  # formats of layers


def on_gpu(*arrays):
    return [None if array is None else cupy().asarray(array) for array in arrays]


@over_formats([fmt for fmt in FORMATS if fmt.plain or fmt.tiled])
@pytest.mark.parametrize("dtype", TYPES)
def test_each_token_by_its_experts(fmt, dtype):
    if dtype == "float32" and not (fmt.integer or fmt.plain):
        pytest.skip("levels of a codebook are rounded to a type of 16 bits")
    rng = np.random.default_rng(0)
    w = random_experts(fmt, 6, 200, 544, rng)
    packed = w.to_device()
    assert packed.to_host().blocks.tobytes() == w.blocks.tobytes()
    for t, top_k, of_slots in ((1, 4, False), (5, 2, True), (40, 3, False)):
        ids, _ = routed(rng, t, top_k, 6, skewed=t == 40)
        x = rng.standard_normal((t, top_k, w.shape[2]) if of_slots else (t, w.shape[2])) / 64
        x = x.astype(float_dtype(dtype))
        bias = rng.standard_normal(w.shape[:2]).astype(np.float32)
        y = qgemm.moe_matmul(*on_gpu(x), packed, *on_gpu(ids), bias=on_gpu(bias)[0])
        assert_within(y, known_matmul(x.astype(np.float32), w, ids, bias, dtype))
    x = cupy().asarray(x[:1])
    alone = qgemm.matmul(x, packed[2]).get()
    np.testing.assert_allclose(qgemm.moe_matmul(x, packed, cupy().array([[2]]))[0].get(), alone, rtol=1e-3, atol=1e-4)


@over_formats([fmt for fmt in FORMATS if fmt.name in (*LAYERS, "f16", "bf16", "f32")])
@pytest.mark.parametrize("name", GATE_OF)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer(fmt, name, dtype):
    rng = np.random.default_rng(1)
    gate, up = (random_experts(fmt, 9, 256, 512, rng) for _ in range(2))
    down = random_experts(fmt, 9, 512, 256, rng)
    both = qgemm.Tensor(fmt, (9, 512, 512), np.concatenate([gate.blocks, up.blocks], axis=1)).to_device()
    packed = [w.to_device() for w in (gate, up, down)]
    for t, top_k in ((1, 8), (7, 3)):
        ids, weights = routed(rng, t, top_k, 9)
        x = (rng.standard_normal((t, 512)) / 64).astype(float_dtype(dtype))
        biases = [(rng.standard_normal((9, n)) / 8).astype(np.float32) for n in (256, 256, 512)]
        expected = known_layer(x.astype(np.float32), gate, up, down, ids, weights, GATE_OF[name], biases, dtype)
        arrays = on_gpu(x, ids, weights)
        y = qgemm.moe(arrays[0], packed[:2], packed[2], *arrays[1:], name, biases=on_gpu(*biases))
        assert_within(y, expected)
        of_both = on_gpu(np.concatenate(biases[:2], axis=1), biases[2])
        merged = qgemm.moe(arrays[0], both, packed[2], *arrays[1:], name, biases=of_both)
        assert merged.tobytes() == y.tobytes()
        call = partial(qgemm.moe, arrays[0], packed[:2], packed[2], *arrays[1:], name, biases=on_gpu(*biases))
        assert_same_bits(y, call, 200 if name == "swiglu" else 5)


@over_formats([fmt for fmt in TILED if fmt.name in ("q4_0", "q4_k", "q8_0", "mxfp4", "iq2_xs", "kbit4")])
def test_a_layer_without_bulk_copies(fmt, monkeypatch):
    """Stages filled by cp.async, as on GPUs before sm_90, whose configs an H100 also runs."""
    for module in (plan, grouped):
        monkeypatch.setattr(module, "gpu", lambda device: gpu(device)._replace(sm=80))
    rng = np.random.default_rng(7)
    gate, up, down = (random_experts(fmt, 9, *shape, rng) for shape in ((512, 2048), (512, 2048), (2048, 512)))
    ids, weights = routed(rng, 2, 4, 9)
    x = (rng.standard_normal((2, 2048)) / 64).astype(np.float16)
    expected = known_layer(x.astype(np.float32), gate, up, down, ids, weights, "silu", between="float16")
    packed = [w.to_device() for w in (gate, up, down)]
    arrays = on_gpu(x, ids, weights)
    y = qgemm.moe(arrays[0], packed[:2], packed[2], *arrays[1:])
    assert_within(y, expected)
    assert_same_bits(y, lambda: qgemm.moe(arrays[0], packed[:2], packed[2], *arrays[1:]), 20)


@pytest.mark.parametrize("spelled", ["mxfp4", "q4_k"])
@pytest.mark.parametrize("t", [1, 90])
def test_bytes_of_ggml_as_experts(spelled, t):
    """The values that C reads of a file are multiplied: few slots, and many, which are sorted by expert."""
    rng, fmt = np.random.default_rng(5), qgemm.FORMATS[spelled]
    w, values = golden_experts(fmt, 5, 90)
    ids, _ = routed(rng, t, 3, 5)
    x = (rng.standard_normal((t, 512)) / 64).astype(np.float16)
    y = qgemm.moe_matmul(*on_gpu(x), w.to_device(), *on_gpu(ids))
    expected = known_matmul(x.astype(np.float32), w, ids, None, "float16", rounded="float16")
    exact = np.einsum("tk,tjnk->tjn", x.astype(np.float64), values[ids])
    np.testing.assert_allclose(expected.y, exact, rtol=1e-9, atol=1e-9)
    assert_within(y, expected)


def test_torch_graphs_and_ids_that_change():
    assert_a_graph_follows_ids(3)


def test_ids_that_are_no_expert_and_nan_of_others():
    rng = np.random.default_rng(3)
    fmt = qgemm.FORMATS["q4_0"]
    w = random_experts(fmt, 4, 64, 128, rng)
    blocks = w.blocks.copy()
    blocks["d"][2] = np.nan
    packed = qgemm.Tensor(fmt, w.shape, blocks).to_device()
    ids = np.array([[0, -1], [2, 1], [4, 3], [1 << 40, 0]])
    y = qgemm.moe_matmul(*on_gpu(np.ones((4, 128), np.float16)), packed, *on_gpu(ids)).get()
    nobody = (ids < 0) | (ids > 3)
    assert not y[nobody].any()
    assert np.isnan(y[1, 0]).all()
    assert np.isfinite(y[~nobody & (ids != 2)]).all()
