"""Tensors of torch on the host, by tests/torch_like.py and, where it is installed, by torch itself."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch_like

import qgemm

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 64)).astype(np.float32)
W = qgemm.quantize(RNG.standard_normal((5, 64)).astype(np.float32), "q4_0")
FLOATS = ("float16", "bfloat16", "float32", "float64")
each_type = pytest.mark.parametrize("name", FLOATS)
each_activation = pytest.mark.parametrize("activation", ["a16", "a8"])


@pytest.fixture(params=["stand-in", "torch"])
def torch(request, monkeypatch):
    return pytest.importorskip("torch") if request.param == "torch" else torch_like.install(monkeypatch)


@pytest.fixture(params=["with ml_dtypes", "without"])
def ml_dtypes(request, monkeypatch):
    """torch's users need not have the package, which gives NumPy its bfloat16."""
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)


def tensor(torch, array, name="float32"):
    return torch.from_numpy(array.copy()).to(getattr(torch, name))


def values(y) -> np.ndarray:
    """The values of a tensor of any float type."""
    return y.detach().double().numpy()


@each_type
@each_activation
def test_x_of_every_type(torch, ml_dtypes, name, activation):
    """y is that of the values in float32, a float32 tensor."""
    x = tensor(torch, X, name)
    y = qgemm.matmul(x, W, activation)
    assert isinstance(y, torch.Tensor)
    assert y.dtype is torch.float32
    np.testing.assert_array_equal(y.numpy(), qgemm.matmul(values(x).astype(np.float32), W, activation))


@each_type
@pytest.mark.parametrize("named", [False, True], ids=["torch.dtype", "name"])
def test_dtype_of_y(torch, ml_dtypes, name, named):
    want = tensor(torch, qgemm.matmul(X, W), name)
    kind = name if named else getattr(torch, name)
    (y,) = qgemm.matmul_many(tensor(torch, X), [W], dtype=kind)
    assert y.dtype is getattr(torch, name)
    assert torch.equal(y, want)
    y = qgemm.matmul(tensor(torch, X), W, bias=tensor(torch, X[0, :5], name), dtype=kind)
    assert y.dtype is getattr(torch, name)


@each_type
def test_out_of_every_type(torch, ml_dtypes, name):
    """Strided too; the tensor that shares its memory is written."""
    x, want = tensor(torch, X), tensor(torch, qgemm.matmul(X, W), name)
    whole = tensor(torch, np.full((3, 10), 7), name)
    out = whole[:, ::2]
    for dtype in (None, getattr(torch, name), name):
        assert qgemm.matmul(x, W, out=out, dtype=dtype) is out
        assert torch.equal(out, want)
        assert (values(whole)[:, 1::2] == 7).all()
    other = "float16" if name != "float16" else "float32"
    with pytest.raises(qgemm.UnsupportedError, match=f"out is {name}, dtype asks for {other}; give one"):
        qgemm.matmul(x, W, out=out, dtype=getattr(torch, other))
    with pytest.raises(qgemm.ShapeError, match=r"out has shape \(3, 10\), y has \(3, 5\)"):
        qgemm.matmul(x, W, out=whole)


@each_type
def test_y_onto_its_residual(torch, ml_dtypes, name):
    residual = tensor(torch, X[:, :5], name)
    want = tensor(torch, qgemm.matmul(X, W) + values(residual).astype(np.float32), name)
    assert qgemm.matmul(tensor(torch, X), W, residual=residual, out=residual) is residual
    assert torch.equal(residual, want)


@each_type
def test_y_onto_x(torch, name):
    """Square weights; x is read before it is written, and in `matmul_many` for all products."""
    square = qgemm.quantize(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32), "q8_0")
    x, other = tensor(torch, X, name), tensor(torch, X, name)
    want = qgemm.matmul(x, square, dtype=getattr(torch, name))
    qgemm.matmul_many(x, [square, square], outs=[x, other])
    assert torch.equal(x, want)
    assert torch.equal(other, want)


def test_what_requires_grad_is_detached(torch):
    """With no copy; a Parameter as well, whose class is not in the module torch."""
    x, bias = tensor(torch, X).requires_grad_(), torch.nn.Parameter(tensor(torch, X[0, :5]))
    y = qgemm.matmul(x, W, bias=bias, residual=torch.nn.Parameter(tensor(torch, X[:, :5])))
    assert not y.requires_grad
    np.testing.assert_array_equal(y.numpy(), qgemm.matmul(X, W, bias=X[0, :5], residual=X[:, :5]))
    parameter = torch.nn.Parameter(tensor(torch, X))
    assert type(qgemm.matmul(parameter, W)) is torch.Tensor
    assert torch.equal(parameter @ W.T, qgemm.matmul(tensor(torch, X), W))
    packed = qgemm.quantize(torch.nn.Parameter(tensor(torch, X, "bfloat16")), "q8_0")
    assert packed.blocks.tobytes() == qgemm.quantize(values(tensor(torch, X, "bfloat16")), "q8_0").blocks.tobytes()
    assert torch.equal(qgemm.matmul(parameter, W, "a8"), qgemm.matmul(tensor(torch, X), W, "a8"))
    assert qgemm.quantize_activations(parameter).blocks.tobytes() == qgemm.quantize_activations(X).blocks.tobytes()


def test_nothing_is_copied_that_numpy_knows(torch, monkeypatch):
    x, seen = tensor(torch, X).requires_grad_(), []
    monkeypatch.setattr("qgemm.cpu.reference.multiply_a16", lambda x, w, y: seen.append((x.ctypes.data, y.ctypes.data)))
    out = tensor(torch, np.zeros((3, 5), np.float32))
    qgemm.matmul(x, W, out=out)
    assert seen == [(x.data_ptr(), out.data_ptr())]


def test_out_that_requires_grad_is_refused(torch):
    """As torch itself refuses it: a gradient would be wrong."""
    out = tensor(torch, np.zeros((3, 5), np.float32)).requires_grad_()
    with pytest.raises(qgemm.UnsupportedError, match=r"out requires grad, .*give out\.detach\(\)"):
        qgemm.matmul(tensor(torch, X), W, out=out)
    detached = out.detach()
    assert qgemm.matmul(X, W, out=detached) is detached
    np.testing.assert_array_equal(values(out), qgemm.matmul(X, W))


def test_types_that_are_no_floats(torch):
    x = tensor(torch, X)
    with pytest.raises(TypeError, match="dtype must be float16, float32, float64 or bfloat16, got int32"):
        qgemm.matmul(x, W, dtype=torch.int32)
    with pytest.raises(TypeError, match="x must be of float16, float32, float64 or bfloat16, got int32"):
        qgemm.matmul(x.to(torch.int32), W)
    with pytest.raises(TypeError, match="out must be of float16, float32, float64 or bfloat16, got int32"):
        qgemm.matmul(x, W, out=tensor(torch, np.zeros((3, 5)), "int32"))
    with pytest.raises(TypeError, match=r"w must be .*, got torch\.Tensor of torch\.float32 \(3, 64\)"):
        qgemm.matmul(x, x)


def test_dequantize_takes_a_dtype_of_torch(torch):
    """The result is NumPy's: a Tensor knows no other library."""
    np.testing.assert_array_equal(W.dequantize(torch.float16), W.dequantize(np.float16))


def test_numpy_x_and_out_of_torch(torch, ml_dtypes):
    out = tensor(torch, np.zeros((3, 5)), "bfloat16")
    assert qgemm.matmul(X, W, out=out) is out
    assert torch.equal(out, tensor(torch, qgemm.matmul(X, W), "bfloat16"))
