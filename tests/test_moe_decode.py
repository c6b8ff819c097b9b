"""Products by experts on a GPU without one: launches run the kernel on the host, of the addresses that they get."""

from __future__ import annotations

import itertools
from functools import cache

import cupy_like
import harness
import numpy as np
import pytest
from experts import assert_within, known_layer, known_matmul, random_experts, routed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_on_host import Launch, device, install, on_device
from strategies import EVERY_TILED, by_turns, over_formats, seeds

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import experts, grouped, plan
from qgemm.cuda.kernels import decode, dot_floats
from qgemm.cuda.problem import Gpu
from qgemm.routing import GATE_OF

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
few = settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
Q4_0, Q8_0 = qgemm.FORMATS["q4_0"], qgemm.FORMATS["q8_0"]
TYPES = ("float16", "bfloat16", "float32")
FLOATS = [qgemm.FORMATS[name] for name in ("f16", "bf16", "f32")]
MULTIPLIED = [*EVERY_TILED, *FLOATS]
OF_LAYERS = [qgemm.FORMATS[name] for name in ("q4_0", "q5_1", "q4_k", "q6_k", "mxfp4", "kbit4")] + FLOATS


@pytest.fixture
def host(monkeypatch):
    """CuPy over NumPy, and kernels on the host, of a GPU without cp.async.bulk."""
    install(monkeypatch)
    kernel = cache(harness.Kernel)
    for module in (decode, dot_floats):
        monkeypatch.setattr(module, "load", lambda name, fmt, **template: kernel(name, fmt, **template))
        monkeypatch.setattr(module, "Launch", Launch)
    monkeypatch.setattr(plan, "launch", plan.launch.__wrapped__)
    for module in (plan, grouped):
        monkeypatch.setattr(module, "gpu", lambda device: Gpu(device, 80, 132))
    Launch.seen.clear()


@over_formats(MULTIPLIED)
@few
@given(data=st.data())
def test_each_token_by_its_experts(fmt, data, host):
    """x has one row for a token, or one for each of its experts. Ids have both types; some are no expert."""
    rng, dtype = data.draw(seeds()), by_turns(TYPES if fmt.integer or fmt.plain else TYPES[:2], fmt, MULTIPLIED)
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((1, 3), (1, 3), (1, 4)))
    w = random_experts(fmt, e, data.draw(st.sampled_from([7, 64, 90])), data.draw(st.sampled_from([64, 320])), rng)
    ids, _ = routed(rng, t, top_k, e)
    shape = (t, w.shape[2]) if data.draw(st.booleans()) else (t, top_k, w.shape[2])
    x = (rng.standard_normal(shape) / 64).astype(float_dtype(dtype))
    bias = rng.standard_normal(w.shape[:2]).astype(np.float32) if data.draw(st.booleans()) else None
    given_ids = ids.astype(data.draw(st.sampled_from(["int32", "int64"])))
    nobody = rng.random(ids.shape) < 0.2
    given_ids[nobody] = data.draw(st.sampled_from([-1, e, 1 << 30]))
    y = qgemm.moe_matmul(device(x), on_device(w), device(given_ids), bias=device(bias))
    expected = known_matmul(x.astype(np.float32), w, ids, bias, dtype)
    expected.y[nobody] = expected.bound[nobody] = expected.noise[nobody] = 0
    assert (y.shape, y.dtype) == ((t, top_k, w.shape[1]), np.float32)
    assert not y.get()[nobody].any()
    assert_within(y, expected)


@pytest.mark.parametrize(
    ("fmt", "name"),
    list(zip(OF_LAYERS, itertools.cycle(GATE_OF), strict=False)),
    ids=lambda value: getattr(value, "name", value),
)
@few
@given(data=st.data())
def test_a_layer(fmt, name, data, host):
    """Two launches; gate and up as two tensors, and as one if F is a multiple of 64; gates and types take turns."""
    rng, dtype = data.draw(seeds()), by_turns(TYPES if fmt.integer or fmt.plain else TYPES[:2], fmt, OF_LAYERS)
    t, top_k, e = (data.draw(st.integers(*ends)) for ends in ((1, 3), (1, 4), (1, 4)))
    f = data.draw(st.sampled_from([64, 192] if fmt.weights < 100 else [256]))
    gate, up = (random_experts(fmt, e, f, 96, rng) for _ in range(2))
    down = random_experts(data.draw(st.sampled_from([fmt, Q8_0])), e, gate.shape[2], f, rng)
    ids, weights = routed(rng, t, top_k, e)
    x = (rng.standard_normal((t, gate.shape[2])) / 64).astype(float_dtype(dtype))
    arrays = [(rng.standard_normal((e, n)) / 8).astype(np.float32) for n in (f, f, down.shape[1])]
    biases = [None] * 3 if data.draw(st.booleans()) else arrays
    merged = data.draw(st.booleans())
    if merged:
        both = qgemm.Tensor(fmt, (e, 2 * f, gate.shape[2]), np.concatenate([gate.blocks, up.blocks], axis=1))
        of_both = None if biases[0] is None else np.concatenate(biases[:2], axis=1)
        gate_up, passed = on_device(both), [device(of_both), device(biases[2])]
    else:
        gate_up, passed = [on_device(gate), on_device(up)], [device(bias) for bias in biases]
    y = qgemm.moe(device(x), gate_up, on_device(down), device(ids), device(weights), name, biases=passed)
    expected = known_layer(x.astype(np.float32), gate, up, down, ids, weights, GATE_OF[name], biases, dtype)
    assert_within(y, expected)
    assert [grid[1] for grid in Launch.seen] == [t * top_k, t]
    Launch.seen.clear()


