"""Arrays of torch alone on the GPU, with CuPy or without: uploads, bytes, encoders, every slow path of a product.

QGEMM_WITHOUT_CUPY=1 hides CuPy from all tests; those of tests/gpu/test_torch*.py need torch alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from experts import random_experts
from gates import gated_product
from helpers import expected_on_gpu, random_tensor
from torch_layers import assert_gpu_product, on_host, torch

import qgemm

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

K, N = 512, 200
FORMATS = [qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "iq2_xs", "f16", "bf16", "f32")]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def weights(fmt: qgemm.Format, seed: int = 0) -> qgemm.Tensor:
    return random_tensor(fmt, N, K, np.random.default_rng(seed))


def normal(*shape, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to("cuda", dtype)


def assert_gated(y, x, w):
    """y is silu(x @ w.T) * (x @ w.T)."""
    expected = expected_on_gpu(on_host(x), w)
    gated_product("silu", expected, expected).check(on_host(y))


@each_format
@pytest.mark.parametrize("flat", [False, True])
def test_bytes_of_a_tensor_become_weights(fmt, flat):
    """Those of a matrix and of experts, on the stream of torch, and back to the host."""
    w = weights(fmt)
    raw = torch.from_numpy(np.ascontiguousarray(w.blocks).view(np.uint8).reshape(N, -1).copy()).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copied = torch.zeros_like(raw)
        torch.cuda._sleep(20_000_000)
        copied.copy_(raw)
        packed = qgemm.Tensor.from_bytes(copied.reshape(-1) if flat else copied, fmt.name, (N, K), "a")
    stream.synchronize()  # floats stay where the stream has copied them
    assert (packed.format, packed.shape, packed.name) == (fmt, (N, K), "a")
    assert packed.to_host().blocks.tobytes() == w.blocks.tobytes()
    x = normal(3, K)
    assert_gpu_product(qgemm.matmul(x, packed), x, w)
    if not fmt.plain:
        experts = qgemm.Tensor.from_bytes(raw.reshape(2, N // 2, -1), fmt, (2, N // 2, K))
        assert experts.to_host().blocks.tobytes() == w.blocks.tobytes()


@each_format
def test_weights_go_to_the_gpu_and_back(fmt):
    w = weights(fmt)
    packed = w.to_device()
    assert packed.to_host().blocks.tobytes() == w.blocks.tobytes()
    for dtype in ("float32", "float16", "float64"):
        decoded = packed.dequantize(dtype)
        values = decoded.cpu().numpy() if isinstance(decoded, torch.Tensor) else decoded.get()
        np.testing.assert_array_equal(values, w.dequantize(dtype))
    experts = random_experts(fmt, 3, 64, 256, np.random.default_rng(1))
    assert experts.to_device().to_host().blocks.tobytes() == experts.blocks.tobytes()


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "kbit4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_are_encoded_as_on_the_host(name, dtype):
    x = normal(64, 512, dtype=torch.float32).to(dtype)
    packed = qgemm.quantize(x, name)
    want = qgemm.quantize(x.float().cpu().numpy(), name)
    assert packed.to_host().blocks.tobytes() == want.blocks.tobytes()
    with pytest.raises(qgemm.QuantizeError):
        qgemm.quantize(x * float("nan"), name)


def test_an_importance_of_either_device():
    x, importance = normal(64, 512, dtype=torch.float32), torch.rand(512) + 0.5
    want = qgemm.quantize(x.cpu().numpy(), "q4_k", imatrix=importance.numpy()).blocks.tobytes()
    for array in (importance.numpy(), importance.cuda()):
        assert qgemm.quantize(x, "q4_k", imatrix=array).to_host().blocks.tobytes() == want
    with pytest.raises(qgemm.UnsupportedError, match="negative or not finite"):
        qgemm.quantize(x, "q4_k", imatrix=-importance.cuda())


@each_format
@pytest.mark.parametrize("m", [1, 20, 300])
def test_products_of_all_types_and_layouts(fmt, m):
    """float64 and float32 x, out in other types and with gaps, an epilogue: by cuBLAS as well."""
    w = weights(fmt)
    packed = w.to_device()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x, bias, residual = normal(m, K, dtype=dtype), normal(N, dtype=dtype), normal(m, N)
        assert_gpu_product(qgemm.matmul(x, packed), x, w)
        assert_gpu_product(qgemm.matmul(x, packed, bias=bias, residual=residual), x, w, bias, residual)
        wide = torch.full((m, 2 * N), 7.0, device="cuda", dtype=torch.float64)
        qgemm.matmul(x, packed, out=wide[:, ::2])
        assert_gpu_product(wide[:, ::2], x, w)
        assert (wide[:, 1::2] == 7).all()
        assert_gated(qgemm.gated(x, packed, packed), x, w)


@pytest.mark.parametrize("m", [3, 300])
def test_a_graph_of_plain_weights_and_float32(m):
    """cuBLAS works in scratch memory that a graph keeps."""
    packed, x = weights(qgemm.FORMATS["f16"]).to_device(), normal(m, K, dtype=torch.float32)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        want = qgemm.matmul(x, packed).clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = qgemm.matmul(x, packed)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, want)


def test_prepared_activations_and_kernels():
    packed = weights(FORMATS[0]).to_device()
    x = normal(5, K, dtype=torch.float64)
    prepared = qgemm.quantize_activations(x)
    y = qgemm.matmul(prepared, packed)
    assert type(y) is torch.Tensor
    assert torch.equal(y, qgemm.matmul(x.float(), packed, "a8"))
    assert qgemm.prepare(packed, m=[1, 40], progress=False).kernels > 0


def test_a_scaled_and_a_reordered_matrix():
    w, x = weights(FORMATS[0]), normal(4, K)
    columns = np.random.default_rng(0).permutation(K).astype(np.int32)
    for view in (qgemm.Scaled(w, 0.5), qgemm.Reordered(w, columns)):
        there = view.to_device()
        assert_gpu_product(qgemm.matmul(x, there), x, view)
        assert_gated(qgemm.gated(x, there, there), x, view)


def test_a_program_with_torch_alone():
    """CuPy, ml_dtypes and NVIDIA's Python packages cannot be imported: a product works, in a new thread too."""
    program = """
import sys, threading
sys.modules["cupy"] = sys.modules["cuda.bindings"] = sys.modules["cuda.pathfinder"] = None
sys.modules["ml_dtypes"] = None
import numpy as np, qgemm, torch
w = qgemm.quantize(np.eye(256, dtype=np.float32), "q8_0").to_device()
def multiply():
    x = torch.arange(256, device="cuda").half().reshape(1, -1)
    for dtype in (torch.float16, torch.bfloat16):
        y = qgemm.matmul(x.to(dtype), w, dtype=dtype)
        assert y.dtype is dtype and torch.allclose(y.float(), x.float(), rtol=1e-2)
thread = threading.Thread(target=multiply); thread.start(); thread.join(); multiply()
assert "torch" in qgemm.backends()["cuda"].facts
print("done")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
