"""QLinear on the CPU: products of tensors of every layout and type, gradients, autocast, LoRA, threads, errors."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from helpers import at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_errors import check_rms
from strategies import FORMATS, problems
from torch_layers import DTYPES, LAYOUTS, MATRICES, assert_product, assert_same, laid_out, normal, torch, weights

import qgemm
from qgemm.cuda.planes import Planes
from qgemm.formats import GGML_TYPES
from qgemm.torch import LoRA, QEmbedding, QExperts, QLinear, ops

of_torch_itself = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch calls it internally
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_format = pytest.mark.parametrize("name", [fmt.name for fmt in MATRICES])


@settings(max_examples=80)
@given(fmt=st.sampled_from(FORMATS), dtype=st.sampled_from(DTYPES), bias=st.booleans(), data=st.data())
def test_a_product_is_within_its_bound(fmt, dtype, bias, data):
    values, w = data.draw(problems(fmt))
    x = torch.from_numpy(values).to(getattr(torch, dtype))
    added = normal(w.shape[0], dtype=dtype) if bias else None
    y = QLinear.from_tensor(w, added)(x)
    assert y.dtype is x.dtype
    assert_product(y, x, w, added)


@each_dtype
@each_format
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_product_of_numpy(layout, name, dtype):
    """Bit for bit, as of a contiguous NumPy array of the same values."""
    w = weights(name)
    layer = QLinear.from_tensor(w, normal(w.shape[0], seed=1))
    x = laid_out(normal(2, 3, w.shape[1], dtype=dtype), layout)
    values = np.ascontiguousarray(x.detach().float().numpy())
    want = qgemm.matmul(values, w, bias=layer.bias.numpy())
    y = layer(x)
    assert y.requires_grad == (layout == "parameter")
    assert y.dtype is x.dtype
    assert_same(y, torch.from_numpy(want).to(x.dtype))


@each_dtype
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q6_k"])
def test_a8_is_that_of_numpy(name, dtype):
    w = weights(name)
    x = normal(5, w.shape[1], dtype=dtype)
    y = QLinear.from_tensor(w, activation="a8")(x)
    assert_same(y, torch.from_numpy(qgemm.matmul(x.float().numpy(), w, "a8")).to(x.dtype))


def test_float64_and_no_inputs_at_all():
    w = weights()
    layer = QLinear.from_tensor(w)
    assert layer(normal(2, w.shape[1]).double()).dtype is torch.float64
    assert layer(normal(0, w.shape[1])).shape == (0, 40)
    empty = QLinear.from_tensor(qgemm.Tensor("q4_0", (0, 64), np.empty((0, 2), qgemm.FORMATS["q4_0"].dtype)))
    assert empty(normal(3, 64)).shape == (3, 0)
    without = QLinear.from_tensor(qgemm.Tensor("q4_0", (5, 0), np.empty((5, 0), qgemm.FORMATS["q4_0"].dtype)))
    assert_same(without(normal(3, 0)), torch.zeros(3, 5))


def test_the_weight_is_the_memory_of_the_file(tmp_path):
    """Nothing is copied, and nothing warns that a mapping is read-only; it outlives the file's closing."""
    w = weights()
    qgemm.write(tmp_path / "model.gguf", {"w": w})
    with qgemm.open(tmp_path / "model.gguf") as file:
        layer = QLinear.from_tensor(file["w"])
        assert layer.weight.data_ptr() == file["w"].blocks.ctypes.data
    assert layer.packed.blocks.ctypes.data == layer.weight.data_ptr()
    assert layer.weight.shape == (40, w.nbytes // 40)
    assert layer.weight.dtype is torch.uint8
    assert not layer.weight.requires_grad
    x = normal(3, w.shape[1])
    assert_same(layer(x), torch.from_numpy(qgemm.matmul(x.numpy(), w)))


def test_no_x_or_y_is_copied(monkeypatch):
    seen = []
    monkeypatch.setattr("qgemm.cpu.reference.multiply_a16", lambda x, w, y: seen.append((x.ctypes.data, y.ctypes.data)))
    for dtype in ("float32", "float16"):
        x = normal(3, weights().shape[1], dtype=dtype)
        y = QLinear.from_tensor(weights())(x)
        assert seen.pop() == (x.data_ptr(), y.data_ptr())


# ---------------------------------------------------------------- gradients


@each_dtype
@each_format
def test_gradients_are_those_of_a_dense_layer(name, dtype):
    """Gradients of x, the bias and LoRA, against torch in float64 on the decoded weight."""
    w = weights(name)
    dense = torch.from_numpy(w.dequantize(np.float64))
    layer = QLinear.from_tensor(w, torch.nn.Parameter(normal(40, dtype=dtype)))
    layer.add_lora(normal(3, w.shape[1], seed=1), normal(40, 3, seed=2), 0.5)
    a, b = layer.lora["default"].parameters()
    x = normal(2, 3, w.shape[1], dtype=dtype).requires_grad_()
    gradient = normal(2, 3, 40, dtype=dtype, seed=3)
    layer(x).backward(gradient)
    want_x = gradient.double() @ (dense + 0.5 * b.double() @ a.double()).detach()
    loss = 4 * {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    sizes = gradient.double().abs() @ (dense.abs() + b.double().abs() @ a.double().abs()).detach()
    assert ((x.grad.double() - want_x).abs() <= loss * sizes).all()
    torch.testing.assert_close(layer.bias.grad.double(), gradient.double().sum((0, 1)), rtol=loss, atol=loss)
    want_b = 0.5 * gradient.double().flatten(0, 1).T @ (x.detach().double() @ a.detach().double().T).flatten(0, 1)
    torch.testing.assert_close(b.grad.double(), want_b, rtol=16 * loss, atol=64 * loss)
    assert layer.weight.grad is None


def test_a_backward_decodes_some_rows_at_a_time(monkeypatch):
    """The whole gradient, of panels with a rest, none of which is more than asked for."""
    w = weights("q8_0", n=300)
    layer, sizes = QLinear.from_tensor(w), []
    monkeypatch.setitem(ops.PANEL_WEIGHTS, "cpu", 64 * w.shape[1])
    decoded = ops.decoded
    monkeypatch.setattr(ops, "decoded", lambda *args: sizes.append(args[3] - args[2]) or decoded(*args))
    x = normal(4, w.shape[1]).requires_grad_()
    layer(x).sum().backward()
    assert sizes == [64, 64, 64, 64, 44]
    torch.testing.assert_close(x.grad[0], torch.from_numpy(w.dequantize().sum(0)), rtol=1e-4, atol=1e-4)
    assert_same(layer.dequantize(torch.float16), torch.from_numpy(w.dequantize("float16")))


def test_no_call_reads_signatures(monkeypatch):
    """Neither a product that is recorded nor its backward: torch's own `apply` does so at every call."""
    layer, x = QLinear.from_tensor(weights()), normal(2, weights().shape[1]).requires_grad_()
    layer(x).sum().backward()
    monkeypatch.setattr("inspect.signature", lambda *_: pytest.fail("a signature is read"))
    layer(x).sum().backward()


def test_a_second_derivative():
    w = weights("q8_0", n=8, blocks=1)
    layer, x = QLinear.from_tensor(w), normal(2, w.shape[1]).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    dense = torch.from_numpy(w.dequantize())
    torch.testing.assert_close(second, (2 * dense.T @ dense).sum(0).expand_as(x), rtol=1e-3, atol=1e-3)


def dense_layer(w: qgemm.Tensor, bias=None):
    weight = torch.from_numpy(w.dequantize())
    return lambda x: torch.nn.functional.linear(x, weight, bias)


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap of another axis": lambda f, x: torch.vmap(f, in_dims=1, out_dims=1)(x.expand(3, 4, -1)),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
    "per-sample grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.flip(0),))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(4, 8))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).pow(2).sum())(x[0]),
    "dual numbers": lambda f, x: dual(f, x),
}


def dual(f, x):
    from torch.autograd import forward_ad

    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.flip(0)))).tangent


