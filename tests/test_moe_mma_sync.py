"""Sorted tokens of experts by mma.sync without a GPU: sort, gather, products of both kernels and sums on the host."""

from __future__ import annotations

from functools import cache

import harness
import numpy as np
import pytest
from experts import assert_within, known_layer, known_matmul, random_experts, routed
from moe_on_host import Launch, device, install, on_device

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import grouped, plan
from qgemm.cuda.kernels import activations, decode, moe_prefill_sm80, moe_sort, transforms
from qgemm.cuda.kernels.expert_tiles import DECODE_TILE, Size
from qgemm.cuda.problem import Gpu

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
SORT = {"THREADS": 128}  # fewer than on a GPU, where 16 warps are slow to emulate
LAYERS = ("q4_0", "swiglu", "float16"), ("q4_k", "swiglu_oai", "bfloat16")


@pytest.fixture(params=[DECODE_TILE, 16])
def host(request, monkeypatch):
    """CuPy on NumPy and kernels on the host, for a GPU with mma.sync alone on which every call is sorted, with token
    tiles of moe_decode_tiles and of moe_prefill_sm80.
    """
    install(monkeypatch)
    kernel = cache(harness.Kernel)
    for module in (transforms, moe_prefill_sm80, decode):
        monkeypatch.setattr(module, "load", lambda name, fmt, **template: kernel(name, fmt, **template))
    for module in (activations, moe_sort, moe_prefill_sm80, decode):
        monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(moe_sort, "SORT_THREADS", SORT["THREADS"])
    monkeypatch.setattr(moe_sort, "MOE_SORT", transforms.Transform("moe_sort", (SORT,)))
    for module in (plan, grouped):
        monkeypatch.setattr(module, "gpu", lambda device: Gpu(device, 80, 108))
    monkeypatch.setattr(plan, "launch", plan.launch.__wrapped__)
    monkeypatch.setattr(grouped, "token_tile", lambda *sizes: request.param)
    cached_launches = moe_sort.sort_launch, moe_sort.combine_launch, activations.scale_launch
    for function in cached_launches:
        function.cache_clear()
    yield
    for function in cached_launches:
        function.cache_clear()


@pytest.mark.parametrize(("spelled", "name", "dtype"), LAYERS)
def test_a_layer(spelled, name, dtype, host):
    """An expert has most tokens, one has none, some ids name none; tiles are ragged, weights have any range."""
    rng, fmt = np.random.default_rng(1), qgemm.FORMATS[spelled]
    k, f = (96, 192) if fmt.weights < 100 else (256, 256)
    gate, up, down = (random_experts(fmt, 4, *shape, rng) for shape in ((f, k), (f, k), (k, f)))
    t, top_k = 23, 2
    ids, weights = routed(rng, t, top_k, 3, skewed=True)
    x = (rng.standard_normal((t, k)) / 64).astype(float_dtype(dtype))
    biases = [(rng.standard_normal((4, n)) / 8).astype(np.float32) for n in (f, f, k)]
    packed = [on_device(w) for w in (gate, up, down)]
    for w in packed:
        w.exponent = 0  # computed from bounds of rows, which tests do not upload
    passed_ids, nobody = ids.copy(), rng.random(ids.shape) < 0.1
    passed_ids[nobody], weights[nobody] = -1, 0
    passed = [device(bias) for bias in biases]
    y = qgemm.moe(device(x), packed[:2], packed[2], device(passed_ids), device(weights), name, biases=passed)
    gating = {"swiglu": "silu"}.get(name, name)
    expected = known_layer(
        x.astype(np.float32), gate, up, down, ids, weights, gating, biases, dtype, in_float=True, rounded="float16"
    )  # fmt: skip
    assert_within(y, expected, more=2.0**-16)


def test_a_product_of_rows_of_each_slot(host):
    rng = np.random.default_rng(2)
    w = random_experts(qgemm.FORMATS["q4_0"], 5, 300, 160, rng)
    packed = on_device(w)
    packed.exponent = 3  # weights are multiplied as eighths
    ids, _ = routed(rng, 19, 3, 5)
    x = (rng.standard_normal((19, 3, 160)) / 64).astype(np.float16)
    y = qgemm.moe_matmul(device(x), packed, device(ids))
    assert_within(y, known_matmul(x.astype(np.float32), w, ids, None, "float16", rounded="float16"))


def test_token_tiles_grow_with_the_load():
    q4_0 = qgemm.FORMATS["q4_0"]
    sizes = Size(q4_0, 1536, 2048, True), Size(q4_0, 2048, 768)
    tiles = [moe_prefill_sm80.token_tile(sizes, 8 * t, 128, 108, 80) for t in (1, 64, 512, 4096)]
    assert tiles == sorted(tiles)
    assert (tiles[0], tiles[-1]) == (0, 128)
