"""First mistakes of a user: names with a typo, arguments in the wrong place, operators; each names the next step."""

from __future__ import annotations

import pickle
import re
import sys
from types import SimpleNamespace

import bootstrap
import driver_like
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from helpers import EXCERPT

import qgemm
from qgemm.arguments import PreparedActivations
from qgemm.cuda import devices
from qgemm.cuda.driver import device
from qgemm.cuda.tensor import DeviceTensor
from qgemm.formats import GGML_TYPES
from qgemm.version import pip_install


def test_a_tensor_name_with_a_typo_names_near_ones():
    with qgemm.open(EXCERPT) as model:
        with pytest.raises(
            KeyError, match=r"there is no tensor 'blk.2.atn_q.q4_0'; close are blk\.2\.attn_q\.q4_0, "
        ) as e:
            model["blk.2.atn_q.q4_0"]
        assert str(e.value).startswith(str(EXCERPT))  # no quotes around, as KeyError alone puts them
        assert "close are" in repr(e.value)
        assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
        with pytest.raises(qgemm.NameNotFoundError, match=r"'BLK.2.ATTN_Q.Q4_0'; close are blk.2.attn_q.q4_0"):
            model["BLK.2.ATTN_Q.Q4_0"]
        with pytest.raises(qgemm.QgemmError, match=r"no tensor 'a\\x1b\[2J'; `qgemm info` lists the names"):
            model["a\x1b[2J"]
        assert model.get("blk.2.atn_q.q4_0") is None
        with pytest.raises(KeyError, match=r"there is no key 'general\.nam'; close are general\.name"):
            model.metadata["general.nam"]
        assert model.metadata.get("general.nam", 7) == 7
        assert "blk.2.atn_q.q4_0" not in model


# ---------------------------------------------------------------- arguments in the wrong place


class OnCuda:
    """What tells an array on a GPU from others."""

    shape, dtype = (2, 64), "float32"

    def __dlpack_device__(self):
        return 2, 0


X = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
W = qgemm.quantize(np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32), "q4_0")
EXPERTS = qgemm.quantize(np.ones((3, 5, 64), np.float32), "q8_0")


@pytest.mark.parametrize(
    ("w", "came"),
    [
        (np.ones((5, 64)), r"numpy\.ndarray of float64 \(5, 64\)"),
        ([[1.0] * 64], "list"),
        (None, "NoneType"),
        ("blk.0.attn_q.weight", "str"),
        (OnCuda(), r".*OnCuda of float32 \(2, 64\)"),
    ],
)
def test_weights_that_are_not_packed(w, came):
    """On a machine without a GPU none is spoken of."""
    for call in (lambda: qgemm.matmul(X, w), lambda: qgemm.matmul_many(X, [W, w])):
        with pytest.raises(TypeError, match=f"^w must be a Tensor or DeviceTensor of packed weights, got {came}; "):
            call()


def test_swapped_arguments():
    came = r"x is <Tensor Q4_0 5 x 64>, w numpy\.ndarray of float32 \(2, 64\); matmul\(x, w\) is x @ w\.T"
    with pytest.raises(TypeError, match=came):
        qgemm.matmul(W, X)
    with pytest.raises(TypeError, match=r"w is <transposed <Tensor Q4_0 5 x 64>>: write x @ tensor\.T, or"):
        qgemm.matmul(X, W.T)