@of_torch_itself
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("biased", [False, True])
def test_transforms_of_torch_func(transform, biased):
    """As of a dense layer: none drops a derivative in silence."""
    w = weights("q8_0", n=8, blocks=1)
    bias = normal(8, seed=1) if biased else None
    x, derivative = normal(4, w.shape[1]), TRANSFORMS[transform]
    torch.testing.assert_close(
        derivative(QLinear.from_tensor(w, bias), x), derivative(dense_layer(w, bias), x), rtol=1e-3, atol=1e-3
    )


@of_torch_itself
def test_derivatives_of_a_bias():
    from torch.func import functional_call, grad, jvp

    layer, x = QLinear.from_tensor(weights("q8_0", n=8), normal(8)), normal(4, 128)

    def output(bias):
        return functional_call(layer, {"bias": bias}, (x,))

    torch.testing.assert_close(grad(lambda bias: output(bias).sum())(normal(8)), torch.full((8,), 4.0))
    torch.testing.assert_close(jvp(output, (normal(8),), (normal(8, seed=1),))[1], normal(8, seed=1).expand(4, 8))
    with pytest.raises(qgemm.UnsupportedError, match="vmap takes x of a QLinear alone along an axis"):
        torch.vmap(output)(normal(3, 8))


@of_torch_itself
def test_a_trace_follows_x():
    layer = QLinear.from_tensor(weights(), normal(40))
    traced = torch.jit.trace(layer, normal(3, 128))
    assert_same(traced(normal(3, 128, seed=1)), layer(normal(3, 128, seed=1)))