@pytest.mark.parametrize(
    "shares", [{"cluster_split_k": 2}, {"cluster_split_k": 8}, {"warp_split_k": 1, "m16_tiles": 8}], ids=str
)
def test_shares_of_a_layer(shares, host, monkeypatch):
    """CTAs of a cluster share K; a thread of a CTA of one warp has several rows. Of a gate, and of a sum over a token's
    experts, one of which is none; each expert's K is a few tiles long.
    """
    chosen = decode.decode_ranked
    monkeypatch.setattr(
        decode, "decode_ranked", lambda *p: [row._replace(**shares) for row in chosen(*p)]
    )  # fmt: skip
    rng = np.random.default_rng(4)
    gate, up, down = (random_experts(Q4_0, 5, *shape, rng) for shape in ((96, 320), (96, 320), (320, 96)))
    ids, weights = routed(rng, 3, 3, 5)
    given_ids, weights[1, 2] = ids.copy(), 0
    given_ids[1, 2] = -1
    x = (rng.standard_normal((3, 320)) / 64).astype(np.float16)
    biases = [(rng.standard_normal((5, n)) / 8).astype(np.float32) for n in (96, 96, 320)]
    y = qgemm.moe(
        device(x), [on_device(gate), on_device(up)], on_device(down), device(given_ids), device(weights),
        biases=[device(bias) for bias in biases],
    )  # fmt: skip
    assert_within(y, known_layer(x.astype(np.float32), gate, up, down, ids, weights, "silu", biases, "float16"))


def test_a_token_without_experts_is_zero_whatever_the_first_expert_holds(host):
    """W of expert 0 is NaN, and no token of the call is its: one has no expert at all."""
    rng = np.random.default_rng(5)
    gate, up, down = (random_experts(Q4_0, 3, *shape, rng) for shape in ((64, 96), (64, 96), (96, 64)))
    for w in (gate, up, down):
        w.blocks["d"][0] = np.nan
    ids = np.array([[-1, 3], [2, -1], [1, 2]])
    x = (rng.standard_normal((3, 96)) / 64).astype(np.float16)
    on = [on_device(w) for w in (gate, up, down)]
    weights = np.full(ids.shape, 0.5, np.float32)
    y = qgemm.moe(device(x), on[:2], on[2], device(ids), device(weights)).get()
    assert np.isfinite(y).all()
    assert not y[0].any()
    assert y[1:].any(1).all()


@few
@given(data=st.data())
def test_gate_and_up_of_two_formats(data, host):
    rng = data.draw(seeds())
    gate, up, down = (
        random_experts(fmt, 3, n, k, rng) for fmt, n, k in ((Q4_0, 96, 64), (Q8_0, 96, 64), (Q4_0, 64, 96))
    )
    ids, weights = routed(rng, 2, 2, 3)
    x = (rng.standard_normal((2, 64)) / 64).astype(np.float16)
    biases = [(rng.standard_normal((3, n)) / 8).astype(np.float16) for n in (96, 96, 64)]
    on = [on_device(w) for w in (gate, up, down)]
    passed = [device(bias) for bias in biases]
    y = qgemm.moe(device(x), on[:2], on[2], device(ids), device(weights), biases=passed, dtype="float16")
    expected = known_layer(x.astype(np.float32), gate, up, down, ids, weights, "silu", biases, "float16")
    assert y.dtype == np.float16
    assert_within(y, expected, "float16")


def layer(seed=0):
    rng = np.random.default_rng(seed)
    weights = [random_experts(Q4_0, 4, *shape, rng) for shape in ((64, 96), (64, 96), (96, 64))]
    ids, factors = routed(rng, 3, 2, 4)
    return weights, ids, factors, (rng.standard_normal((3, 96)) / 64).astype(np.float16)


