"""The epilogue of compiled products: bias, residual, gates and types of x and y, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from gates import function, gated_bound, gated_up
from helpers import float_dtype, normal, random_tensor
from numpy.testing import assert_array_equal

import qgemm
from qgemm.codec.format import FLOATS
from qgemm.cpu.native import calls, compiler, library, products
from qgemm.gating import GATES
from qgemm.system import process

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(library.reason()), reason=library.reason()),
]
N, K = 37, 96  # rows of W that no chunk divides
NAMES = ("q4_0", "kbit3", "f16")  # their sums come from three kernels
M = (1, 5, 16, 300)  # rows of x one by one, by tiles, more than are packed at a time


@pytest.fixture(autouse=True)
def compiled_code(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU")
    monkeypatch.setattr("qgemm.cpu.reference.multiply", None)  # NumPy has no part in it


def weights(name="q4_0", seed=0):
    return random_tensor(qgemm.FORMATS[name], N, K, np.random.default_rng(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", M)
def test_types_of_what_is_added_and_of_y(name, m):
    """Added in float32, rounded once: infinite beyond the range of float16, at any address."""
    w, x = weights(name), normal(m, K, seed=1)
    sums = qgemm.matmul(x, w)
    for added, dtype in zip(FLOATS, FLOATS[::-1], strict=True):
        large = np.clip(3e4 * normal(m, N, seed=3), -65000, 65000)
        bias, residual = (a.astype(float_dtype(added)) for a in (600 * normal(N, seed=2), large))
        total = sums + bias.astype(np.float32) + residual.astype(np.float32)
        with np.errstate(over="ignore"):
            want = total.astype(float_dtype(dtype))
        assert_array_equal(qgemm.matmul(x, w, bias=bias, residual=residual, dtype=dtype), want)
        strided = np.zeros((m, 2 * N), float_dtype(dtype))
        qgemm.matmul(x, w, bias=bias, residual=np.repeat(residual, 2, axis=1)[:, ::2], out=strided[:, ::2])
        assert_array_equal(strided[:, ::2], want)
        assert not strided[:, 1::2].any()
    with np.errstate(over="ignore"):
        for dtype in FLOATS:
            assert_array_equal(qgemm.matmul(x, w, dtype=dtype), sums.astype(float_dtype(dtype)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [3, 24])
def test_types_and_strides_of_x(name, m):
    """Converted by the threads that multiply: a float64 beyond float32 is infinite, one between two is rounded."""
    w, x = weights(name), 3 * normal(m, 2 * K, seed=4).astype(np.float64)
    x[1, 4] = 1e300
    for kind in FLOATS:
        with np.errstate(over="ignore"):
            typed = x.astype(float_dtype(kind))[:, ::2]
            want = qgemm.matmul(typed.astype(np.float32), w)
        assert_array_equal(qgemm.matmul(typed, w), want)
        if kind != "bfloat16":
            assert_array_equal(qgemm.matmul(typed.astype(typed.dtype.newbyteorder()), w), want)


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_several_weights_with_and_without(activation):
    """One call has products with a bias or a residual, and products whose y is the sums."""
    x, tensors = normal(19, K, seed=5), [weights("q4_0", 1), weights("q8_0", 2), weights("q4_0", 3)]
    biases, residuals = [None, normal(N, seed=6), None], [None, None, normal(19, N, seed=7)]
    sums = [qgemm.matmul(x, w, activation) for w in tensors]
    ys = qgemm.matmul_many(x, tensors, activation, biases=biases, residuals=residuals)
    for y, want in zip(ys, (sums[0], sums[1] + biases[1], sums[2] + residuals[2]), strict=True):
        assert_array_equal(y, want)


def test_the_residual_may_be_y_and_overlap_it():
    w, x, memory = weights(), normal(20, K, seed=8), normal(21 * N, seed=9)
    sums = qgemm.matmul(x, w)
    for shift in (0, 1, N):
        array = memory.copy()
        residual, y = array[shift : shift + 20 * N].reshape(20, N), array[: 20 * N].reshape(20, N)
        want = sums + residual
        qgemm.matmul(x, w, residual=residual, out=y)
        assert_array_equal(y, want)
    array = memory.copy()
    want = sums + array[:N]
    qgemm.matmul(x, w, bias=array[:N], out=array[: 20 * N].reshape(20, N))
    assert_array_equal(array[: 20 * N].reshape(20, N), want)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("m", M)
def test_gates(gate, m):
    """Against float64, of weights of two formats; then rounded to the type of y."""
    gate_weights, up_weights = weights("q4_0", 1), weights("q8_0", 2)
    x, biases = normal(m, K, seed=3), [normal(N, seed=4), normal(N, seed=5)]
    for pair in ([None, None], [None, biases[1]], biases):
        g, up = qgemm.matmul_many(x, [gate_weights, up_weights], biases=pair)
        y = qgemm.gated(x, gate_weights, up_weights, gate, biases=pair)
        zero = np.zeros_like(g)
        assert (np.abs(y - function(gate, g) * gated_up(gate, up)) <= gated_bound(gate, g, up, zero, zero)).all()
    for dtype in FLOATS:
        assert_array_equal(
            qgemm.gated(x, gate_weights, up_weights, gate, biases=biases, dtype=dtype),
            y.astype(float_dtype(dtype)),
            strict=True,
        )


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_any_number(gate):
    """The limits of large numbers and of their negatives; NaN of NaN, in either."""
    values = np.float32([0, -0.0, 1e-30, 100, -100, 1e30, np.inf, np.nan, -1e4, 3e38])
    column = qgemm.Tensor("f32", (len(values), 1), values[:, None])
    ones = qgemm.Tensor("f32", (len(values), 1), np.ones((len(values), 1), np.float32))
    x = np.ones((1, 1), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        want = GATES[gate](values, np.ones_like(values))
    y = qgemm.gated(x, column, ones, gate)[0]
    np.testing.assert_allclose(y, want, rtol=4 * 2.0**-23, atol=2.0**-100)
    assert np.isnan(qgemm.gated(x, ones, column, gate)[0, 7])


def call(activation):
    x, residual = normal(21, K, seed=1), normal(21, 515, seed=2)
    rng = np.random.default_rng(3)
    first, second = (random_tensor(qgemm.FORMATS["q4_0"], 515, K, rng) for _ in range(2))
    ys = [qgemm.matmul(x.astype(np.float16), first, activation, bias=residual[0], residual=residual, dtype="bfloat16")]
    return [*ys, *(qgemm.gated(x, first, second, gate, activation, biases=[residual[0], None]) for gate in GATES)]


@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_bits_do_not_depend_on_threads(activation, monkeypatch):
    monkeypatch.setenv("QGEMM_THREADS", "1")
    want = call(activation)
    for threads in (2, 3, 4):
        monkeypatch.setenv("QGEMM_THREADS", str(threads))
        for y, alone in zip(call(activation), want, strict=True):
            assert_array_equal(y, alone)


@pytest.mark.skipif("avx2" not in process.cpu().split(), reason="for a CPU with AVX2")
def test_bits_do_not_depend_on_the_instructions(monkeypatch):
    """Sources compiled for AVX2 give equal numbers of every gate and type."""
    want = call("a16")
    by = compiler.compiler()
    narrow = process.load_library(library.built(by, calls.POOL, ("-march=x86-64-v3",)))
    narrow.qgemm_multiply.argtypes = products.ready().qgemm_multiply.argtypes
    monkeypatch.setattr(products, "ready", lambda: narrow)
    for y, wide in zip(call("a16"), want, strict=True):
        assert_array_equal(y, wide)
    assert {name: i for i, name in enumerate(GATES, 1)} == calls.GATES