def test_the_weight_takes_no_gradient():
    layer = QLinear.from_tensor(weights(), normal(40))
    with pytest.raises(qgemm.UnsupportedError, match=r"QLinear\(.*the packed weight takes no gradient; train its bias"):
        layer.requires_grad_()
    with pytest.raises(qgemm.UnsupportedError, match=r"^the packed weight takes no gradient; train its bias"):
        torch.nn.Sequential(layer).requires_grad_()
    assert layer.requires_grad_(False) is layer
    layer.bias.requires_grad_()
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    assert layer(normal(1, 128)).requires_grad
    with torch.no_grad():
        assert not layer(normal(1, 128)).requires_grad


# ---------------------------------------------------------------- autocast, LoRA


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_casts_x(dtype):
    """To its dtype, as torch's own Linear does; inside it can be turned off."""
    layer, kind = QLinear.from_tensor(weights(), normal(40)), getattr(torch, dtype)
    x = normal(3, 128).requires_grad_()
    with torch.autocast("cpu", dtype=kind):
        y = layer(x)
        with torch.autocast("cpu", enabled=False):
            assert layer(x).dtype is torch.float32
        assert layer(x.double()).dtype is torch.float64
    assert y.dtype is kind
    assert_same(y, layer(x.to(kind)))
    y.sum().backward()
    assert x.grad.dtype is torch.float32


@each_dtype
def test_lora_is_added(dtype):
    w = weights("q8_0")
    layer, x = QLinear.from_tensor(w), normal(2, w.shape[1], dtype=dtype)
    bare = layer(x)
    a, b = normal(4, w.shape[1], seed=1), normal(40, 4, seed=2)
    added = layer.add_lora(a, b, 0.25)
    assert isinstance(added, LoRA)
    assert_same(layer(x), bare + added(x))
    want = 0.25 * x.double() @ a.double().T @ b.double().T
    check_rms(added(x).detach().double().numpy(), want.numpy(), dtype)
    layer.add_lora(a, -b, 0.25, name="second")
    check_rms(*(y.detach().double().numpy() for y in (layer(x), bare)), dtype)
    assert set(layer.state_dict()) >= {"lora.default.A", "lora.second.B"}
    with pytest.raises(qgemm.UnsupportedError, match="there is a LoRA 'second' already"):
        layer.add_lora(a, b, name="second")
    layer.remove_lora("second")
    layer.remove_lora()
    assert_same(layer(x), bare)
    with pytest.raises(qgemm.UnsupportedError, match="there is no LoRA 'default'; there are: none"):
        layer.remove_lora()
    assert set(layer.state_dict()) == {"weight", "_extra_state"}


# ---------------------------------------------------------------- threads, leaks


def test_threads():
    """Every thread gets its own product, also of a layer that none has used before."""
    w = weights("q4_k", n=70)
    xs = [normal(m, w.shape[1], seed=m) for m in range(1, 9)]
    wants = [torch.from_numpy(qgemm.matmul(x.numpy(), w)) for x in xs]
    for _ in range(5):
        layer, failed = QLinear.from_tensor(w), []

        def work(x, want, layer=layer, failed=failed):
            for _ in range(20):
                if not torch.equal(layer(x).nan_to_num(), want.nan_to_num()):
                    failed.append(x.shape)

        at_once(work, xs, wants)
        assert failed == []