def test_outputs_of_any_type_order_and_place(host):
    weights, ids, factors, x = layer()
    gate, up, down = map(on_device, weights)
    want = qgemm.moe(device(x), (gate, up), down, device(ids), device(factors))
    for dtype in ("float16", "bfloat16", "float64"):
        out = cupy_like.zeros((3, 192), float_dtype(dtype))[:, ::2]
        assert qgemm.moe(device(x), (gate, up), down, device(ids), device(factors), out=out) is out
        assert out.get().tobytes() == want.get().astype(out.dtype).tobytes()
        y = qgemm.moe(device(x), (gate, up), down, device(ids), device(factors), dtype=dtype)
        assert y.get().tobytes() == out.get().tobytes()
    over = device(x)
    assert qgemm.moe(over, (gate, up), down, device(ids), device(factors), out=over) is over
    assert over.get().tobytes() == want.get().astype(np.float16).tobytes()
    wide = qgemm.moe(device(x.astype(np.float64)), (gate, up), down, device(ids), device(factors.astype(np.float64)))
    np.testing.assert_allclose(wide.get(), want.get(), rtol=2e-3, atol=1e-5)


def test_no_tokens_and_as_many_as_several_grids(host, monkeypatch):
    weights, ids, factors, x = layer()
    gate, up, down = map(on_device, weights)
    none = device(ids[:0])
    assert qgemm.moe(device(x[:0]), (gate, up), down, none, device(factors[:0])).shape == (0, 96)
    assert qgemm.moe_matmul(device(x[:0]), gate, none).shape == (0, 2, 64)
    want = qgemm.moe(device(x), (gate, up), down, device(ids), device(factors))
    monkeypatch.setattr(experts, "MAX_SLOTS", 2)
    down.plans.clear()  # remembered launches would be entered again
    Launch.seen.clear()
    y = qgemm.moe(device(x), (gate, up), down, device(ids), device(factors))
    assert [rows for _, rows in Launch.seen] == [2, 2, 2, 2, 1]
    assert y.get().tobytes() == want.get().tobytes()


def test_errors_name_what_came_and_what_fits(host):
    weights, ids, factors, x = layer()
    gate, up, down = map(on_device, weights)
    narrow = [on_device(random_experts(Q4_0, 4, n, k, np.random.default_rng(0))) for n, k in ((64, 64), (64, 32))]
    for match, call in (
        (r"'a16'", lambda: qgemm.moe_matmul(device(x), gate, device(ids), "a8")),
        (r"x is on a CUDA device, w on the host", lambda: qgemm.moe_matmul(device(x), weights[0], device(ids))),
        (r"w is on a CUDA device", lambda: qgemm.moe_matmul(x, gate, ids)),
        (r"ids is on the host", lambda: qgemm.moe_matmul(device(x), gate, ids)),
        (r"weights is on the host", lambda: qgemm.moe(device(x), (gate, up), down, device(ids), factors)),
        (
            r"F is a multiple of 64 .* got 32",
            lambda: qgemm.moe(device(x[:, :64]), *narrow, device(ids), device(factors)),
        ),
        (r"out must be on the CUDA device", lambda: qgemm.moe_matmul(device(x), gate, device(ids), out=x)),
    ):
        with pytest.raises(qgemm.UnsupportedError, match=match):
            call()
    many = np.zeros((3, 40), np.int32)
    with pytest.raises(qgemm.UnsupportedError, match="at most 32 experts of a token by this kernel, got 40"):
        qgemm.moe(device(x), (gate, up), down, device(many), device(many.astype(np.float32)))


def test_ids_are_looked_at_where_that_is_asked_for(host):
    weights, ids, factors, x = layer()
    gate, up, down = map(on_device, weights)
    for wrong, match in ((4, "ids are 0 to 4"), (-1, "ids are -1 to")):
        bad = ids.copy()
        bad[0, 0], bad[1, 0] = wrong, 0
        with pytest.raises(IndexError, match=f"{match}.*there are experts 0 to 3"):
            qgemm.moe_matmul(device(x), gate, device(bad), check_ids=True)
        with pytest.raises(IndexError, match=match):
            qgemm.moe(device(x), (gate, up), down, device(bad), device(factors), check_ids=True)
    y = qgemm.moe_matmul(device(x), gate, device(ids), check_ids=True)
    assert y.shape == (*ids.shape, gate.shape[1])
    empty = qgemm.moe_matmul(device(x[:0]), gate, device(ids[:0]), check_ids=True)
    assert empty.shape == (0, ids.shape[1], gate.shape[1])
