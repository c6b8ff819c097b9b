"""qgemm/cpu/experts.py: products by experts in one call of C have the bits of products by each expert's matrix."""

from __future__ import annotations

import numpy as np
import pytest
from experts import random_experts, routed
from numpy.testing import assert_allclose, assert_array_equal

import qgemm
from qgemm.codec.float_types import float_dtype
from qgemm.cpu import experts
from qgemm.cpu.native import library
from qgemm.cpu.plan import Plan
from qgemm.routing import GATE_OF

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
E, F, K = 6, 64, 96
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("QGEMM_CPU", raising=False)


@pytest.fixture
def slow(monkeypatch):
    """The calls that take the slow path."""
    calls = []
    for name in ("check_layer", "check_product"):
        check = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *args, check=check: calls.append(args) or check(*args))
    return calls


@pytest.fixture
def by_numpy(monkeypatch):
    """The calls that NumPy multiplies expert by expert."""
    calls = []
    for name in ("_layer_by_numpy", "_product_by_numpy"):
        compute = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *args, compute=compute: calls.append(args) or compute(*args))
    return calls


def numbers(*shape, dtype="float32"):
    return RNG.standard_normal(shape).astype(float_dtype(dtype))


def layer(names=("q4_0", "q8_0", "q5_0")):
    """Gate, up and down of three formats."""
    shapes = (F, K), (F, K), (K, F)
    return [random_experts(qgemm.FORMATS[name], E, *shape, RNG) for name, shape in zip(names, shapes, strict=True)]


@pytest.mark.parametrize(
    ("name", "activation"),
    [*((n, a) for n in ("q4_0", "q6_k") for a in ("a16", "a8")), ("kbit4", "a16"), ("bf16", "a16")],
)
@pytest.mark.parametrize(("tokens", "top_k", "skewed"), [(1, 4, False), (5, 1, False), (40, 3, True), (700, 2, True)])
def test_bits_of_a_product_by_each_matrix(name, activation, tokens, top_k, skewed, by_numpy):
    """The rows of an expert are multiplied one by one, in tiles, or are more than are packed at a time."""
    fmt = qgemm.FORMATS[name]
    w = random_experts(fmt, E, 40, 256, RNG)
    ids, _ = routed(RNG, tokens, top_k, E, skewed)
    x, bias = numbers(tokens, w.shape[2]), numbers(E, 40)
    rows = np.repeat(x, top_k, 0).reshape(tokens, top_k, -1)
    for _ in range(2):
        half = bias.astype(np.float16)  # 40 numbers, which no vector of 16 divides
        y = qgemm.moe_matmul(x, w, ids, activation, bias=half)
        assert_array_equal(qgemm.moe_matmul(x, w, ids, activation, bias=half.astype(np.float32)), y)
        y = qgemm.moe_matmul(x, w, ids, activation, bias=bias)
        assert_array_equal(qgemm.moe_matmul(rows, w, ids, activation, bias=bias), y)
    for expert in range(E):
        token, rank = np.nonzero(ids == expert)
        if len(token):
            assert_array_equal(y[token, rank], qgemm.matmul(x[token], w[expert], activation, bias=bias[expert]))
    assert not by_numpy


