"""qgemm.moe_matmul and qgemm.moe on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from experts import assert_within, golden_experts, known_layer, known_matmul, random_experts, routed
from helpers import normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import FORMATS, PRODUCTS, over_formats, seeds

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cpu import experts as experts_on_the_cpu
from qgemm.routing import GATE_OF

pytestmark = pytest.mark.usefixtures("engine")
MULTIPLY = [fmt for fmt in FORMATS if fmt.levels is not None]
few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
Q4_0, Q8_0 = qgemm.FORMATS["q4_0"], qgemm.FORMATS["q8_0"]


@over_formats(MULTIPLY)
@few
@given(data=st.data())
def test_each_token_by_its_experts(fmt, data):
    """x of every layout, a row for a token or for each of its experts; with a bias of each and without."""
    rng, dtype = data.draw(seeds()), data.draw(st.sampled_from(["float32", "float16", "float64"]))
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((0, 9), (1, 4), (1, 6)))
    w = random_experts(fmt, e, data.draw(st.sampled_from([1, 40])), 64, rng)
    ids, _ = routed(rng, t, top_k, e, data.draw(st.booleans()))
    shape = (t, w.shape[2]) if data.draw(st.booleans()) else (t, top_k, w.shape[2])
    x = (rng.standard_normal((*shape[:-1], 2 * shape[-1])) / 8).astype(dtype)[..., ::2]
    bias = rng.standard_normal(w.shape[:2]).astype(np.float32) if data.draw(st.booleans()) else None
    y = qgemm.moe_matmul(x, w, ids.astype(data.draw(st.sampled_from(["int32", "int64"]))), bias=bias)
    assert (y.shape, y.dtype) == ((t, top_k, w.shape[1]), np.float32)
    assert_within(y, known_matmul(x.astype(np.float32), w, ids, bias), tiny=2.0**-30)


@pytest.mark.parametrize("fmt", [fmt for fmt, activation in PRODUCTS if activation == "a8"], ids=str)
def test_integer_products(fmt):
    """Those of matmul, row by row."""
    rng = np.random.default_rng(1)
    w, (ids, _) = random_experts(fmt, 4, 40, 256, rng), routed(rng, 6, 2, 4)
    for x in (normal(6, w.shape[2]), normal(6, 2, w.shape[2])):
        y = qgemm.moe_matmul(x, w, ids, "a8")
        for t, j in np.ndindex(ids.shape):
            row = x[t] if x.ndim == 2 else x[t, j]
            np.testing.assert_allclose(y[t, j], qgemm.matmul(row, w[ids[t, j]], "a8"), rtol=1e-5, atol=1e-4)


@over_formats([fmt for fmt in MULTIPLY if fmt.name in ("q4_0", "q4_k", "mxfp4", "kbit4", "bf16", "q2_k")])
@pytest.mark.parametrize("name", GATE_OF)
@few
@given(data=st.data())
def test_a_layer(fmt, name, data):
    rng = data.draw(seeds())
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((0, 7), (1, 4), (1, 6)))
    gate, up = (random_experts(fmt, e, max(64, fmt.weights), 64, rng) for _ in range(2))
    down = random_experts(Q8_0, e, gate.shape[2], gate.shape[1], rng)
    ids, weights = routed(rng, t, top_k, e, data.draw(st.booleans()))
    x = (rng.standard_normal((t, gate.shape[2])) / 16).astype(np.float32)
    rows = (gate.shape[1], up.shape[1], down.shape[1])
    drawn = [rng.standard_normal((e, n)).astype(np.float32) for n in rows]
    biases = [bias if data.draw(st.booleans()) else None for bias in drawn]
    y = qgemm.moe(x, (gate, up), down, ids, weights, name, biases=biases)
    assert_within(y, known_layer(x, gate, up, down, ids, weights, GATE_OF[name], biases, in_float=True), tiny=2.0**-30)
    both = np.concatenate([gate.blocks, up.blocks], axis=1)
    merged = qgemm.Tensor(fmt, (e, 2 * gate.shape[1], gate.shape[2]), both)
    if (biases[0] is None) == (biases[1] is None):
        of_both = None if biases[0] is None else np.concatenate(biases[:2], axis=1)
        np.testing.assert_array_equal(qgemm.moe(x, merged, down, ids, weights, name, biases=[of_both, biases[2]]), y)


@pytest.mark.parametrize("spelled", ["mxfp4", "q4_k"])
def test_bytes_of_ggml_as_experts(spelled):
    """Those of a file: the values that ggml's C reads are multiplied."""
    w, values = golden_experts(qgemm.FORMATS[spelled], 5, 11)
    rng = np.random.default_rng(5)
    ids, _ = routed(rng, 7, 3, 5)
    x = (rng.standard_normal((7, 512)) / 16).astype(np.float32)
    y, expected = qgemm.moe_matmul(x, w, ids), known_matmul(x, w, ids)
    exact = np.einsum("tk,tjnk->tjn", x.astype(np.float64), values[ids])
    np.testing.assert_allclose(expected.y, exact, rtol=1e-12, atol=1e-12)
    assert_within(y, expected, tiny=2.0**-30)


