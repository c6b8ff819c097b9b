"""The five names of ggml-org/ggml-quantization by qgemm: results, compiled code, the folder for LOCAL_KERNELS."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from torch_layers import assert_product, assert_same, normal, torch, weights

import qgemm
from qgemm.torch import ggml_kernels as kernels

FORMATS = ("q4_0", "q8_0", "q4_k", "q6_k", "iq2_xs")
each_format = pytest.mark.parametrize("name", FORMATS)


def packed(name, n=40):
    """Weights, their bytes as a parameter as transformers' layers have it, and ggml's number of their type."""
    w = weights(name, n)
    raw = torch.frombuffer(bytearray(w.blocks.tobytes()), dtype=torch.uint8).reshape(n, -1)
    return w, torch.nn.Parameter(raw, requires_grad=False), w.format.ggml_type


@each_format
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_rows_and_decoded_weights(name, dtype):
    w, weight, number = packed(name)
    (n, k), kind, dense = w.shape, getattr(torch, dtype), torch.from_numpy(w.dequantize())
    for m in (1, 8, 20):
        x = normal(m, k, dtype=dtype)
        y = kernels.mul_mat_vec(weight, x, number, n)
        assert y.dtype is kind
        assert_product(y, x, w)
    assert_same(kernels.dequantize(weight, number, n, k, kind), dense.to(kind))
    assert_same(kernels.dequantize(weight[3:11], number, 8, k, kind), dense[3:11].to(kind))
    indices = torch.tensor([39, 0, 7, 7])
    assert_same(kernels.get_rows(weight, indices, number, k, kind), dense[indices].to(kind))
    assert tuple(weight.shape) == (n, w.nbytes // n)


def test_experts():
    w, weight, number = packed("q4_k", 3 * 8)
    ids, x = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), normal(2, w.shape[1])
    y = kernels.mul_mat_id(weight.reshape(3, 8, -1), x, ids, number, 8)
    for token, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            assert_product(y[token, slot], x[token], w[8 * expert : 8 * expert + 8])


def test_types():
    """All that have a decoder and tiles; numbers of floats are no blocks."""
    assert {qgemm.FORMATS[name].ggml_type for name in FORMATS} < kernels.GEMV_TYPES
    assert not {qgemm.FORMATS[name].ggml_type for name in ("f32", "f16", "bf16")} & kernels.GEMV_TYPES
    _, weight, _ = packed("q4_0")
    for call in (
        lambda: kernels.mul_mat_vec(weight, normal(1, 128), 9999, 40),
        lambda: kernels.dequantize(weight, 9999, 40, 128, torch.float32),
        lambda: kernels.get_rows(weight, torch.tensor([0]), 9999, 128, torch.float32),
    ):
        with pytest.raises(qgemm.UnsupportedError, match="no format is ggml's type 9999"):
            call()
    with pytest.raises(qgemm.UnsupportedError, match="the packed weight"):
        kernels.mul_mat_vec(weight, normal(1, 128), 2, 41)


@pytest.mark.filterwarnings("ignore")
def test_products_and_rows_compile_whole():
    w, weight, number = packed("q4_k")

    def model(index, x):
        rows = kernels.get_rows(weight, index, number, w.shape[1], torch.float32)
        return kernels.mul_mat_vec(weight, rows + x, number, w.shape[0])

    index, x = torch.tensor([1, 5]), normal(2, w.shape[1])
    assert_same(torch.compile(model, fullgraph=True, backend="aot_eager")(index, x), model(index, x))


def test_the_folder_is_a_repository_of_the_package_kernels(tmp_path):
    """A folder for each device, with the fields that kernels requires, and a module with the five names."""
    command = [sys.executable, "-m", "qgemm.torch.ggml_kernels", str(tmp_path / "local")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"LOCAL_KERNELS=ggml-org/ggml-quantization={tmp_path}/local\n")
    for device in ("cuda", "cpu"):
        build = tmp_path / "local" / "build" / f"torch-{device}"
        metadata = json.loads((build / "metadata.json").read_text())
        assert metadata["backend"] == {"type": device}
        assert {"id", "name", "version", "python-depends"} <= metadata.keys()
        spec = importlib.util.spec_from_file_location(f"local_{device}", build / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in ("mul_mat_vec", "dequantize", "get_rows", "mul_mat_id", "GEMV_TYPES", "MAX_GEMV_ROWS"):
            assert getattr(module, name) is getattr(kernels, name)
    done = subprocess.run(command[:-1], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: python -m qgemm.torch.ggml_kernels DIR\n")


def test_the_package_kernels_loads_the_folder(tmp_path, monkeypatch):
    package = pytest.importorskip("kernels.load", reason="kernels is not installed")
    repository, _, folder = kernels.write_folder(tmp_path).partition("=")
    monkeypatch.setenv("LOCAL_KERNELS", f"{repository}={folder}")
    module = package.get_kernel(repository, version=1)
    assert module.mul_mat_vec is kernels.mul_mat_vec
