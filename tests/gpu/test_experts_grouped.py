"""Experts of many tokens on the GPU, sorted by expert: token tiles, formats, skew, repeats, guards, graphs."""

from __future__ import annotations

import numpy as np
import pytest
from experts import assert_a_graph_follows_ids, assert_within, known_layer, known_matmul, random_experts, routed
from helpers import assert_same_bits, cupy
from hypothesis import given
from hypothesis import strategies as st
from strategies import TILED, gpu_settings, over_formats, seeds

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import grouped, plan
from qgemm.cuda.kernels import moe_prefill_sm80
from qgemm.cuda.kernels.expert_tiles import DECODE_TILE
from qgemm.cuda.kernels.routes import WGMMA
from qgemm.cuda.kernels.sm90_token_tiles import GROUPED_TOKENS, config_of
from qgemm.cuda.problem import gpu
from qgemm.routing import GATE_OF

TYPES = ("float16", "bfloat16")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
GUARD = 64  # values on each side of y
MMA_SYNC = 80  # the compute capability whose kernel an H100 also runs


@pytest.fixture(autouse=True)
def needs_a_gpu():
    cupy()


def by_wgmma(monkeypatch, tokens):
    """Calls of any size are sorted by expert and take wgmma, with token tiles of `tokens` rows."""
    if int(cupy().cuda.Device().compute_capability) not in range(*WGMMA):
        pytest.skip("only sm_90 has wgmma")
    monkeypatch.setattr(grouped, "token_tile", lambda *sizes: tokens)


def by_decode(monkeypatch, tokens):
    """Calls of any size take the kernel for experts of few tokens, with bulk copies where the GPU has them."""
    monkeypatch.setattr(grouped, "token_tile", lambda *sizes: tokens)


def by_mma_sync(monkeypatch, tokens):
    """Calls of any size take the kernel of GPUs without wgmma."""
    for module in (plan, grouped):
        monkeypatch.setattr(module, "gpu", lambda device: gpu(device)._replace(sm=MMA_SYNC))
    monkeypatch.setattr(grouped, "token_tile", lambda *sizes: tokens)


ROADS = {"wgmma": (by_wgmma, GROUPED_TOKENS), "mma.sync": (by_mma_sync, moe_prefill_sm80.TOKEN_TILES),
         "decode": (by_decode, (DECODE_TILE,))}  # fmt: skip


WEIGHTS = {"wgmma": "float16", "mma.sync": "float16", "decode": "float32"}  # the types that weights are rounded to


def on_gpu(*arrays):
    return [None if array is None else cupy().asarray(array) for array in arrays]


@over_formats(TILED)
@pytest.mark.parametrize("road", ROADS)
def test_each_token_by_its_experts(fmt, road, monkeypatch):
    """Token tiles and types of x by turns; ragged N and K, an expert with half of the tokens, ids of none."""
    rng, number, (sort_by, of_road) = np.random.default_rng(0), TILED.index(fmt), ROADS[road]
    w = random_experts(fmt, 6, 200, 544, rng)
    packed, dtype, tokens = w.to_device(), TYPES[number % 2], of_road[number % len(of_road)]
    assert sort_by is not by_wgmma or config_of(fmt, tokens) is not None
    sort_by(monkeypatch, tokens)
    for t, top_k, of_slots in ((1, 1, False), (90, 3, True), (400, 2, False)):
        ids, _ = routed(rng, t, top_k, 6, skewed=t == 400)
        given_ids, nobody = ids.copy(), rng.random(ids.shape) < 0.05
        given_ids[nobody] = rng.choice([-1, 6, 1 << 30])
        x = rng.standard_normal((t, top_k, w.shape[2]) if of_slots else (t, w.shape[2])) / 64
        x = x.astype(float_dtype(dtype))
        bias = rng.standard_normal(w.shape[:2]).astype(np.float32)
        y = qgemm.moe_matmul(*on_gpu(x), packed, *on_gpu(given_ids), bias=on_gpu(bias)[0])
        expected = known_matmul(x.astype(np.float32), w, ids, bias, dtype, rounded=WEIGHTS[road])
        expected.y[nobody] = expected.bound[nobody] = expected.noise[nobody] = 0
        assert_within(y, expected)


LAYERS = (
    ("wgmma", "q4_0", "swiglu", "float16", 16), ("wgmma", "q4_0", "swiglu", "bfloat16", 128),
    ("wgmma", "q4_k", "swiglu", "float16", 48), ("wgmma", "mxfp4", "swiglu_oai", "bfloat16", 32),
    ("wgmma", "q6_k", "geglu_tanh", "float16", 64), ("wgmma", "kbit4", "geglu", "float16", 160),
    ("wgmma", "q4_0", "swiglu", "float16", 256), ("mma.sync", "q4_0", "swiglu", "float16", 16),
    ("decode", "q4_0", "swiglu", "float16", DECODE_TILE), ("decode", "q6_k", "geglu", "bfloat16", DECODE_TILE),
    ("mma.sync", "mxfp4", "swiglu_oai", "bfloat16", 64), ("mma.sync", "q4_k", "geglu", "float16", 128),
)  # fmt: skip