@pytest.mark.parametrize("gate", GATE_OF)
@pytest.mark.parametrize("tokens", [1, 30, 900])
def test_a_layer_is_its_products(gate, tokens, by_numpy):
    """Also of more slots than a wave has; as one tensor of gate and up, the same bits."""
    w, (ids, factors) = layer(), routed(RNG, tokens, 3, E, True)
    x, biases = numbers(tokens, K) / 8, [numbers(E, F), numbers(E, F), numbers(E, K)]
    expected = np.zeros((tokens, K))
    for expert in range(E):
        token, rank = np.nonzero(ids == expert)
        own = [bias[expert] for bias in biases]
        if len(token):
            between = qgemm.gated(x[token], w[0][expert], w[1][expert], GATE_OF[gate], biases=own[:2])
            y = qgemm.matmul(between, w[2][expert], bias=own[2])
            np.add.at(expected, token, factors[token, rank, None].astype(np.float64) * y)
    y = qgemm.moe(x, w[:2], w[2], ids, factors, gate, biases=biases)
    assert_allclose(y, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    pair = layer(("q4_0", "q4_0", "q5_0"))[:2]
    both = qgemm.Tensor("q4_0", (E, 2 * F, K), np.concatenate([part.blocks for part in pair], axis=1))
    for kind in ("float32", "float16"):
        own = [bias.astype(kind) for bias in biases]
        y = qgemm.moe(x, pair, w[2], ids, factors, gate, biases=own)
        for _ in range(2):
            merged = [np.concatenate(own[:2], axis=1), own[2]]
            assert_array_equal(qgemm.moe(x, both, w[2], ids, factors, gate, biases=merged), y)
    assert not by_numpy


X = {
    **{name: lambda name=name: numbers(7, K, dtype=name) for name in ("float32", "float16", "float64", "bfloat16")},
    "wide rows": lambda: numbers(7, 2 * K)[:, :K],
    "every other column": lambda: numbers(7, 2 * K)[:, ::2],
    "another byte order": lambda: numbers(7, K).astype(">f4"),
    "an odd address": lambda: np.frombuffer(b"\0" + numbers(7, K).tobytes(), np.uint8)[1:].view("f4").reshape(7, K),
}
TERMS = {
    "plain": lambda: {},
    "float16 out": lambda: {"out": np.empty((7, K), np.float16)},
    "out with gaps": lambda: {"out": np.empty((7, 2 * K), np.float32)[:, ::2]},
    "float64": lambda: {"dtype": "float64"},
    "biases": lambda: {"biases": [numbers(E, F, dtype="float16"), None, numbers(E, 2 * K)[:, ::2]]},
    "biases of float64": lambda: {"biases": [None, numbers(E, F, dtype="float64"), None]},
}


@pytest.mark.parametrize("ids_as", [np.int32, np.int64, lambda ids: np.repeat(ids, 2, 1)[:, ::2]])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", X)
def test_second_calls_have_the_bits_of_first_ones(kind, terms, ids_as, slow, by_numpy):
    """On other arrays of the same kind: C serves all, and a plan those that it reads in place."""
    w = layer()
    for _ in range(2):
        x, arrays, (ids, factors) = X[kind](), TERMS[terms](), routed(RNG, 7, 2, E)
        ids = ids.astype(ids_as) if isinstance(ids_as, type) else ids_as(ids)
        factors = factors.astype(np.float16)
        y = qgemm.moe(x, w[:2], w[2], ids, factors, **arrays)
        count = len(slow)
    assert count == 1 + (kind in ("another byte order", "an odd address") or terms == "out with gaps")
    fresh = [qgemm.Tensor(part.format, part.shape, part.blocks) for part in w]
    arrays.pop("out", None)
    native = x.astype(x.dtype.newbyteorder("="))
    expected = qgemm.moe(native, fresh[:2], fresh[2], ids.astype(np.int64), factors.astype(np.float32), **arrays)
    assert_array_equal(y, expected.astype(y.dtype))
    assert not by_numpy


def test_out_may_overlap_what_is_read():
    w, (ids, factors) = layer(), routed(RNG, 5, 2, E)
    for _ in range(2):
        x = numbers(5, K)
        expected = qgemm.moe(x, w[:2], w[2], ids, factors)
        memory = np.concatenate([x.reshape(-1), np.zeros(K, np.float32)])
        qgemm.moe(memory[: 5 * K].reshape(5, K), w[:2], w[2], ids, factors, out=memory[K:].reshape(5, K))
        assert_array_equal(memory[K:].reshape(5, K), expected)
        bias = numbers(E, K)
        expected = qgemm.moe(x, w[:2], w[2], ids, factors, biases=[None, None, bias])
        qgemm.moe(x, w[:2], w[2], ids, factors, biases=[None, None, bias], out=bias[:5])
        assert_array_equal(bias[:5], expected)


@pytest.mark.parametrize("wrong", [-1, E, 2**31, 2**40])
def test_an_id_that_is_no_expert_is_an_error_at_each_call(wrong):
    """Nothing is written then."""
    w, (ids, factors) = layer(), routed(RNG, 5, 2, E)
    ids, x, out = ids.astype(np.int64), numbers(5, K), np.full((5, K), 7, np.float32)
    for name in ("first", "second"):
        if name == "second":
            qgemm.moe(x, w[:2], w[2], ids, factors, out=out.copy())
        bad = ids.copy()
        bad[3, 1] = wrong
        with pytest.raises(IndexError, match="there are experts 0 to 5"):
            qgemm.moe(x, w[:2], w[2], bad, factors, out=out)
        with pytest.raises(IndexError, match="there are experts 0 to 5"):
            qgemm.moe_matmul(x, w[0], bad)
    assert (out == 7).all()


def test_ids_of_one_token_are_read_in_place():
    """A row of a wider table has no gap: nothing is copied at a call."""
    w, x, factors = layer(), numbers(1, K), np.ones((1, 2), np.float32)
    table = np.arange(E * 2).reshape(2, E) % E
    for row in table[:, :2]:
        y = qgemm.moe(x, w[:2], w[2], row[None], factors)
        assert_array_equal(y, qgemm.moe(x, w[:2], w[2], row[None].astype(np.int32), factors))
        assert_array_equal(y, qgemm.moe(x, w[:2], w[2], table[:1, :2], factors))
    assert not any(plan.converts for plan in w[2].plans.values() if isinstance(plan, Plan))


def test_experts_of_no_token_are_not_used():
    """Their weights are NaN, and no y is."""
    w, x = layer(("q4_0",) * 3), numbers(3, K)
    blocks = [part.blocks.copy() for part in w]
    for copy in blocks:
        copy["d"][[0, 2, 3, 5]] = np.nan
    damaged = [qgemm.Tensor("q4_0", part.shape, copy) for part, copy in zip(w, blocks, strict=True)]
    ids, factors = np.array([[4, 1]] * 3), np.ones((3, 2), np.float32)
    assert_array_equal(qgemm.moe(x, damaged[:2], damaged[2], ids, factors), qgemm.moe(x, w[:2], w[2], ids, factors))


def test_plans_are_those_of_other_weights_and_functions_too():
    """Each call finds its own plan among those that down keeps."""
    w, other, (ids, factors), x = layer(), layer(), routed(RNG, 2, 2, E), numbers(2, K)
    fresh = lambda parts: [qgemm.Tensor(part.format, part.shape, part.blocks) for part in parts]  # noqa: E731
    for _ in range(3):
        for pair in (w[:2], other[:2], [w[0], w[0]], w[1::-1]):
            for gate in ("swiglu", "geglu"):
                y = qgemm.moe(x, pair, w[2], ids, factors, gate)
                assert_array_equal(y, qgemm.moe(x, fresh(pair), fresh(w[2:])[0], ids, factors, gate))
        assert_array_equal(qgemm.moe_matmul(x, w[0], ids), qgemm.moe_matmul(x, fresh(w[:1])[0], ids))


@pytest.mark.parametrize("experts_alone", [False, True])
def test_blocks_that_are_put_together_live_until_c_returns(experts_alone):
    """Those of a kbit tensor in a file are new memory at each access, which the next object may overwrite."""
    fmt = qgemm.FORMATS["kbit4"]
    memory = random_experts(fmt, E, 64, 256, RNG)
    moved = qgemm.Tensor(fmt, memory.shape, lambda: memory.blocks.copy())
    w, other = (moved, memory) if experts_alone else (moved[1], memory[1])
    x, ids = numbers(2, 256), np.array([[1, 2], [5, 0]])
    junk = []
    for _ in range(4):
        y = qgemm.moe_matmul(x, w, ids) if experts_alone else qgemm.matmul(x, w)
        junk.append(np.full(memory.blocks.nbytes, 255, np.uint8))
        assert_array_equal(y, qgemm.moe_matmul(x, other, ids) if experts_alone else qgemm.matmul(x, other))