def layer(seed=0, e=5, f=64, k=96):
    rng = np.random.default_rng(seed)
    weights = [random_experts(Q4_0, e, *shape, rng) for shape in ((f, k), (f, k), (k, f))]
    ids, factors = routed(rng, 6, 2, e)
    return weights, ids, factors, (rng.standard_normal((6, k)) / 8).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_outputs(dtype):
    """New ones and given ones, of any type and strides."""
    (gate, up, down), ids, factors, x = layer()
    for call in (
        lambda **to: qgemm.moe(x, (gate, up), down, ids, factors, **to),
        lambda **to: qgemm.moe_matmul(x, gate, ids, **to),
    ):
        want = call()
        y = call(dtype=dtype)
        assert y.dtype == float_dtype(dtype)
        np.testing.assert_array_equal(y, want.astype(y.dtype))
        out = np.zeros((*y.shape[:-1], 2 * y.shape[-1]), y.dtype)[..., ::2]
        assert call(out=out) is out
        np.testing.assert_array_equal(out, y)


def test_out_may_be_x():
    (gate, up, down), ids, factors, x = layer()
    want = qgemm.moe(x, (gate, up), down, ids, factors)
    qgemm.moe(x, (gate, up), down, ids, factors, out=x)
    np.testing.assert_array_equal(x, want)


def test_a_nan_of_an_expert_or_a_token_stays_there():
    (gate, up, down), ids, factors, x = layer()
    blocks = gate.blocks.copy()
    blocks["d"][3] = np.nan
    damaged = qgemm.Tensor(gate.format, gate.shape, blocks)
    x[2] = np.nan
    y = qgemm.moe(x, (damaged, up), down, ids, factors)
    hit = (ids == 3).any(axis=1) | (np.arange(len(x)) == 2)
    assert hit.any()
    assert not hit.all()
    assert np.isnan(y[hit]).all()
    assert np.isfinite(y[~hit]).all()


def test_experts_of_no_token_are_not_read(monkeypatch):
    """By NumPy; tests/test_experts_in_c.py has C."""
    monkeypatch.setenv("QGEMM_CPU", "numpy")
    (gate, up, down), ids, factors, x = layer()
    seen = []

    class Counted(qgemm.Tensor):
        def __getitem__(self, index):
            seen.append(index)
            return qgemm.Tensor(self.format, self.shape, self.blocks)[index]

    counted = [Counted(w.format, w.shape, w.blocks) for w in (gate, up, down)]
    ids[...] = [[4, 1]]
    qgemm.moe(x, counted[:2], counted[2], ids, factors)
    assert sorted(set(seen)) == [1, 4]


