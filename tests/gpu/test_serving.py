"""Layers of serving engines on the GPU: bytes become tiles, several formats give one output, also in CUDA graphs."""

from __future__ import annotations

import pytest
from experts import assert_within, known_layer
from measured_errors import check_rms
from torch_layers import assert_gpu_product, normal, on_host, torch

import qgemm
from qgemm.torch import serving

FORMATS = ("q4_k", "q4_k", "q6_k")


@pytest.fixture
def tensors():
    return [quantized(name, n, 512, seed) for seed, (name, n) in enumerate(zip(FORMATS, (128, 64, 64), strict=True))]


def quantized(name, n, k, seed=0):
    """A Tensor [n, k] of normal weights."""
    return qgemm.quantize(normal(n, k, seed=seed).numpy() / k**0.5, name)


def layer_of(tensors):
    """A layer that an engine has loaded: bytes of the file's tensors on the GPU."""
    layer, shards = torch.nn.Module(), []
    for w in tensors:
        data = torch.from_numpy(w.blocks.view("u1").reshape(w.shape[0], -1).copy()).cuda()
        shards.append(serving.Shard(w.format, data))
    serving.hold_joined(layer, "qweight", shards)
    return layer


@pytest.mark.parametrize("m", [1, 5, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_several_formats_give_one_output_in_a_graph_too(tensors, m, dtype):
    layer, x, bias = layer_of(tensors), normal(m, 512, dtype=dtype).cuda(), normal(256, dtype=dtype, seed=1).cuda()
    assert [(w.shape, getattr(layer, w.name).dim()) for w in layer.qgemm_weights] == [((192, 512), 1), ((64, 512), 1)]
    y, sizes = serving.linear(layer, x, bias, "a16"), [len(w) for w in tensors]
    for part, w, added in zip(y.split(sizes, 1), tensors, bias.split(sizes), strict=True):
        assert_gpu_product(part, x, w, added)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = serving.linear(layer, x, bias, "a16")
    x.copy_(normal(m, 512, dtype=dtype, seed=2).cuda())
    graph.replay()
    torch.testing.assert_close(captured, serving.linear(layer, x, bias, "a16"), rtol=0, atol=0)


def test_bytes_go_when_their_tiles_exist():
    w = quantized("q8_0", 1024, 1024)
    nbytes = w.blocks.nbytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer = layer_of([w])
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert nbytes <= held < 1.2 * nbytes
    assert peak < 2.4 * nbytes
    assert layer.qweight.numel() >= nbytes


def test_ids_of_experts_on_other_ranks_add_nothing():
    layer, shards, weights = torch.nn.Module(), [], []
    for seed in range(3):
        w = quantized("q8_0", 1024, 256, seed)
        weights.append(qgemm.Tensor(w.format, (4, 256, 256), w.blocks.reshape(4, 256, -1)))
        data = torch.from_numpy(w.blocks.view("u1").reshape(4, 256, -1).copy()).cuda()
        shards.append(serving.Shard(w.format, data))
        assert shards[-1].columns == 256
    serving.hold(layer, ("w1", "w3", "w2"), shards)
    x, factors = normal(3, 256, dtype="float16").cuda(), torch.ones(3, 2).cuda()
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32).cuda()
    both = serving.experts(layer, x, ids, factors, "swiglu")
    expected = known_layer(
        on_host(x).astype("float32"), *weights, ids.cpu().numpy(), on_host(factors), "silu", between="float16"
    )
    assert_within(on_host(both), expected, "float16")
    absent = ids.clone()
    absent[:, 1] = -1
    ids[:, 0] = -1
    parts = serving.experts(layer, x, absent, factors, "swiglu") + serving.experts(layer, x, ids, factors, "swiglu")
    check_rms(on_host(parts), on_host(both), "float16")
