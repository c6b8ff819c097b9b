"""Calls on a GPU without one: the slow path and the fast one, over arrays of tests/cupy_like.py.

Launches are computed on the host from the addresses that they get: the arrays that a plan passes on are multiplied.
"""

from __future__ import annotations

import threading

import cupy_like
import numpy as np
import pytest
from helpers import at_once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches_like import installed

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.call import plan, replay
from qgemm.cuda.problem import Q8_1, Gpu
from qgemm.gating import gated_by

K = 64


@pytest.fixture
def gpus(monkeypatch):
    """CuPy over NumPy, and kernels that compute on the host."""
    return installed(monkeypatch)


def near(got, want, dtype):
    """Equal but for one rounding to a type."""
    relative = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-22)
    np.testing.assert_allclose(got.get().astype(np.float64), want, rtol=relative, atol=1e-3)


def values(rng, shape, dtype):
    """Small integers, exact in every type."""
    return cupy_like.asarray(rng.integers(-4, 5, shape), float_dtype(dtype))


FLOATS = ("float16", "bfloat16", "float32")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_second_calls_take_the_fast_path(gpus, data):
    """Every route, activation and type; with an epilogue or without; into new arrays and given ones."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    activation, dtype = data.draw(st.sampled_from(["a16", "a8"])), data.draw(st.sampled_from(FLOATS))
    m, n = data.draw(st.sampled_from([1, 2, 5, 16, 17, 70])), data.draw(st.sampled_from([1, 40]))
    w = rng.integers(-4, 5, (n, K))
    on_device, kind = gpus.tensor(w), data.draw(st.sampled_from(FLOATS))
    with_out, bias_kind, residual_kind = (
        data.draw(st.booleans()),
        *data.draw(st.tuples(*[st.sampled_from([None, *FLOATS])] * 2)),
    )
    adds = plan.served(on_device, plan.Source(m, K, dtype), activation).kernel.adds
    for turn in range(3):
        x = values(rng, (m, K), dtype)
        bias = None if bias_kind is None else values(rng, n, bias_kind)
        residual = None if residual_kind is None else values(rng, (m, n), residual_kind)
        want = x.get().astype(np.float64) @ w.T
        for added in (bias, residual):
            want = want if added is None else want + added.get().astype(np.float64)
        target = {"out": cupy_like.ndarray((m, n), float_dtype(kind))} if with_out else {"dtype": kind}
        before = gpus.slow_paths
        y = qgemm.matmul(x, on_device, activation, bias=bias, residual=residual, **target)
        assert y is target.get("out", y)
        assert y.dtype == float_dtype(kind)
        near(y, want, kind)
        expected_long = turn == 0 or (not adds and (bias is not None or residual is not None))
        assert (gpus.slow_paths > before) == expected_long


def test_y_of_a_type_that_a_kernel_does_not_store_is_converted(gpus, monkeypatch):
    """prefill_sm80 stores float32 and the type of x; such calls alone have a fast path."""
    monkeypatch.setattr(plan, "gpu", lambda device: Gpu(device, 80, 108))
    rng = np.random.default_rng(0)
    w, x = rng.integers(-4, 5, (40, K)), values(rng, (70, K), "float16")
    on_device = gpus.tensor(w)
    for kind, slow_paths in (("float32", 1), ("float16", 1), ("bfloat16", 2)):
        before = gpus.slow_paths
        for _ in range(2):
            y = qgemm.matmul(x, on_device, dtype=kind)
            assert y.dtype == float_dtype(kind)
            near(y, x.get().astype(np.float64) @ w.T, kind)
        assert gpus.slow_paths - before == slow_paths
    assert set(gpus.launched) == {"prefill_sm80"}


X_LAYOUTS = {
    "contiguous": lambda m, wide: wide.reshape(-1)[: m * K].reshape(m, K),
    "strided": lambda m, wide: wide[:m, ::2],
    "rows apart": lambda m, wide: wide[:m, :K],
    "not aligned": lambda m, wide: wide.reshape(-1)[1 : 1 + m * K].reshape(m, K),
}
INTO = "new", "given", "x", "residual", "columns"
CALL = st.tuples(*map(st.sampled_from, ((1, 4), sorted(X_LAYOUTS), (False, True), (False, True), INTO)))


@given(calls=st.lists(CALL, min_size=2, max_size=8), seed=st.integers(0, 99), activation=st.sampled_from(["a16", "a8"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_call_is_taken_for_another(gpus, calls, seed, activation):
    """Calls of one weight in any order, each with arrays in its own layout, some of them shared."""
    rng = np.random.default_rng(seed)
    on_device = gpus.tensor(w := rng.integers(-4, 5, (K, K)))
    for m, layout, with_bias, with_residual, into in calls:
        x = X_LAYOUTS[layout](m, values(rng, (5, 2 * K), "float16"))
        bias = values(rng, K, "float32") if with_bias else None
        residual = values(rng, (m, K), "float16") if with_residual or into == "residual" else None
        want = x.get().astype(np.float64) @ w.T
        for added in (bias, residual):
            want = want if added is None else want + added.get()
        out = {
            "new": None, "given": cupy_like.ndarray((m, K), np.float16), "x": x, "residual": residual,
            "columns": cupy_like.ndarray((m, 2 * K), np.float16)[:, ::2],
        }[into]  # fmt: skip
        target = {"out": out} if out is not None else {"dtype": "float16"}
        near(qgemm.matmul(x, on_device, activation, bias=bias, residual=residual, **target), want, "float16")


@pytest.mark.parametrize("layout", X_LAYOUTS)
def test_aligned_arrays_in_order_are_read_where_they_lie(gpus, layout, monkeypatch):
    """No path copies an array that kernels can read: x, bias, residual, also where the output is the residual."""
    copies, copy = [], cupy_like.ndarray.copy

    def noted(array, order="C"):
        copies.append(array.shape)
        return copy(array, order)

    rng = np.random.default_rng(0)
    on_device = gpus.tensor(rng.integers(-4, 5, (K, K)))
    x = X_LAYOUTS[layout](4, values(rng, (5, 2 * K), "float16"))
    bias, residual = values(rng, K, "float32"), values(rng, (4, K), "float16")
    monkeypatch.setattr(cupy_like.ndarray, "copy", noted)
    for out in (None, cupy_like.ndarray((4, K), np.float16), residual) * 2:
        target = {"dtype": "float16"} if out is None else {"out": out}
        qgemm.matmul(x, on_device, bias=bias, residual=residual, **target)
    for _ in range(2):
        qgemm.gated(x, on_device, on_device, biases=[bias, bias])
        qgemm.matmul_many(x, [on_device, on_device], biases=[bias, None])
    assert (copies == []) == (layout == "contiguous")


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_views_and_overlaps(gpus, activation, m):
    """Strides and addresses are not in a key: an array that no kernel can read is copied, an output that no kernel may
    write is computed elsewhere."""
    rng = np.random.default_rng(m)
    w = rng.integers(-4, 5, (K, K))
    on_device = gpus.tensor(w)
    for _ in range(2):
        for strided in (False, True):
            wide = values(rng, (m, 2 * K), "float16")
            x = wide[:, ::2] if strided else wide.reshape(-1)[1 : 1 + m * K].reshape(m, K)  # 2 bytes beyond 16
            want = x.get().astype(np.float64) @ w.T
            near(qgemm.matmul(x, on_device, activation, dtype="float16"), want, "float16")
            out = cupy_like.zeros((m, 2 * K), np.float16)[:, ::2]
            assert qgemm.matmul(x, on_device, activation, out=out) is out
            near(out, want, "float16")
        x = values(rng, (m, K), "float16")
        want = x.get().astype(np.float64) @ w.T
        near(qgemm.matmul(x, on_device, activation, out=x), want, "float16")
        y = values(rng, (m, K), "float16")
        want = x.get().astype(np.float64) @ w.T + y.get()
        near(qgemm.matmul(x, on_device, activation, residual=y, out=y), want, "float16")
        room = values(rng, (m + 1, K), "float16")
        x = values(rng, (m, K), "float16")
        want = x.get().astype(np.float64) @ w.T + room[1:].get()
        near(qgemm.matmul(x, on_device, activation, residual=room[1:], out=room[:-1]), want, "float16")
        bias = room[0]
        want = x.get().astype(np.float64) @ w.T + bias.get()
        near(qgemm.matmul(x, on_device, activation, bias=bias, out=room[:-1]), want, "float16")


@pytest.mark.parametrize("m", [5, 40])
def test_a_first_call_whose_residual_is_partly_its_output(gpus, m):
    """The slow path copies the residual, of which the kernel stores rows before it reads them."""
    rng = np.random.default_rng(m)
    w = rng.integers(-4, 5, (K, K))
    space, x = values(rng, (m + 1, K), "float16"), values(rng, (m, K), "float16")
    want = x.get().astype(np.float64) @ w.T + space[1:].get()
    near(qgemm.matmul(x, gpus.tensor(w), residual=space[1:], out=space[:-1]), want, "float16")


@pytest.mark.parametrize("activation", ["a16", "a8", "prepared"])
@pytest.mark.parametrize("m", [1, 3, 8, 40])
def test_many_weights_of_two_formats(gpus, activation, m):
    """One launch for those of a format where rows are few; x is quantized once; the order is the caller's."""
    rng = np.random.default_rng(m)
    ws = [rng.integers(-4, 5, (n, K)) for n in (40, 8, 24, 8)]
    weights = [gpus.tensor(w, fmt) for w, fmt in zip(ws, ("q4_0", "q8_0", "q4_0", "q8_0"), strict=True)]
    for turn in range(3):
        x = values(rng, (m, K), "float16")
        biases = [None, values(rng, 8, "float32"), None, None]
        outs = [cupy_like.ndarray((m, len(w)), np.float32) for w in ws] if turn else None
        source = qgemm.quantize_activations(x) if activation == "prepared" else x
        kind = None if activation == "prepared" else activation
        gpus.launched.clear()
        for _ in range(2):
            ys = qgemm.matmul_many(source, weights, kind, biases=biases, outs=outs)
            for y, w, bias in zip(ys, ws, biases, strict=True):
                want = x.get().astype(np.float64) @ w.T + (0 if bias is None else bias.get())
                near(y, want, "float32")
        forms = [name for name in gpus.launched if name in (Q8_1, "rounded", "decoded")]
        assert len(forms) == {"a16": 0, "a8": 2}.get(activation, 2 * (m > 8))
        assert len(gpus.launched) - len(forms) == 2 * (2 if m <= 8 else 4)
    assert gpus.slow_paths == 2  # without outs, with them


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize(("m", "formats"), [(3, ("q4_0", "q4_0")), (3, ("q4_0", "q5_1")), (300, ("q4_0", "q4_0"))])
def test_gated_products(gpus, activation, m, formats):
    """By one launch of few rows and one format, else by two or three and scratch memory; with biases."""
    rng = np.random.default_rng(5)
    gate, up = (gpus.tensor(rng.standard_normal((48, K)), fmt) for fmt in formats)
    fused = m < 16 and len(set(formats)) == 1
    for name, types in (("silu", ("float32", "")), ("gelu_tanh", ("", "float16"))):
        biases = [cupy_like.asarray(rng.standard_normal(48).astype(kind)) if kind else None for kind in types]
        for turn in range(3):
            x = cupy_like.asarray(rng.standard_normal((m, K)).astype(np.float16))
            parts = [
                x.get().astype(np.float64) @ gpus.weights[w.pointer].T + (0 if bias is None else bias.get())
                for w, bias in zip((gate, up), biases, strict=True)
            ]
            want = gated_by(name, *parts).astype(np.float16)
            gpus.launched.clear()
            gpus.slow_paths = 0
            y = qgemm.gated(x, gate, up, name, activation, biases=biases, dtype="float16")
            products = [launched for launched in gpus.launched if launched not in (Q8_1, "rounded")]
            assert len(products) == (1 if fused else 2 if m < 16 else 3)
            assert (products[-1] == "add_epilogue") == (m >= 16)
            assert gpus.slow_paths == (turn == 0)
            np.testing.assert_allclose(y.get().astype(np.float64), want.astype(np.float64), rtol=1e-3, atol=1e-4)
            out = cupy_like.zeros((m, 48), np.float16)
            assert qgemm.gated(x, gate, up, name, activation, biases=biases, out=out) is out
            np.testing.assert_array_equal(out.get(), y.get())