@pytest.mark.parametrize(("road", "spelled", "name", "dtype", "tokens"), LAYERS)
def test_a_layer(road, spelled, name, dtype, tokens, monkeypatch):
    """Gate and up as two tensors and as one, down of another format; the same bits 200 times."""
    rng, fmt = np.random.default_rng(1), qgemm.FORMATS[spelled]
    ROADS[road][0](monkeypatch, tokens)
    gate, up = (random_experts(fmt, 9, 192, 512, rng) for _ in range(2))
    down = random_experts(qgemm.FORMATS["q8_0"], 9, 512, 192, rng)
    both = qgemm.Tensor(fmt, (9, 384, 512), np.concatenate([gate.blocks, up.blocks], axis=1)).to_device()
    packed = [w.to_device() for w in (gate, up, down)]
    t, top_k = 120, 3
    ids, weights = routed(rng, t, top_k, 9, skewed=True)
    x = (rng.standard_normal((t, 512)) / 64).astype(float_dtype(dtype))
    biases = [(rng.standard_normal((9, n)) / 8).astype(np.float32) for n in (192, 192, 512)]
    expected = known_layer(
        x.astype(np.float32), gate, up, down, ids, weights, GATE_OF[name], biases, dtype, in_float=True,
        rounded=WEIGHTS[road],
    )  # fmt: skip
    arrays = on_gpu(x, ids, weights)
    y = qgemm.moe(arrays[0], packed[:2], packed[2], *arrays[1:], name, biases=on_gpu(*biases))
    assert_within(y, expected, more=2.0**-16)  # the gate's exponential
    of_both = on_gpu(np.concatenate(biases[:2], axis=1), biases[2])
    merged = qgemm.moe(arrays[0], both, packed[2], *arrays[1:], name, biases=of_both)
    assert merged.tobytes() == y.tobytes()
    on_device = on_gpu(*biases)
    assert_same_bits(y, lambda: qgemm.moe(arrays[0], packed[:2], packed[2], *arrays[1:], name, biases=on_device))


@gpu_settings
@given(
    rng=seeds(), t=st.integers(1, 300), top_k=st.integers(1, 6), e=st.sampled_from([1, 2, 5, 40]),
    road=st.sampled_from(list(ROADS)), n=st.sampled_from([64, 100, 320]), out=st.sampled_from(["float32", "float16"]),
    data=st.data(),
)  # fmt: skip
def test_sizes_and_guards(rng, t, top_k, e, road, n, out, data):
    """ids with repeats; nothing is written beside y, and all of y is written."""
    fmt = qgemm.FORMATS["q4_0"]
    w = random_experts(fmt, e, n, 128, rng)
    ids = rng.integers(0, e, (t, top_k)).astype(np.int64)
    x = (rng.standard_normal((t, 128)) / 64).astype(np.float16)
    room = cupy().full(t * top_k * n + 2 * GUARD, np.nan, float_dtype(out))
    y = room[GUARD:-GUARD].reshape(t, top_k, n)
    sort_by, of_road = ROADS[road]
    with pytest.MonkeyPatch.context() as patch:
        sort_by(patch, data.draw(st.sampled_from(of_road[:3])))
        qgemm.moe_matmul(*on_gpu(x), w.to_device(), *on_gpu(ids), out=y)
    assert_within(y, known_matmul(x.astype(np.float32), w, ids, None, "float16", rounded="float16"), out)
    assert cupy().isnan(room[:GUARD]).all()
    assert cupy().isnan(room[-GUARD:]).all()


@pytest.mark.parametrize(("road", "tokens"), [("wgmma", 32), ("mma.sync", 64), ("decode", DECODE_TILE)])
def test_nan_of_an_expert_reaches_its_tokens_alone(road, tokens, monkeypatch):
    rng = np.random.default_rng(3)
    ROADS[road][0](monkeypatch, tokens)
    fmt = qgemm.FORMATS["q4_0"]
    w = random_experts(fmt, 4, 64, 128, rng)
    blocks = w.blocks.copy()
    blocks["d"][2] = np.nan
    down = random_experts(fmt, 4, 128, 64, rng).to_device()
    packed = qgemm.Tensor(fmt, w.shape, blocks).to_device()
    ids = rng.integers(0, 4, (300, 2))
    x = (rng.standard_normal((300, 128)) / 64).astype(np.float16)
    x[7] = np.nan
    is_nan = np.isnan(qgemm.moe_matmul(*on_gpu(x), packed, *on_gpu(ids)).get())
    expected = ids == 2
    expected[7] = True
    assert (is_nan == expected[..., None]).all()
    weights = np.full(ids.shape, 0.5, np.float32)
    y = np.isnan(qgemm.moe(*on_gpu(x), (packed, packed), down, *on_gpu(ids, weights)).get())
    assert (y == expected.any(1)[:, None]).all()


@pytest.mark.parametrize("road", ROADS)
def test_torch_graphs_and_ids_that_change(road, monkeypatch):
    ROADS[road][0](monkeypatch, ROADS[road][1][0])
    assert_a_graph_follows_ids(90, more=2.0**-16, in_float=True, rounded="float16")
