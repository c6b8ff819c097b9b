"""Fused layers of PyTorch on the GPU: attention and a gated block, eager, in CUDA graphs and compiled."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
from helpers import random_tensor
from measured_errors import check_rms
from torch_layers import on_host, torch

import qgemm
from qgemm.torch import QLinear, fuse, joint, unfuse

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

DTYPES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


class Block(torch.nn.Module):
    """Q, K and V of two formats, and a gated block; its weights are small, so that no y overflows."""

    def __init__(self):
        super().__init__()
        formats = {"q": "q4_k", "k": "q4_k", "v": "q6_k", "gate": "q4_0", "up": "q4_0", "down": "q4_0"}
        for seed, (name, fmt) in enumerate(formats.items()):
            w = random_tensor(qgemm.FORMATS[fmt], 256, 256, np.random.default_rng(seed)).dequantize()
            self.add_module(name, QLinear.from_tensor(qgemm.quantize(w / np.abs(w).max() / 16, fmt)))
        self.act = torch.nn.SiLU()

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


class Gated(Block):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of `matmul_many` and `gated`."""
    counts = Counter()
    for name in ("matmul_many", "gated"):
        original = getattr(joint.products, name)

        def call(*args, original=original, name=name, **named):
            counts[name] += 1
            return original(*args, **named)

        monkeypatch.setattr(joint.products, name, call)
    return counts


def inputs(m, dtype):
    return torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).to("cuda", getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 7, 12, 40, 300])
def test_outputs_are_those_of_single_layers(m, dtype, calls):
    """To within the roundings of both: a shared launch may divide K otherwise, and `gated` rounds once."""
    attention, gated, x = Block().cuda(), Gated().cuda(), inputs(m, dtype)
    for model, name in ((attention, "matmul_many"), (gated, "gated")):
        expected = model(x)
        fuse(model)
        y = model(x)
        assert calls[name] == 1
        for ours, theirs in zip(*(t if isinstance(t, tuple) else (t,) for t in (y, expected)), strict=True):
            assert ours.dtype is theirs.dtype
            assert (ours - theirs).float().abs().max() <= 8 * DTYPES[dtype] * theirs.float().abs().max()
            check_rms(on_host(ours), on_host(theirs), dtype, roundings=8)
        unfuse(model)
        for ours, theirs in zip(*(t if isinstance(t, tuple) else (t,) for t in (model(x), expected)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("m", [1, 12])
@pytest.mark.filterwarnings("ignore")  # torch.compile imports modules that warn
def test_graphs_and_compiled_code(m, calls):
    for kind in (Block, Gated):
        model, x = kind().cuda(), inputs(m, "bfloat16")
        fuse(model)
        with torch.no_grad():
            for _ in range(3):
                expected = model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
            values = x.clone()
            x.zero_()
            graph.replay()
            x.copy_(values)
            graph.replay()
            torch._dynamo.reset()
            compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)(x)
        for results in (y, compiled):
            pairs = zip(*(t if isinstance(t, tuple) else (t,) for t in (results, expected)), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
