"""ParallelExperts on two and three processes over gloo, beside QExperts in one."""

from __future__ import annotations

import re

import numpy as np
import pytest
import ranks
from experts import known_layer
from helpers import ROUNDING
from measured_errors import check_rms
from torch_layers import torch

import qgemm
from qgemm.routing import GATE_OF
from qgemm.torch import ParallelExperts, QExperts

dist = torch.distributed
E, F, K = 5, 96, 64  # the number of ranks does not divide E
FORMATS = ("q4_0", "mxfp4", "q5_1")


def parts(seed=0):
    """Tensors of gate, up and down, and a bias of each."""
    rng, shapes = np.random.default_rng(seed), ((F, K), (F, K), (K, F))
    tensors = [
        qgemm.quantize(rng.standard_normal((E, *shape), np.float32) / 8, name)
        for name, shape in zip(FORMATS, shapes, strict=True)
    ]
    return tensors, [torch.from_numpy(rng.standard_normal((E, n), np.float32)) for n, _ in shapes]


def inputs(t, dtype):
    rng = np.random.default_rng(t)
    ids = torch.from_numpy(np.stack([rng.permutation(E)[:3] for _ in range(t)]))
    return torch.from_numpy(rng.standard_normal((t, K), np.float32)).to(dtype), ids, torch.rand(t, 3)


def layers(rank, world):
    """Within the bound of a layer in float32, of rounding each part and of their sum; the same bits on all ranks, of
    which each holds its experts alone."""
    tensors, biases = parts()
    whole = QExperts.from_tensors(*tensors, biases)
    module = ParallelExperts.from_tensors(*tensors, biases)
    counts = [None] * world
    dist.all_gather_object(counts, module.num_experts)
    assert sum(counts) == E
    assert module.gate.weight.nbytes * E == whole.gate.weight.nbytes * module.num_experts
    assert f"rank {rank} of {world}: experts {module.part.start} to {module.part.stop} of {E}" in repr(module)
    for name in ("float32", "float16", "bfloat16"):
        for t in (1, 7):
            torch.manual_seed(t)
            x, ids, weights = inputs(t, getattr(torch, name))
            here = (ids >= module.part.start) & (ids < module.part.stop)
            size = whole(x.float(), ids, torch.where(here, weights, 0)).abs().double()
            dist.all_reduce(size)
            y = module(x, ids, weights)
            reference = known_layer(
                x.float().numpy(), *tensors, ids.numpy(), weights.numpy(), GATE_OF["swiglu"],
                [bias.numpy() for bias in biases], in_float=True,
            )  # fmt: skip
            rounded = (world * 2.0**-24 + (world + 1) * ROUNDING[name]) * (size.numpy() + reference.bound)
            assert (np.abs(y.double().numpy() - reference.y) <= reference.bound + rounded + 2.0**-24).all()
            check_rms(y.double().numpy(), reference.y, name, world + 1)
            outputs = [None] * world
            dist.all_gather_object(outputs, y.view(torch.uint8).numpy().tobytes())
            assert len(set(outputs)) == 1
    x, ids, weights = inputs(3, torch.float32)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)(x, ids, weights) if world == 2 else None
        assert compiled is None or torch.equal(compiled, module(x, ids, weights))
    with pytest.raises(IndexError, match=f"ids are 0 to {E}, there are experts 0 to {E - 1}"):
        module(x, torch.tensor([[0, E, 1]] * 3), weights)


def refused(rank, world):
    """On all ranks."""
    tensors, _ = parts()
    few = [tensor[: world - 1] for tensor in tensors]
    shares = "no shares" if world == 2 else f"at most {world - 1} shares"
    with pytest.raises(qgemm.ShapeError, match=re.escape(f"gives {shares}, not {world}")):
        ParallelExperts.from_tensors(*few)
    with pytest.raises(qgemm.ShapeError, match="gate has 5 experts"):
        ParallelExperts.from_tensors(tensors[0], tensors[1][:4], tensors[2])
    with pytest.raises(qgemm.UnsupportedError, match="experts are cut on the host"):
        ParallelExperts.from_tensors(tensors[0][0], *tensors[1:])
    other = parts(1 + (rank == 1))[0]
    broken = qgemm.Tensor(other[0].format, other[0].shape, lambda: 1 / 0) if rank == 1 else other[0]
    with pytest.raises(ZeroDivisionError if rank == 1 else qgemm.RankError, match="division by zero"):
        ParallelExperts.from_tensors(broken, *other[1:])
    with pytest.raises(qgemm.UnsupportedError, match="there is no empty one"):
        ParallelExperts(E, K, F, FORMATS)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("function", [layers, refused], ids=lambda function: function.__name__)
def test_experts_of_several_ranks(function, world):
    ranks.run(world, function, world)