@pytest.mark.parametrize("requires_grad", [False, True])
def test_memory_stays_flat(requires_grad):
    """Thousands of calls, and of layers, leave neither objects nor memory."""
    w = weights("q4_0", n=8, blocks=1)
    x = normal(2, w.shape[1]).requires_grad_(requires_grad)
    layer = QLinear.from_tensor(w)

    def calls(count):
        for _ in range(count):
            y = layer(x)
            if requires_grad:
                torch.autograd.grad(y.sum(), x)
        for _ in range(count // 10):
            QLinear.from_tensor(w, normal(8))(x)

    calls(200)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    calls(1200)  # Python keeps tuples that are free, up to some number
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    calls(2000)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 64_000  # less than an object a call
    assert len(gc.get_objects()) - objects < 100


def test_a_layer_is_freed_without_the_collector():
    """No circle of references, which would keep gigabytes until the collector comes by."""
    layer = QLinear.from_tensor(weights())
    layer(normal(1, 128))
    alive = weakref.ref(layer.weight), weakref.ref(layer.packed), weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert [reference() for reference in alive] == [None, None, None]
    finally:
        gc.enable()


# ---------------------------------------------------------------- errors


def test_what_does_not_fit_is_named():
    w = weights()
    layer = QLinear.from_tensor(w)
    with pytest.raises(qgemm.ShapeError, match="x has rows of 64"):
        layer(normal(3, 64))
    with pytest.raises(qgemm.ShapeError, match="x is a scalar"):
        layer(torch.tensor(1.0))
    with pytest.raises(TypeError, match="int64"):
        layer(torch.ones(3, 128, dtype=torch.int64))
    with pytest.raises(qgemm.ShapeError, match=r"bias has shape \[3\].*needs \[40\]"):
        QLinear.from_tensor(w, normal(3))
    with pytest.raises(qgemm.UnsupportedError, match="activation is 'a16', 'a8', 'a8_g256' or 'e4m3_g256', got 'a4'"):
        QLinear.from_tensor(w, activation="a4")
    with pytest.raises(qgemm.UnsupportedError, match="F16 has no integer codes for activation 'a8'"):
        QLinear.from_tensor(weights("f16"), activation="a8")
    for wrong, how in ((normal(40, 128), "qgemm.quantize give such"), (Planes.__new__(Planes), "call its to_device")):
        with pytest.raises(TypeError, match=f"a layer is made of a Tensor or DeviceTensor, got .*; .*{how}"):
            QLinear.from_tensor(wrong)
    with pytest.raises(qgemm.UnsupportedError, match=r"needs a matrix \(N, K\).*index its leading axes"):
        QLinear.from_tensor(qgemm.quantize(np.ones((2, 3, 64)), "q4_0"))
    with pytest.raises(qgemm.UnsupportedError, match=r"I8.*no decoder"):
        QLinear.from_tensor(qgemm.Tensor(GGML_TYPES[24], (3, 64), np.zeros((3, 64), np.int8)))
    with pytest.raises(qgemm.ShapeError, match="Q4_0: row length 100 is not a multiple of 32"):
        QLinear(100, 5, "q4_0")
    with pytest.raises(qgemm.UnsupportedError, match="there is no format 'q4_9'"):
        QLinear(64, 5, "q4_9")
    for a, b in ((normal(2, 64), normal(40, 2)), (normal(2, 128), normal(41, 2)), (normal(128), normal(40, 2))):
        with pytest.raises(qgemm.ShapeError, match=r"needs A \[rank, 128\] and B \[40, rank\], got") as error:
            layer.add_lora(a, b)
        assert "\n" not in str(error.value)
        layer.add_lora(normal(2, 128), normal(40, 2), name=str(len(layer._modules.get("lora", ()))))
    with pytest.raises(qgemm.ShapeError, match=r"LoRA is A \[rank, K\] and B \[N, rank\], got"):
        LoRA(normal(2, 128), normal(40, 3))


def test_a_weight_that_is_not_its_bytes_is_named():
    layer = QLinear.from_tensor(weights())
    layer.weight = torch.nn.Parameter(normal(40, 128), requires_grad=False)
    with pytest.raises(qgemm.UnsupportedError, match=r"Q4_0, 40 x 128\) is uint8 \[40, 72\].*got torch.float32"):
        layer(normal(1, 128))
    empty = QLinear(128, 40, "q4_0", bias=False, device="meta")
    with pytest.raises(qgemm.UnsupportedError, match="on the device meta: load a state dict with assign=True"):
        empty(normal(1, 128))


@pytest.mark.parametrize("x", [None, [1.0, 2.0], np.ones((2, 128), np.float32), 3], ids=lambda x: type(x).__name__)
def test_inputs_that_are_no_tensors(x):
    """Under autocast and beside LoRA too."""
    layer, table = QLinear.from_tensor(weights()), QEmbedding.from_tensor(weights())
    layer.add_lora(normal(2, 128), normal(40, 2))
    with torch.autocast("cpu"), pytest.raises(TypeError, match=r"QLinear\((.|\n)* takes a tensor, got "):
        layer(x)
    with pytest.raises(TypeError, match=r"QEmbedding\(40, 128.* takes a tensor, got "):
        table(x)
    experts = QExperts(2, 64, 64, ("q4_0",) * 3)
    with pytest.raises(TypeError, match=r"QExperts\((.|\n)* takes a tensor, got "):
        experts(torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.int64), x)