def test_a_device_without_cupy_says_which_extra(monkeypatch):
    """The error names the extra for an array on a device too; weights of the host name the missing part."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(device, "driver_cuda", lambda: (13, 0))
    missing = "neither CuPy nor a torch with CUDA is installed"
    extra = rf"needs a GPU and CuPy or torch: {missing}: pip install '[\w-]+\[cuda13\]'$"
    with pytest.raises(qgemm.UnsupportedError, match=rf"^to_device\(\) {extra}"):
        W.to_device()
    for use in (lambda: qgemm.quantize(OnCuda(), "q4_0"), lambda: qgemm.quantize_activations(OnCuda())):
        with pytest.raises(qgemm.UnsupportedError, match=f"^an array on a CUDA device {extra}"):
            use()
    with pytest.raises(qgemm.UnsupportedError, match=r"^x is on a CUDA device, w on the host.*multiply by w\.to_d"):
        qgemm.matmul(OnCuda(), W)
    with pytest.raises(qgemm.UnsupportedError, match=rf"^to_device\(\) {extra}"):
        EXPERTS.to_device()
    opaque = GGML_TYPES[GGMLQuantizationType.Q8_K]
    with pytest.raises(qgemm.UnsupportedError, match="Q8_K has no decoder"):
        qgemm.Tensor(opaque, (1, 256), np.zeros((1, 1), opaque.dtype)).to_device()


@pytest.mark.parametrize("driver", [None, (11, 8), (12, 0), (12, 9), (13, 0), (14, 1)])
def test_the_extra_is_that_of_the_driver(driver, monkeypatch):
    """As tools/bootstrap.py chooses it; without a driver, or with an old one, CuPy is not the missing part."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(device, "driver_cuda", lambda: driver)
    status, extra = device.status(), bootstrap.choose_cuda(driver, kept_out=False)
    assert status.available is False
    if extra == "nvrtc":
        assert re.match("no NVIDIA driver was found|the NVIDIA driver runs CUDA 11.8, and", status.detail)
    else:
        assert status.detail == f"neither CuPy nor a torch with CUDA is installed: {pip_install(extra)}"


def test_without_a_driver_cupy_is_not_to_blame(monkeypatch):
    def fails():
        raise RuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setitem(sys.modules, "cupy", cupy_of(fails))

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(devices, "driver", missing)
    assert device.driver_cuda() is None
    assert device.status().detail == "no usable NVIDIA GPU: no NVIDIA driver was found (libcuda.so.1)"
    monkeypatch.setattr(device, "driver_cuda", lambda: (12, 4))
    assert device.status().detail.endswith("cudaErrorInsufficientDriver (the driver runs CUDA 12.4)")


def cupy_of(count):
    """CuPy as far as its state shows."""
    return SimpleNamespace(__version__="14", cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count)))


