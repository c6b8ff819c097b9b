"""Layers of serving engines on the GPU: bytes become tiles, several formats give one output, also in CUDA graphs."""

from __future__ import annotations

import pytest
from torch_layers import normal, torch

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
    dense = torch.cat([torch.from_numpy(w.dequantize()) for w in tensors]).cuda()
    expected = x.double() @ dense.double().T + bias.double()
    y = serving.linear(layer, x, bias, "a16")
    scale = float(expected.abs().max())
    torch.testing.assert_close(y.double(), expected, rtol=0.01, atol=0.01 * scale)
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
    layer, shards = torch.nn.Module(), []
    for seed, shape in enumerate(((4, 256, 256),) * 3):
        w = quantized("q8_0", 1024, 256, seed)
        data = torch.from_numpy(w.blocks.view("u1").reshape(4, 256, -1).copy()).cuda()
        shards.append(serving.Shard(w.format, data))
        assert shards[-1].columns == shape[2]
    serving.hold(layer, ("w1", "w3", "w2"), shards)
    x, factors = normal(3, 256, dtype="float16").cuda(), torch.ones(3, 2).cuda()
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32).cuda()
    both = serving.experts(layer, x, ids, factors, "swiglu")
    absent = ids.clone()
    absent[:, 1] = -1
    ids[:, 0] = -1
    parts = serving.experts(layer, x, absent, factors, "swiglu") + serving.experts(layer, x, ids, factors, "swiglu")
    torch.testing.assert_close(parts.float(), both.float(), rtol=0.02, atol=0.02 * float(both.abs().max()))
