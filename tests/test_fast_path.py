"""qgemm/cpu/fast_path.py: a call like an earlier one has its bits, and takes the slow path where C could not serve."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import at_once
from numpy.testing import assert_array_equal

import qgemm
from qgemm.cpu import fast_path
from qgemm.cpu.native import library

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
N, K = 40, 256
RNG = np.random.default_rng(0)
NAMES = ("q4_0", "q4_k", "q8_0")


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)


@pytest.fixture
def weights():
    """Weights of three formats, without plans."""
    return [qgemm.quantize(numbers(N, K), name) for name in NAMES]


@pytest.fixture
def slow(monkeypatch):
    """The calls that take the slow path."""
    calls = []
    plain = fast_path.multiply
    monkeypatch.setattr(fast_path, "multiply", lambda *arguments: calls.append(arguments) or plain(*arguments))
    return calls


TYPES = [np.float32, np.float16, np.float64]
X = {
    **{f"{np.dtype(t).name}": lambda t=t: numbers(3, K, dtype=t) for t in TYPES},
    "a vector": lambda: numbers(K),
    "leading axes": lambda: numbers(2, 3, K),
    "many rows": lambda: numbers(600, K),
    "every other row": lambda: numbers(6, K)[::2],
    "wide rows": lambda: numbers(3, 2 * K)[:, :K],
    "every other column": lambda: numbers(3, 2 * K)[:, ::2],
    "rows from last to first": lambda: numbers(3, K)[::-1],
    "columns from last to first": lambda: numbers(3, K)[:, ::-1],
    "transposed": lambda: numbers(K, 3).T,
    "one row for all": lambda: np.broadcast_to(numbers(K), (3, K)),
    "two gaps": lambda: numbers(2, 4, K)[:, :3],
    "read-only": lambda: np.frombuffer(numbers(3, K).tobytes(), np.float32).reshape(3, K),
    "prepared": lambda: qgemm.quantize_activations(numbers(3, K)),
}
CALLS = {
    "new y": lambda x, w, **terms: qgemm.matmul(x, w[0]),
    "a8": lambda x, w, **terms: qgemm.matmul(x, w[0], "a8"),
    "out": lambda x, w, shape, **terms: qgemm.matmul(x, w[0], out=np.empty(shape, np.float32)),
    "float16": lambda x, w, **terms: qgemm.matmul(x, w[0], dtype=np.float16),
    "bias": lambda x, w, bias, **terms: qgemm.matmul(x, w[0], bias=bias),
    "bias of float16": lambda x, w, bias, **terms: qgemm.matmul(x, w[0], bias=bias.astype(np.float16)),
    "residual": lambda x, w, residual, **terms: qgemm.matmul(x, w[0], residual=residual),
    "all": lambda x, w, bias, residual, shape: qgemm.matmul(
        x, w[1], bias=bias, residual=residual.astype(np.float16), out=np.empty(shape, np.float16)
    ),
    "many": lambda x, w, bias, **terms: qgemm.matmul_many(x, w, biases=[None, bias, None]),
    "many outs": lambda x, w, shape, **terms: qgemm.matmul_many(x, w, outs=[np.empty(shape, np.float32) for _ in w]),
    "gated": lambda x, w, bias, **terms: qgemm.gated(x, w[0], w[1], biases=[None, bias]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", X)
def test_second_calls_have_the_bits_of_first_ones(kind, call, weights, slow):
    """On other arrays of the same kind, none of which takes the slow path."""
    if kind == "prepared" and call == "a8":
        kind = "float32"
    for _ in range(2):
        x = X[kind]()
        shape = (*x.shape[:-1], N)
        terms = {"bias": numbers(N), "residual": numbers(*shape), "shape": shape}
        y = CALLS[call](x, weights, **terms)
        count = len(slow)
    assert count == 1
    fresh = [qgemm.Tensor(w.format, w.shape, w.blocks) for w in weights]
    expected = CALLS[call](x, fresh, **terms)
    assert len(slow) == 2
    for ours, theirs in zip(y if isinstance(y, list) else [y], expected if isinstance(y, list) else [expected]):  # noqa: B905
        assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("dtype", TYPES)
def test_columns_at_any_distance(dtype, weights):
    """Columns of x, residual and output that are 2 to 24 numbers apart, also the bytes of a block of activations."""
    w = weights[0]
    for step in range(2, 25):
        for _ in range(2):
            x, residual = numbers(3, step * K, dtype=dtype)[:, ::step], numbers(3, step * N, dtype=dtype)[:, ::step]
            out = np.full((3, step * N), 7, np.float32)
            copies = np.ascontiguousarray(x), np.ascontiguousarray(residual)
            expected = qgemm.matmul(copies[0], w, residual=copies[1])
            assert_array_equal(qgemm.matmul(x, w, residual=residual), expected)
            assert_array_equal(qgemm.matmul(x, w, residual=residual, out=out[:, ::step]), expected)
            assert (np.delete(out, np.s_[::step], 1) == 7).all()


def test_out_may_overlap_what_is_read(weights):
    """x, bias, residual and the other out: as the slow path treats them, an error where that raises one."""
    w, x = weights[0], numbers(3, K)
    expected = qgemm.matmul(x, w)
    for _ in range(2):
        memory = x.copy()
        assert_array_equal(qgemm.matmul(memory, w, out=memory.reshape(-1)[: 3 * N].reshape(3, N)), expected)
        residual = numbers(3, N)
        total = qgemm.matmul(x, w, residual=residual.copy())
        assert_array_equal(qgemm.matmul(x, w, residual=residual, out=residual), total)
        memory = numbers(4, N)
        total = qgemm.matmul(x, w, residual=memory[1:].copy())
        assert_array_equal(qgemm.matmul(x, w, residual=memory[1:], out=memory[:3]), total)
        memory = numbers(3, N)
        total = qgemm.matmul(x, w, bias=memory[2].copy())
        assert_array_equal(qgemm.matmul(x, w, bias=memory[2], out=memory), total)
        memory = np.empty((5, N), np.float32)
        with pytest.raises(qgemm.UnsupportedError, match="share memory"):
            qgemm.matmul_many(x, weights[:2], outs=[memory[:3], memory[2:]])
        qgemm.matmul_many(x, weights[:2], outs=[np.empty((3, N), np.float32) for _ in range(2)])


def test_what_c_cannot_use_takes_the_slow_path(weights):
    """After a call that left a plan: read-only outs, other byte orders, odd addresses, wrong shapes."""
    w, x = weights[0], numbers(3, K)
    expected = qgemm.matmul(x, w)
    out = np.empty((3, N), np.float32)
    qgemm.matmul(x, w, out=out)
    qgemm.matmul(x, w, bias=numbers(N))
    assert_array_equal(qgemm.matmul(x.astype(">f4"), w), expected)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, K)
    assert_array_equal(qgemm.matmul(odd, w), expected)
    out.flags.writeable = False
    with pytest.raises(qgemm.UnsupportedError, match="read-only"):
        qgemm.matmul(x, w, out=out)
    with pytest.raises(qgemm.ShapeError, match="bias has shape"):
        qgemm.matmul(x, w, bias=numbers(N + 1))
    with pytest.raises(TypeError, match="masked"):
        qgemm.matmul(np.ma.masked_array(x), w)


def test_plans_are_few_and_the_weights_of_a_plan_stay(weights, monkeypatch):
    """Other weights at the address of earlier ones would be taken for these."""
    monkeypatch.setattr(fast_path, "MAX_PLANS", 4)
    w = weights[0]
    for m in range(1, 20):
        x = numbers(m, K)
        assert_array_equal(qgemm.matmul(x, w), qgemm.matmul(x, qgemm.Tensor(w.format, w.shape, w.blocks)))
        assert 0 < len(w.plans) <= 4
    x = numbers(1, K)
    for _ in range(50):
        other = qgemm.quantize(numbers(N, K), "q4_0")
        assert_array_equal(qgemm.matmul_many(x, [w, other])[1], qgemm.matmul(x, other))


def test_threads_share_a_plan(weights):
    """Each has arguments of its own."""
    w = weights[0]
    inputs = [numbers(2, K) for _ in range(8)]
    expected = [qgemm.matmul(x, w) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(200):
            if not np.array_equal(qgemm.matmul(inputs[i], w), expected[i]):
                wrong.append(i)

    at_once(work, range(8))
    assert not wrong