@pytest.mark.parametrize("count", [8, 1000])
@pytest.mark.parametrize("wrong", [-1, 5])
def test_few_and_many_ids_are_checked(count, wrong):
    """Few are grouped in Python, many by NumPy: an id that is no expert is named by both."""
    (gate, *_), *_ = layer()
    ids = np.zeros((count, 1), np.int32)
    ids[count // 2] = wrong
    with pytest.raises(IndexError, match=rf"ids are {min(wrong, 0)} to {max(wrong, 0)}, there are experts 0 to 4"):
        qgemm.moe_matmul(np.ones((count, gate.shape[2]), np.float32), gate, ids)


def test_errors_name_what_came_and_what_fits():
    (gate, up, down), ids, factors, x = layer()

    def moe(**changed):
        arguments = {"x": x, "gate_up": (gate, up), "down": down, "ids": ids, "weights": factors} | changed
        return qgemm.moe(**arguments)

    wrong = ids.copy()
    wrong[1, 1] = 5
    for error, match, call in (
        (IndexError, r"ids are \d to 5, there are experts 0 to 4", lambda: moe(ids=wrong)),
        (IndexError, r"ids are -6 to", lambda: qgemm.moe_matmul(x, gate, -ids - 2)),
        (TypeError, r"ids are of int32 or int64, got float32", lambda: moe(ids=factors)),
        (ValueError, r"ids are \(T, top_k\) of x \(6, 96\), got shape \(5, 2\)", lambda: moe(ids=ids[:5])),
        (ValueError, r"weights are of the shape of ids, \(6, 2\), got \(6, 1\)", lambda: moe(weights=factors[:, :1])),
        (TypeError, r"weights must be of float16, .* got int32", lambda: moe(weights=ids)),
        (ValueError, r"x is \(T, K\) with K = 96", lambda: moe(x=x[:, :64])),
        (ValueError, r"x is \(T, K\) with K = 96", lambda: moe(x=x[:, None].repeat(2, 1))),
        (ValueError, r"x is \(T, K\) or \(T, top_k, K\) with", lambda: qgemm.moe_matmul(x[0], gate, ids)),
        (ValueError, r"no layer: down \[E, K, F\] goes with \[E, 64, 96\]", lambda: moe(gate_up=(gate, down))),
        (ValueError, r"no layer: down .* \[E, 128, 96\]", lambda: moe(gate_up=gate)),
        (ValueError, r"gate_up is one tensor .* got 3", lambda: moe(gate_up=(gate, up, up))),
        (TypeError, r"experts are a Tensor or what its to_device\(\) gives, got numpy", lambda: moe(down=x)),
        (ValueError, r"experts are weights \(E, N, K\)", lambda: qgemm.moe_matmul(x, gate[0], ids)),
        (ValueError, r"activation is 'swiglu', .* got 'relu'", lambda: moe(activation="relu")),
        (ValueError, r"biases has 1 entries for 3 weights", lambda: moe(biases=[None])),
        (ValueError, r"a bias of .* has shape \(5, 64\), got \(6, 96\)", lambda: moe(biases=[x, None, None])),
        (ValueError, r"out has shape \(6, 2\), y has \(6, 96\)", lambda: moe(out=factors)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_experts_of_a_file_are_checked_at_each_call(tmp_path):
    """Also once their matrices are kept: later calls have the same bits, and a closed file is an error."""
    gate, up, down = (random_experts(qgemm.FORMATS["q4_0"], 4, 64, 64, np.random.default_rng(i)) for i in range(3))
    qgemm.write(tmp_path / "m.gguf", {"gate": gate, "up": up, "down": down})
    x, ids, factors = normal(1, 64), np.array([[2, 0]]), np.ones((1, 2), np.float32)
    file = qgemm.open(tmp_path / "m.gguf")
    weights = file["gate"], file["up"], file["down"]
    first, second = (qgemm.moe(x, weights[:2], weights[2], ids, factors) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, qgemm.moe(x, (gate, up), down, ids, factors))
    file.close()
    with pytest.raises(qgemm.GGUFError, match="closed"):
        qgemm.moe(x, weights[:2], weights[2], ids, factors)


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_few_ids_are_sorted_without_numpy(tokens, monkeypatch):
    """As NumPy sorts many ids, with the same bits of y: its functions for that cost more than small products."""
    rng = np.random.default_rng(tokens)
    gate, up, down = (random_experts(Q4_0, 5, *shape, rng) for shape in ((32, 64), (32, 64), (64, 32)))
    x, ids = rng.standard_normal((tokens, 64), np.float32), rng.integers(0, 5, (tokens, 4))
    weights = rng.random((tokens, 4), np.float32)

    def products():
        return qgemm.moe(x, (gate, up), down, ids, weights), qgemm.moe_matmul(x, gate, ids, "a8")

    with monkeypatch.context() as sorted_by_numpy:
        sorted_by_numpy.setattr(experts_on_the_cpu, "FEW_IDS", 0)
        expected = products()
    monkeypatch.setattr(np, "argsort", None)
    for y, other in zip(products(), expected, strict=True):
        np.testing.assert_array_equal(y.view(np.uint32), other.view(np.uint32))