def test_prepared_activations_take_the_fast_path(gpus):
    rng = np.random.default_rng(0)
    w = rng.integers(-4, 5, (24, K))
    on_device = gpus.tensor(w)
    for m in (1, 40):
        for _ in range(3):
            x = values(rng, (m, K), "float16")
            near(qgemm.matmul(qgemm.quantize_activations(x), on_device), x.get().astype(np.float64) @ w.T, "float32")
    assert gpus.slow_paths == 2


def test_what_no_plan_may_serve_goes_the_slow_path(gpus):
    """float64 anywhere, arrays of another device or library, and errors; after a call like it was planned."""
    rng = np.random.default_rng(0)
    w = rng.integers(-4, 5, (24, K))
    on_device, x = gpus.tensor(w), values(rng, (3, K), "float16")
    want = x.get().astype(np.float64) @ w.T
    for _ in range(2):
        near(qgemm.matmul(x, on_device), want, "float32")
        near(qgemm.matmul(x.astype(np.float64), on_device), want, "float32")
        near(qgemm.matmul(x, on_device, dtype="float64"), want, "float32")
        bias = values(rng, 24, "float64")
        near(qgemm.matmul(x, on_device, bias=bias), want + bias.get(), "float32")
        near(qgemm.matmul(x, on_device, out=cupy_like.ndarray((3, 24), np.float64)), want, "float32")
    assert gpus.slow_paths == 9
    with pytest.raises(qgemm.UnsupportedError, match="bias is on the host"):
        qgemm.matmul(x, on_device, bias=np.ones(24, np.float32))
    with pytest.raises(qgemm.ShapeError, match="out has shape"):
        qgemm.matmul(x, on_device, out=cupy_like.ndarray((3, 25), np.float32))
    with pytest.raises(qgemm.UnsupportedError, match="give one of them"):
        qgemm.matmul(x, on_device, out=cupy_like.ndarray((3, 24), np.float32), dtype="float16")
    with pytest.raises(qgemm.UnsupportedError, match="activation is 'a16', 'a8', 'a8_g256' or 'e4m3_g256'"):
        qgemm.matmul(x, on_device, "a4")
    with pytest.raises(qgemm.UnsupportedError, match=r"x is on cuda:1, w on cuda:0"), cupy_like.Device(1):
        qgemm.matmul(cupy_like.asarray(x.get()), on_device)
    with cupy_like.Device(1):  # the thread is on another device than x and w
        near(qgemm.matmul(x, on_device), want, "float32")
    y = cupy_like.zeros((6, 24), np.float32)
    qgemm.matmul_many(x, [on_device, on_device], outs=[y[:3], y[3:]])
    with pytest.raises(qgemm.UnsupportedError, match="share memory"):
        qgemm.matmul_many(x, [on_device, on_device], outs=[y[:3], y[2:5]])
    with pytest.raises(qgemm.ShapeError, match="2 entries for 1 weights"):
        qgemm.matmul_many(x, [on_device], outs=[y[:3], y[3:]])


