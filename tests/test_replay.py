"""Replays of recorded calls: pointers, guards, scratch memory, launches that are bound to addresses."""

from __future__ import annotations

import cupy_like
import moe_on_host
import numpy as np
import pytest
from launches_like import installed

import qgemm
from qgemm import routing
from qgemm.cuda.call import grouped, plan, replay
from qgemm.cuda.call.arrays import NULL, Call, Pointer
from qgemm.cuda.libraries import default_library

K = 64
WEIGHTS = 0x1000


@pytest.fixture
def gpus(monkeypatch):
    return installed(monkeypatch)


class Noted:
    """A launch that notes its arguments; with statuses it can be bound, and the bound one returns them in turn."""

    def __init__(self, *statuses):
        self.calls, self.entered, self.statuses = [], [], list(statuses)
        if statuses:
            self.bound = lambda *args, into=None: lambda: self.entered.append(args) or self.statuses.pop(0)

    def __call__(self, *args):
        self.calls.append(args)


def recorded(arrays, launches, outputs=1, outs=0, reads=(16,), scratch=()):
    """A call on arrays, x, outputs and others, as the slow path leaves it."""
    bases = len(arrays) + 1
    call = Call(
        arrays[0], default_library(), 0, 7,
        [0, *(array.data.ptr for array in arrays), *([0] * len(scratch))],
        [0, *(array.nbytes for array in arrays), *scratch],
        [1, *reads, *([1] * (bases + len(scratch) - 1 - len(reads)))], True,
    )  # fmt: skip
    call.ys, call.outs, call.scratch = list(arrays[1 : 1 + outputs]), outs, list(scratch)
    call.launches = [(launch, tuple(pointers)) for launch, pointers in launches]
    return call


def arrays(*shapes):
    return [cupy_like.zeros(shape, np.float32) for shape in shapes]


def test_pointers_follow_the_arrays_of_a_call(gpus):
    """Weights stay, arrays move, offsets count from their array."""
    x, y, bias = arrays((2, K), (2, 8), 8)
    launch = Noted()
    pointers = Pointer(1), Pointer(0, WEIGHTS), Pointer(2), NULL, Pointer(3, 16)
    run = replay._run(recorded([x, y, bias], [(launch, pointers)], outs=1), single=True)
    other, out, added = arrays((2, K), (2, 8), 8)
    assert run(other, out, added) is out
    assert launch.calls == [(7, other.data.ptr, WEIGHTS, out.data.ptr, 0, added.data.ptr + 16)]


def test_new_outputs_have_the_shapes_and_types_of_the_record(gpus):
    x, first, second = arrays((2, K), (2, 8), (2, 5))
    launch = Noted()
    run = replay._run(recorded([x, first, second], [(launch, [Pointer(2), Pointer(3)])], outputs=2), single=False)
    ys = run(x)
    assert [(y.shape, y.dtype) for y in ys] == [((2, 8), np.float32), ((2, 5), np.float32)]
    assert launch.calls == [(7, ys[0].data.ptr, ys[1].data.ptr)]


def test_arrays_that_kernels_cannot_use_are_refused(gpus):
    """x off its alignment, an output over x or over another output, a residual that is nearly its y; not y itself."""
    memory = cupy_like.zeros(64 * K, np.float32)
    x, y, residual = (memory[i * 256 :][:256] for i in range(3))
    launch = Noted()
    call = recorded([x, y, residual], [(launch, [Pointer(1), Pointer(2), Pointer(3)])], outs=1)
    call.residuals.add((2, 3))
    run = replay._run(call, single=True)
    assert run(x, y, residual) is y
    assert run(x, y, y) is y
    assert run(memory[1:257], y, residual) is None
    assert run(x, memory[128:384], residual) is None
    assert run(x, y, memory[260:516]) is None
    assert len(launch.calls) == 2


@pytest.mark.parametrize("limit", [plan.SCRATCH_BYTES, 0])
def test_scratch_memory_is_of_the_stream_or_of_the_call(gpus, monkeypatch, limit):
    """Its pieces lie apart; pieces of a workspace are those of every call on the stream."""
    monkeypatch.setattr(replay, "SCRATCH_BYTES", limit)
    x, y = arrays((2, K), (2, 8))
    launch = Noted()
    call = recorded([x, y], [(launch, [Pointer(1), Pointer(3), Pointer(4, 8), Pointer(2)])], scratch=(100, 300))
    run = replay._run(call, single=True)
    run(x)
    run(x)
    (_, _, first, second, _), (*_, repeated, _) = launch.calls
    assert abs(second - 8 - first) >= 100
    if limit:
        assert (second - 8 - first, repeated) == (256, second)


