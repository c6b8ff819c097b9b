"""Layers cut over two GPUs, whose sums are those of NCCL."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
import ranks
from helpers import ROUNDING, exact, product_bound
from measured_errors import check_rms
from torch_layers import normal, torch, weights

from qgemm.codec.format import float_dtype
from qgemm.torch import ColumnParallelLinear, RowParallelLinear

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU; layers are cut over two")
M = (1, 300)


def cut(kind, w, bias=None):
    return kind.from_tensor(w, bias, whole=True).to("cuda")


def products(rank, world):
    """Within the bounds of the parts of a sum, each rounded, the sum and that with the bias, too; the same bits on
    both."""
    for name in ("q4_0", "q4_k"):
        w, bias = weights(name, 1000, 4), normal(1000, seed=1)
        columns, rows = (cut(kind, w, bias) for kind in (ColumnParallelLinear, RowParallelLinear))
        shards = [w.shard(r, world, 1) for r in range(world)]
        for dtype, m in product(("float16", "bfloat16"), M):
            x = normal(m, w.shape[1], dtype=dtype, seed=2)
            values, kind = x.double().numpy(), float_dtype(dtype)
            parts = [(values[:, part], shard) for part, shard in zip(rows.parts, shards, strict=True)]
            size = sum(np.abs(exact(*part)) for part in parts) + np.abs(bias.double().numpy())
            want = exact(values, w) + bias.double().numpy()
            bounds = product_bound(values, w, kind), sum(product_bound(*part, kind) for part in parts)
            for layer, bound in zip((columns, rows), bounds, strict=True):
                y = layer(x.cuda()).cpu()
                rounded = 4 * ROUNDING[dtype] * (size + bound)
                assert (np.abs(y.double().numpy() - want) <= bound + rounded).all(), (name, dtype, m)
                check_rms(y.double().numpy(), want, dtype, 6)  # parts and their sum are rounded as well
                outputs = [None] * world
                torch.distributed.all_gather_object(outputs, y.view(torch.uint8).numpy().tobytes())
                assert len(set(outputs)) == 1


def graphs(rank, world):
    """Every replay of a graph that captured the collectives gives the outputs of the calls."""
    w = weights("q4_0", 1024, 4)
    pair = cut(ColumnParallelLinear, w), cut(RowParallelLinear, w)
    x = normal(4, w.shape[1], dtype="float16").cuda()
    want = [layer(x) for layer in pair]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [layer(x) for layer in pair]
    for _ in range(20):
        for y in captured:
            y.fill_(float("nan"))
        graph.replay()
        for y, expected in zip(captured, want, strict=True):
            assert torch.equal(y, expected)


@needs_two
@pytest.mark.parametrize("function", [products, graphs], ids=lambda function: function.__name__)
def test_two_gpus(function, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", os.environ.get("NCCL_NVLS_ENABLE", "0"))
    ranks.run(2, function, 2, backend="nccl")
