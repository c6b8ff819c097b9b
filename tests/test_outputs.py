"""The memory of y, and the arrays that it may overlap: each case is refused by a sentence, or right."""

from __future__ import annotations

import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qgemm
from qgemm.arguments import check_apart, check_elements

N = K = 64
W = qgemm.quantize(np.random.default_rng(1).standard_normal((N, K)).astype(np.float32), "q4_0")
V = qgemm.quantize(np.random.default_rng(2).standard_normal((N, K)).astype(np.float32), "q5_1")
each_activation = pytest.mark.parametrize("activation", ["a16", "a8"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# More rows than are decoded at a time, for few tokens and for many: nothing may be read after y is written there.
TALL = qgemm.quantize(normal(4200, 1024, seed=6), "q4_0")


@pytest.mark.usefixtures("engine")
@each_activation
@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("shift", [-1024, -5, 0, 1, 1024])
def test_out_over_a_part_of_x(activation, m, shift):
    """One buffer, out some elements behind or before x: x is read as it was."""
    n, k = TALL.shape
    buffer = normal(m * n + 2 * k)
    x, out = buffer[k : k + m * k].reshape(m, k), buffer[k + shift : k + shift + m * n].reshape(m, n)
    want = qgemm.matmul(x.copy(), TALL, activation)
    assert qgemm.matmul(x, TALL, activation, out=out) is out
    np.testing.assert_array_equal(out, want)


@pytest.mark.usefixtures("engine")
@each_activation
def test_out_over_x_in_other_orders(activation):
    for view in (lambda x: x[::-1], lambda x: x.T, lambda x: x[:, ::-1]):
        x = normal(K, K)
        want = qgemm.matmul(x.copy(), W, activation)
        np.testing.assert_array_equal(qgemm.matmul(x, W, activation, out=view(x)), want)


@pytest.mark.usefixtures("engine")
@each_activation
@pytest.mark.parametrize("shift", [-3, 0, 7])
def test_bias_and_residual_under_out(activation, shift):
    buffer = normal(6 * N)
    residual, out = (buffer[start : start + 3 * N].reshape(3, N) for start in (N, N + shift))
    bias, x = buffer[2 * N : 3 * N], normal(3, K, seed=3)
    want = qgemm.matmul(x, W, activation, bias=bias.copy(), residual=residual.copy())
    np.testing.assert_array_equal(qgemm.matmul(x, W, activation, bias=bias, residual=residual, out=out), want)


@pytest.mark.usefixtures("engine")
@each_activation
def test_many_outs_over_x_and_over_what_others_add(activation):
    """The first product must not overwrite the input of the second."""
    x = normal(3, K)
    wants = [qgemm.matmul(x.copy(), w, activation) for w in (W, V)]
    outs = [x, np.empty((3, N), np.float32)]
    for y, out, want in zip(qgemm.matmul_many(x, [W, V], activation, outs=outs), outs, wants, strict=True):
        assert y is out
        np.testing.assert_array_equal(y, want)
    x, first, second = normal(3, K), normal(3, N, seed=4), normal(3, N, seed=5)
    wants = [qgemm.matmul(x, W, activation, residual=second.copy(), bias=second[0].copy())]
    wants += [qgemm.matmul(x, V, activation, residual=first.copy(), bias=first[1].copy())]
    added = {"residuals": [second, first], "biases": [second[0], first[1]]}
    ys = qgemm.matmul_many(x, [W, V], activation, outs=[first, second], **added)
    for y, want in zip(ys, wants, strict=True):
        np.testing.assert_array_equal(y, want)


def test_outs_that_overlap_are_refused_before_any_is_written():
    x, buffer = normal(3, K), np.zeros(5 * N, np.float32)
    first, second = buffer[: 3 * N].reshape(3, N), buffer[2 * N :].reshape(3, N)
    for outs in ([first, second], [first, first]):
        with pytest.raises(qgemm.UnsupportedError, match=r"outs\[0\] and outs\[1\] share memory"):
            qgemm.matmul_many(x, [W, V], outs=outs)
    assert not buffer.any()


@pytest.mark.usefixtures("engine")
def test_outs_beside_each_other_in_one_array():
    """As those of Q, K and V lie: columns of one y, whose extents meet and whose elements do not."""
    x, fused = normal(3, K), np.zeros((3, 2 * N), np.float32)
    qgemm.matmul_many(x, [W, V], outs=[fused[:, :N], fused[:, N:]])
    np.testing.assert_array_equal(fused, np.hstack([qgemm.matmul(x, W), qgemm.matmul(x, V)]))
    stacked = np.zeros((2, 3, N), np.float32)  # an array as the sequence of outs, of biases and of residuals
    qgemm.matmul_many(x, [W, V], outs=stacked, biases=np.ones((2, N)), residuals=np.zeros((2, 3, N)))
    np.testing.assert_array_equal(stacked, np.stack([qgemm.matmul(x, w, bias=np.ones(N)) for w in (W, V)]))


@pytest.mark.parametrize(
    "out", [[[0.0] * N] * 3, bytearray(12 * N), array.array("f", [0.0] * 3 * N), "y", 1.0, W, np.float32(1), ()]
)
def test_out_that_is_no_array(out):
    """NumPy would make a copy of a list, and y would be lost in it."""
    with pytest.raises(TypeError, match=f"out must be an array, into which y is written, got {type(out).__name__}"):
        qgemm.matmul(normal(3, K), W, out=out)


@pytest.mark.parametrize("weights", [W, None, np.ones((2, K), np.float32), W.format, iter([W])])
def test_weights_that_are_no_list(weights):
    with pytest.raises(TypeError, match=f"weights must be a list or tuple of Tensors, got {type(weights).__name__}"):
        qgemm.matmul_many(normal(3, K), weights)


def test_rows_of_several_lengths():
    for use in (lambda x: qgemm.matmul(x, W), lambda x: qgemm.quantize(x, "q4_0"), qgemm.quantize_activations):
        with pytest.raises(TypeError, match="x is no array: setting an array element with a sequence"):
            use([[1.0, 2.0], [3.0]])


def test_out_whose_elements_share_memory():
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(N + 2, np.float32), N, writeable=True)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(N, np.float32), (3, N), (0, 4))
    for out in (windows, repeated):
        with pytest.raises(qgemm.UnsupportedError, match=r"out has elements that share memory: shape \(3, 64\)"):
            qgemm.matmul(normal(3, K), W, out=out)
    check_elements(np.zeros((3, 0), np.float32))
    check_elements(np.zeros((4, N), np.float32)[::-2, ::-1])