def test_launches_are_bound_to_addresses_that_come_again(gpus):
    """The third call enters the driver alone; a status that is not 0 goes back to the launch itself."""
    x, y = arrays((2, K), (2, 8))
    launch = Noted(0, 0, 1)
    run = replay._run(recorded([x, y], [(launch, [Pointer(1), Pointer(2)])], outs=1), single=True)
    args = 7, x.data.ptr, y.data.ptr
    for calls, entered in ((1, 0), (1, 1), (1, 2), (2, 3)):
        run(x, y)
        assert (launch.calls, launch.entered) == ([args] * calls, [args] * entered)
    run(*arrays((2, K), (2, 8)))
    assert len(launch.calls) == 3


def test_few_addresses_are_bound(gpus, monkeypatch):
    monkeypatch.setattr(replay, "MAX_BOUND", 3)
    x, y = arrays((2, K), (2, 8))
    launch = Noted(*[0] * 99)
    run = replay._run(recorded([x, y], [(launch, [Pointer(1), Pointer(2)])], outs=1), single=True)
    others = [arrays((2, K), (2, 8)) for _ in range(5)]
    for pair in others:
        run(*pair)
        run(*pair)
    assert (len(launch.calls), len(launch.entered)) == (5, 5)
    run(*others[0])  # forgotten, as new
    assert (len(launch.calls), len(launch.entered)) == (6, 5)


def test_another_device_is_left_to_the_slow_path(gpus):
    x, y = arrays((2, K), (2, 8))
    launch = Noted()
    run = replay._run(recorded([x, y], [(launch, [Pointer(1), Pointer(2)])], outs=1), single=True)
    with cupy_like.Device(1):
        assert run(x, y) is None
    assert launch.calls == []


def test_an_array_may_be_given_twice(gpus):
    """x is its own residual: both pointers follow it."""
    rng = np.random.default_rng(0)
    w = rng.integers(-4, 5, (K, K))
    on_device = gpus.tensor(w)
    for _ in range(3):
        x = cupy_like.asarray(rng.integers(-4, 5, (2, K)).astype(np.float16))
        y = qgemm.matmul(x, on_device, residual=x)
        np.testing.assert_array_equal(y.get(), x.get().astype(np.float64) @ w.T + x.get())
    assert gpus.slow_paths == 1


def test_several_weights_are_not_an_epilogue(gpus):
    """Serials of weights and flags of absent arrays stand in one key."""
    first, second = (gpus.tensor(np.full((K, K), value)) for value in (1, 2))
    first.serial, second.serial = 2, 3
    x = cupy_like.asarray(np.ones((1, K), np.float16))
    for _ in range(2):
        a, b = qgemm.matmul_many(x, [first, second])
        assert (a.get() == K).all()
        assert (b.get() == 2 * K).all()
        (alone,) = qgemm.matmul_many(x, [first])
        assert (alone.get() == K).all()
        assert (qgemm.matmul(x, first, bias=cupy_like.zeros(K, np.float32)).get() == K).all()
    assert gpus.slow_paths == 3


def test_a_layer_of_experts_is_checked_in_its_first_call_alone(gpus, monkeypatch):
    """Once, before its launches are recorded; the next call finds them by its arrays."""
    checks, launch = [], Noted(0)
    layer_of = routing.layer_of
    monkeypatch.setattr(routing, "layer_of", lambda *layer: checks.append(layer) or layer_of(*layer))
    monkeypatch.setattr(grouped, "gpu", plan.gpu)
    monkeypatch.setattr(plan, "launch", lambda kernel, p: launch)
    gate, up, down = (
        moe_on_host.on_device(qgemm.quantize(np.zeros((4, n, k), np.float32), "q4_0"))
        for n, k in ((128, K), (128, K), (K, 128))
    )
    ids, weights = cupy_like.zeros((1, 2), np.int32), cupy_like.zeros((1, 2), np.float32)
    for _ in range(2):
        qgemm.moe(cupy_like.zeros((1, K), np.float16), (gate, up), down, ids, weights)
        assert len(checks) == 1
    assert len(launch.calls) == 4