def test_a_bias_that_another_output_overwrites_is_copied(gpus):
    rng = np.random.default_rng(0)
    ws = [rng.integers(-4, 5, (24, K)) for _ in range(2)]
    weights = [gpus.tensor(w) for w in ws]
    x = values(rng, (1, K), "float16")
    for _ in range(2):
        y = values(rng, (2, 24), "float32")
        bias = y[0].copy()
        ys = qgemm.matmul_many(x, weights, biases=[None, y[0]], outs=[y[:1], y[1:]])
        near(ys[1], x.get().astype(np.float64) @ ws[1].T + bias.get(), "float32")


def test_plans_are_few(gpus, monkeypatch):
    monkeypatch.setattr(replay, "MAX_PLANS", 4)
    on_device = gpus.tensor(np.ones((8, K)))
    for m in range(1, 12):
        qgemm.matmul(cupy_like.zeros((m, K), np.float16), on_device)
        assert 0 < len(on_device.plans) <= 4


def test_threads_that_share_a_stream_do_not_mix_their_activations(gpus):
    """Both quantize x into the workspace of the stream: the second waits until the first has launched its product."""
    on_device, met = gpus.tensor(np.eye(K)), threading.Barrier(2)
    xs = [cupy_like.asarray(np.full((5, K), value, np.float16)) for value in (1, 2)]
    for x in xs:
        qgemm.matmul(x, on_device, "a8")

    def between() -> None:
        try:
            met.wait(0.2)  # passed only if the other thread quantizes at the same time
            mixed.append(True)
        except threading.BrokenBarrierError:
            pass

    mixed: list[bool] = []
    gpus.between = between
    results: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        results[index] = qgemm.matmul(xs[index], on_device, "a8").get()

    at_once(work, range(2))
    assert not mixed
    assert all((results[index] == index + 1).all() for index in range(2))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_empty_sums(gpus, dtype):
    """K = 0: the epilogue alone; M = 0: nothing."""
    w, x = gpus.tensor(np.ones((8, 0))), cupy_like.zeros((2, 0), dtype)
    bias = cupy_like.asarray(np.arange(8, dtype=np.float32))
    for _ in range(2):
        near(qgemm.matmul(x, w, bias=bias), np.tile(np.arange(8.0), (2, 1)), "float32")
        assert not qgemm.gated(x, w, w).get().any()
        assert qgemm.matmul(cupy_like.zeros((0, K), dtype), gpus.tensor(np.ones((8, K)))).shape == (0, 8)
        assert set(gpus.launched) <= {"add_epilogue"}  # biases are gated