@pytest.mark.parametrize("library", ["CuPy", "torch"])
def test_the_state_names_the_library_of_arrays(library, monkeypatch):
    """CuPy, or torch alone; one built for the CPU is none."""
    monkeypatch.setitem(sys.modules, "cupy", cupy_of(lambda: 2) if library == "CuPy" else None)
    cuda = SimpleNamespace(init=lambda: None, device_count=lambda: 2)
    torch = SimpleNamespace(__version__="2.11", version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(device, "driver_cuda", lambda: (13, 1))
    monkeypatch.setattr(device.nvrtc, "nvrtc_version", lambda: (13, 0))
    driver_like.install(monkeypatch)
    status = device.status()
    version = {"CuPy": "14", "torch": "2.11"}[library]
    assert status.detail == f"2 x Stand-in (sm_90a), {library} {version}, NVRTC 13.0"
    facts = {"device": "Stand-in", "arch": "sm_90a", "driver_cuda": "13.1", library.lower(): version, "nvrtc": "13.0"}
    assert status == qgemm.Status(True, status.detail, facts)
    reason = device.reason_without_cupy(status, "timing a GPU")
    extra = "timing a GPU needs CuPy, torch alone multiplies: pip install 'gguf-matmul[cuda13]'"
    assert reason == ("" if library == "CuPy" else extra)
    torch.version.cuda = None
    assert device.status().available is (library == "CuPy")
    assert device.reason_without_cupy(qgemm.Status(False, "no GPU", {}), "timing") == "no GPU"


def on_device(shape=(5, 64)) -> DeviceTensor:
    """A DeviceTensor as far as one goes without a GPU."""
    tensor = DeviceTensor.__new__(DeviceTensor)
    tensor.format, tensor.shape, tensor.name = W.format, shape, "w"
    tensor.device = 0
    return tensor


def test_weights_on_a_device_and_x_on_the_host():
    for weights in ([on_device()], [on_device(), W], [W, on_device()]):
        with pytest.raises(qgemm.UnsupportedError, match=r"^w is on a CUDA device.*x is not \(numpy\.ndarray of f"):
            qgemm.matmul_many(X, weights)


@pytest.mark.parametrize("x", [OnCuda(), PreparedActivations()], ids=["array", "prepared"])
def test_x_on_a_device(x):
    with pytest.raises(qgemm.UnsupportedError, match=r"^x is on a CUDA device, w on the host \(<Tensor Q4_0 5 x 64>\)"):
        qgemm.matmul(x, W)
    with pytest.raises(TypeError, match=r"^w must be a Tensor or DeviceTensor of packed weights, got numpy\.ndarray"):
        qgemm.matmul(x, X)


# ---------------------------------------------------------------- operators and attributes of arrays


@pytest.mark.parametrize("x", [X, X[0], np.ones((2, 3, 64)), X.astype(np.float16), X.tolist()], ids=range(5))
def test_x_at_w_transposed_is_matmul(x):
    np.testing.assert_array_equal(x @ W.T, qgemm.matmul(x, W))


def test_prepared_activations_at_w_transposed():
    np.testing.assert_array_equal(qgemm.quantize_activations(X) @ W.T, qgemm.matmul(X, W, "a8"))


@pytest.mark.parametrize("w", [W, on_device()], ids=["host", "device"])
def test_what_other_operators_mean_is_said(w):
    name = re.escape(repr(w))
    for call in (lambda: X @ w, lambda: X.tolist() @ w):
        with pytest.raises(TypeError, match=rf"^{name} has rows along K: write x @ tensor\.T, or qgemm\.matmul"):
            call()
    with pytest.raises(TypeError, match=rf"^{name} is the right operand of a product: write x @ tensor\.T"):
        w @ X.T
    with pytest.raises(TypeError, match=rf"<transposed {name}> is the right operand of a product: write x @ tensor\.T"):
        w.T @ X.T
    for call in (lambda: np.asarray(w), lambda: X * w, lambda: w * 2, lambda: 1 - w, lambda: w / 2, lambda: np.sum(w)):
        with pytest.raises(TypeError, match=r"not inflated silently: x @ tensor\.T .*tensor\.dequantize\(\) gives"):
            call()
    for call in (lambda: np.dot(X, w.T), lambda: np.asarray(w.T)):
        with pytest.raises(TypeError, match=r"is no array, .*tensor\.dequantize\(\)\.T is one"):
            call()


@pytest.mark.parametrize("w", [W, on_device()], ids=["host", "device"])
def test_attributes_of_arrays(w):
    assert (w.ndim, w.bpw, w.T.T, w.T.shape, w.T.ndim) == (2, 4.5, w, (64, 5), 2)
    assert not hasattr(w, "dtype")  # libraries would take it for an array
    with pytest.raises(AttributeError, match=r"has no dtype: its weights are packed .*tensor\.dequantize\(dtype\)"):
        w.dtype  # noqa: B018


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: qgemm.matmul(X, W, wrong),
        lambda wrong: qgemm.matmul_many(X, [W], wrong),
        lambda wrong: qgemm.moe_matmul(X, EXPERTS, np.zeros((len(X), 1), np.int32), wrong),
    ],
    ids=["matmul", "matmul_many", "moe_matmul"],
)
def test_a_bias_in_place_of_the_activation_is_named(call):
    for wrong in (np.ones(5), ["a8"]):
        with pytest.raises(
            qgemm.UnsupportedError, match=f"got {type(wrong).__name__}; a bias, residual or out has its"
        ):
            call(wrong)


def test_a_bias_in_place_of_a_function_is_named():
    with pytest.raises(qgemm.UnsupportedError, match=r"function is 'silu', .*, got array"):
        qgemm.gated(X, W, W, np.ones(5))


def test_only_matrices_multiply():
    with pytest.raises(qgemm.ShapeError, match=r"a matrix \(N, K\).*index its leading axes first"):
        X @ EXPERTS.T
    np.testing.assert_array_equal(X @ EXPERTS[1].T, qgemm.matmul(X, EXPERTS[1]))
