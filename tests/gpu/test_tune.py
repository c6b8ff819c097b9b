"""`qgemm.tune` on a GPU: the fastest config in spite of a cost model that is wrong on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from eight_bit_codes import codes_of
from helpers import check_product, cupy, random_tensor
from measured_errors import of_groups

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda import clock, tuner
from qgemm.cuda.call import plan
from qgemm.cuda.driver import tuned
from qgemm.cuda.kernels import prefill_sm80, routes, sm90_cost
from qgemm.cuda.problem import Output, gpu
from qgemm.once import Once

WITHIN = 1.03  # limit relative to the time of the fastest config
ATTEMPTS, REPEATS = 3, 15  # other processes may use the GPU


@pytest.fixture
def stored(monkeypatch):
    """The file of times in memory: name -> data."""
    files: dict[str, bytes] = {}
    monkeypatch.setattr(tuned, "load", lambda name, effect: files.get(name))
    monkeypatch.setattr(tuned, "store", lambda name, data: files.update({name: data}) is None)
    monkeypatch.setattr(tuned, "_times", Once())
    return files


@pytest.fixture
def wrong(monkeypatch):
    """Cost models that predict the inverse of the measured times."""
    for module in (sm90_cost, prefill_sm80):
        predicted = module.predicted
        monkeypatch.setattr(module, "predicted", lambda *args, predicted=predicted: 1e3 / predicted(*args) or np.inf)


def problem(w, m):
    on = gpu(0)
    p = plan.problem(w, plan.Source(m, w.shape[1], "float16"))
    assert (p.sm, p.sms) == (on.sm, on.sms)
    return p._replace(outputs=(Output(w.shape[0], "float16"),))


@pytest.mark.parametrize("m", [1, 64])
def test_a_wrong_cost_model_costs_at_most_three_percent(m, stored, wrong):
    cupy()
    rng = np.random.default_rng(0)
    w = random_tensor(qgemm.FORMATS["q4_0"], 2048, 2048, rng)
    done = qgemm.tune(w, m, activation="a16", dtype="float16", progress=False)
    assert done.finished
    assert done.stored
    assert len(stored) == 1
    timer = clock.GpuClock()
    timer.matrix(w)
    p = problem(w.to_device(), m)
    kernel = routes.route(p._replace(outputs=())).kernel
    choice = tuner.Candidate(kernel, kernel.choose(p)).name
    for _ in range(ATTEMPTS):
        candidates = tuner.candidates(p._replace(times=None))
        us = timer.us(p._replace(times=None), candidates, REPEATS)
        times = {c.name: time for c, time in zip(candidates, us, strict=True) if time is not None}
        assert len(times) == len(candidates), "a candidate fails on this GPU"
        if times[choice] <= WITHIN * min(times.values()):
            return
    pytest.fail(f"{choice} takes {times[choice]:.2f} us, the fastest {min(times.values()):.2f} us")


@pytest.mark.parametrize("activation", ["a16", "a8", "a8_g256"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_candidate_computes_the_product(activation, dtype, stored):
    """None of the configs that are timed is refused, and products afterwards are right."""
    cp, rng = cupy(), np.random.default_rng(1)
    w = random_tensor(qgemm.FORMATS["q4_k"], 320, 1024, rng)
    weights = w.to_device()
    rows = (1, 7, 16, 70)
    qgemm.tune(weights, rows, activation=activation, dtype=dtype, minutes=10, progress=False)
    timed = {row.m: row.us for row in tuned.read(tuned.machine(0))}
    for m in rows:
        p = plan.problem(weights, plan.Source(m, 1024, dtype), activation)
        names = {candidate.name for candidate in tuner.candidates(p._replace(times=None))}
        times = {(kernel, config) for kernel, us in timed.get(m, {}).items() for config in us}
        assert times == (names if len(names) > 1 else set())
        x = cp.asarray(rng.standard_normal((m, 1024), np.float32)).astype(float_dtype(dtype))
        y = qgemm.matmul(x, weights, activation).get()
        if activation == "a8_g256":
            of_groups(qgemm.quantize_activations(x.get(), activation).blocks, codes_of_kernel(w, weights)).check(y)
        else:
            check_product(y, x.get(), w, activation=activation)


def codes_of_kernel(w, on_gpu):
    """The codes of eight bits to which the kernels for at most 64 tokens round W: nearly those of the host."""
    identity = cupy().eye(w.shape[1], dtype=np.float32).reshape(-1, 64, w.shape[1])
    return codes_of(w, np.concatenate([qgemm.matmul(rows, on_gpu, "a8_g256").get() for rows in identity]))


def test_a_clock_refuses_a_wrong_product(stored, monkeypatch):
    """A kernel that computes something else on a GPU is passed over."""
    cp, rng = cupy(), np.random.default_rng(2)
    w = random_tensor(qgemm.FORMATS["q4_0"], 128, 256, rng)
    timer = clock.GpuClock()
    timer.matrix(w)
    p = problem(w.to_device(), 16)
    first = tuner.candidates(p)[0]
    assert timer.us(p, [first], 1) != [None]
    monkeypatch.setattr(clock, "multiply_by", lambda x, w, y, choice: y.fill(cp.float16(1)))
    assert timer.us(p, [first], 1) == [None]
