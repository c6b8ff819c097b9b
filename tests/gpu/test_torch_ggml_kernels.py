"""The five names of ggml-org/ggml-quantization on the GPU, as transformers' layers of blocks call them."""

from __future__ import annotations

import numpy as np
import pytest
from experts import random_experts
from helpers import random_tensor
from torch_layers import assert_gpu_product, torch

import qgemm
from qgemm.torch import ggml_kernels as kernels

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

N, K = 200, 512


def parameter(w):
    raw = torch.from_numpy(np.ascontiguousarray(w.blocks).view(np.uint8).reshape(*w.shape[:-1], -1).copy())
    return torch.nn.Parameter(raw.cuda(), requires_grad=False)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "iq2_xs"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_linear_layer_of_blocks(name, dtype):
    """Slices are decoded before the weight becomes tiles, which few rows make it, and after that."""
    w = random_tensor(qgemm.FORMATS[name], N, K, np.random.default_rng(0))
    weight, number, dense = parameter(w), w.format.ggml_type, torch.from_numpy(w.dequantize()).to(dtype)

    def check_slices():
        for rows in (slice(0, N), slice(37, 150)):
            part = weight[rows]
            assert torch.equal(kernels.dequantize(part, number, len(part), K, dtype).cpu(), dense[rows])

    check_slices()
    for m in (1, 8):
        x = torch.randn(m, K, device="cuda").to(dtype)
        y = kernels.mul_mat_vec(weight, x, number, N)
        assert y.dtype is dtype
        assert_gpu_product(y, x, w)
    assert weight.dim() == 1
    check_slices()
    index = torch.tensor([199, 0, 63, 64], device="cuda")
    assert torch.equal(kernels.get_rows(weight, index, number, K, dtype).cpu(), dense[index.cpu()])


def test_experts_and_a_graph():
    w = random_experts(qgemm.FORMATS["q4_k"], 5, 64, K, np.random.default_rng(1))
    blocks, number = parameter(w), w.format.ggml_type
    x, ids = torch.randn(3, K, device="cuda"), torch.tensor([[0, 4], [2, 1], [3, 3]], device="cuda", dtype=torch.int32)
    y = kernels.mul_mat_id(blocks, x, ids, number, 64)
    for token, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            assert_gpu_product(y[token, slot], x[token], w[expert])
    matrix = random_tensor(qgemm.FORMATS["q4_k"], N, K, np.random.default_rng(2))
    weight, graph = parameter(matrix), torch.cuda.CUDAGraph()
    for _ in range(3):
        want = kernels.mul_mat_vec(weight, x, matrix.format.ggml_type, N)
    with torch.cuda.graph(graph):
        y = kernels.mul_mat_vec(weight, x, matrix.format.ggml_type, N)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


@pytest.mark.filterwarnings("ignore")
def test_the_layer_of_transformers():
    utils = pytest.importorskip("transformers.integrations.gguf.utils", reason="transformers 5.24 is not installed")
    if not hasattr(utils, "GgufLinear"):
        pytest.skip("this transformers has no layers of blocks")
    w = random_tensor(qgemm.FORMATS["q4_k"], N, K, np.random.default_rng(3))
    layer = utils.GgufLinear(K, N, w.format.ggml_type)
    layer.weight = parameter(w)
    with kernels.install(), torch.no_grad():
        for m in (20, 1, 20):
            x = torch.randn(m, K, device="cuda")
            assert_gpu_product(layer(x), x, w)