def test_masked_arrays_are_refused():
    x, masked = normal(3, K), np.ma.masked_greater(normal(3, K), 1)
    bias, out = masked[0, :N], np.ma.zeros((3, N), np.float32)
    uses = {
        "x": lambda: qgemm.matmul(masked, W),
        "bias": lambda: qgemm.matmul(x, W, bias=bias),
        "residual": lambda: qgemm.matmul(x, W, residual=masked),
        "out": lambda: qgemm.matmul(x, W, out=out),
    }
    for who, use in uses.items():
        with pytest.raises(TypeError, match=f"{who} is a masked array.*{who}.filled"):
            use()
    for use in (lambda: qgemm.quantize(masked, "q4_0"), lambda: qgemm.quantize_activations(masked)):
        with pytest.raises(TypeError, match=r"x is a masked array.*x\.filled\(0\)"):
            use()
    np.testing.assert_array_equal(qgemm.matmul(masked.filled(0), W), qgemm.matmul(masked.filled(0).data, W))


def test_types_of_y_that_are_none():
    x = normal(3, K)
    for dtype in ("f16", "q4_0", np.int8, "float128", object()):
        with pytest.raises(TypeError, match="dtype must be float16, float32, float64 or bfloat16, got"):
            qgemm.matmul(x, W, dtype=dtype)
    with pytest.raises(TypeError, match="out must be of float16, float32, float64 or bfloat16, got int32"):
        qgemm.matmul(x, W, out=np.zeros((3, N), np.int32))


@pytest.mark.usefixtures("engine")
def test_arrays_of_a_device_in_a_product_on_the_host():
    there = SimpleNamespace(__dlpack_device__=lambda: (2, 0))
    for who in ("bias", "residual", "out"):
        with pytest.raises(qgemm.UnsupportedError, match=f"{who} is on a CUDA device, the product is on the host"):
            qgemm.matmul(normal(3, K), W, **{who: there})


# ---------------------------------------------------------------- which arrays of a device share memory


@given(data=st.data())
def test_arrays_of_a_device_are_compared_as_those_of_the_host(data):
    """By pointers, shapes and strides alone, against all elements' addresses."""
    views, elements = [], []
    for _ in range(2):
        shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
        strides = tuple(4 * data.draw(st.integers(-9, 9)) for _ in shape)
        start = 4096 + 4 * data.draw(st.integers(0, 30))
        interface = {"data": (start, False)}
        views.append(SimpleNamespace(shape=shape, strides=strides, itemsize=4, __cuda_array_interface__=interface))
        indices = np.indices(shape).reshape(len(shape), -1)
        elements.append(set((start + np.array(strides) @ indices).tolist()))
    if elements[0] & elements[1]:
        with pytest.raises(qgemm.UnsupportedError, match=r"outs\[0\] and outs\[1\] share memory"):
            check_apart(views)
    else:
        check_apart(views)


def test_arrays_of_which_it_is_too_hard_to_tell_count_as_overlapping(monkeypatch):
    monkeypatch.setattr("qgemm.arguments.MAX_WORK", 1)
    memory = np.zeros(40_000, np.float32)
    strides = [4 * step for step in (192, 48, 7, 5)]
    views = [np.lib.stride_tricks.as_strided(memory[start:], (9, 8, 7, 6), strides) for start in (0, 1)]
    with pytest.raises(qgemm.UnsupportedError, match=r"outs\[0\] and outs\[1\] share memory"):
        check_apart(views)


# ---------------------------------------------------------------- slices of tokens


@pytest.mark.usefixtures("engine")
@each_activation
def test_every_token_is_computed_however_x_is_sliced(activation):
    """More than the 4 M activations that are converted at a time, and no whole number of slices."""
    m, k = 2051, 2048 + 256
    w = qgemm.quantize(normal(3, k), "q8_0")
    x, out = normal(m, k, seed=1), np.full((m, 3), np.nan, np.float32)
    qgemm.matmul(x, w, activation, out=out)
    assert np.isfinite(out).all()
    exact = (qgemm.quantize_activations(x).dequantize() if activation == "a8" else x) @ w.dequantize().T
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-2)
    np.testing.assert_allclose(out[-3:], qgemm.matmul(x[-3:], w, activation), rtol=0, atol=1e-2)
