"""qgemm.gated: function(x @ gate.T + bias) * (x @ up.T + bias), on the CPU and by the GPU's kernels on the host."""

from __future__ import annotations

import ctypes
import math

import harness
import helpers
import numpy as np
import pytest
from gates import FLOAT32, function, gated_bound, gated_product, gated_up
from harness.products import run_decode, run_gated
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from q8_1_blocks import in_k_blocks
from strategies import EVERY_INTEGER, each_product, over_formats

import qgemm
from qgemm.codec.format import float_dtype
from qgemm.cuda.jit.twins import GATE_CODES, TYPE_CODES
from qgemm.cuda.kernels.transforms import ADD_EPILOGUE, EPILOGUE_THREADS
from qgemm.cuda.problem import Q8_1
from qgemm.gating import GATES, gated_by


@pytest.mark.parametrize("name", GATES)
def test_the_functions(name):
    """Within a few units of float32 of x, NaN where x is, and the limits of large ones and of their negatives."""
    x = np.concatenate([np.linspace(-40, 40, 8001), [1e30, -1e4, 1e-30, 0]]).astype(np.float32)
    ones = np.ones_like(x)
    want = function(name, x) * gated_up(name, ones)
    assert (np.abs(gated_by(name, x, ones) - want) <= 6 * FLOAT32 * np.abs(x)).all()
    ends = gated_by(name, np.float32([np.inf, 100, -100]), ones[:3])
    assert ends.tolist() == (pytest.approx([14, 14, 0], rel=1e-5) if name == "swiglu_oai" else [np.inf, 100, 0])
    nan = np.float32([np.nan])
    assert np.isnan([gated_by(name, nan, ones[:1]), gated_by(name, ones[:1], nan)]).all()


def test_the_gate_of_gpt_oss_clamps_both():
    gate, up = np.float32([8, 7, 1, 1, 1]), np.float32([1, 1, 8, -8, 7])
    y = gated_by("swiglu_oai", gate, up)
    assert y[0] == y[1]
    assert y[2] == y[4]
    assert y[3] == pytest.approx(-6 / (1 + math.exp(-1.702)))


@each_product
@pytest.mark.parametrize("name", GATES)
def test_on_the_cpu_it_is_two_products_and_a_gate(fmt, activation, name, engine):
    rng = np.random.default_rng(7)
    gate, up = (helpers.random_tensor(fmt, 70, 256, rng) for _ in range(2))
    x, biases = helpers.normal(2, 3, gate.shape[1], seed=3), [helpers.normal(70, seed=4), helpers.normal(70, seed=5)]
    for pair in ([None, None], [biases[0], None], biases):
        g, u = qgemm.matmul_many(x, [gate, up], activation, biases=pair)
        want = gated_by(name, g, u)
        y = qgemm.gated(x, gate, up, name, activation, biases=pair)
        if engine == "numpy":
            np.testing.assert_array_equal(y, want)
        else:  # compiled gates have an exponential of their own
            assert (np.abs(y - want) <= 12 * FLOAT32 * np.abs(g) * np.abs(gated_up(name, u))).all()
            want = y
        for dtype in ("float16", "bfloat16", "float64"):
            with np.errstate(over="ignore"):
                rounded = want.astype(float_dtype(dtype))
            np.testing.assert_array_equal(qgemm.gated(x, gate, up, name, activation, biases=pair, dtype=dtype), rounded)
            out = np.zeros((2, 3, 70), float_dtype(dtype))
            assert qgemm.gated(x, gate, up, name, activation, biases=pair, out=out) is out
            np.testing.assert_array_equal(out, rounded)


@pytest.mark.usefixtures("engine")
def test_out_may_overlap_x_and_biases():
    gate, up = (qgemm.quantize(helpers.normal(64, 64, seed=seed), "q4_0") for seed in (1, 2))
    x, bias = helpers.normal(3, 64, seed=3), helpers.normal(64, seed=4)
    want = qgemm.gated(x, gate, up, biases=[bias, bias])
    buffer = np.concatenate([x, bias[None]])
    qgemm.gated(buffer[:3], gate, up, biases=[buffer[3], buffer[3]], out=buffer[1:])
    np.testing.assert_array_equal(buffer[1:], want)


@pytest.mark.usefixtures("engine")
def test_prepared_activations_and_empty_arrays():
    gate, up = (qgemm.quantize(helpers.normal(64, 64, seed=seed), "q8_0") for seed in (1, 2))
    x = helpers.normal(3, 64, seed=3)
    np.testing.assert_array_equal(
        qgemm.gated(qgemm.quantize_activations(x), gate, up), qgemm.gated(x, gate, up, "silu", "a8")
    )
    assert qgemm.gated(x[:0], gate, up).shape == (0, 64)


def test_errors_name_what_came_and_what_fits():
    gate, up = (qgemm.quantize(helpers.normal(n, 64), "q4_0") for n in (64, 32))
    x = helpers.normal(3, 64)
    for match, call in (
        (r"gate and up differ in shape: .*64 x 64.* and .*32 x 64", lambda: qgemm.gated(x, gate, up)),
        (r"biases has 1 entries for 2 weights", lambda: qgemm.gated(x, gate, gate, biases=[None])),
        (r"bias has shape \(3,\), y needs \(64,\)", lambda: qgemm.gated(x, gate, gate, biases=[x[:, 0], None])),
        (r"out has shape \(3, 32\), y has \(3, 64\)", lambda: qgemm.gated(x, gate, gate, out=x[:, :32].copy())),
        (r"x has rows of 32", lambda: qgemm.gated(x[:, :32], gate, gate)),
    ):
        with pytest.raises(qgemm.ShapeError, match=match):
            call()
    with pytest.raises(
        qgemm.UnsupportedError, match="function is 'silu', 'gelu', 'gelu_tanh', 'swiglu_oai', got 'relu'"
    ):
        qgemm.gated(x, gate, gate, "relu")


# ---------------------------------------------------------------- kernels on the host


def on_host(test):
    """A test that compiles kernels for the host."""
    return pytest.mark.compiles(harness.needs_compiler(test))


KINDS = [fmt for fmt in EVERY_INTEGER if fmt.name in ("q4_0", "q5_1", "q4_k", "q6_k", "q8_0")]


@on_host
@over_formats(KINDS)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("m", "out"), [(1, "float32"), (3, "float16"), (16, "bfloat16")])
def test_one_launch_by_the_decode_kernel(fmt, name, m, out):
    """Ragged rows, of both weights; biases of two types, or of one alone."""
    rng = np.random.default_rng(9)
    gate, up = (helpers.random_tensor(fmt, 90, 320, rng) for _ in range(2))
    k = gate.shape[1]
    x = (helpers.normal(m, k, seed=4) / 256).astype(np.float16)  # small, as y must fit in float16
    wide = x.astype(np.float32)
    biases = (helpers.normal(90, seed=5), None if m == 3 else helpers.normal(90, seed=6).astype(np.float16))
    parts = [
        helpers.expected_product(wide, w, np.float16, levels_alone=True).plus(np.zeros(90) if bias is None else bias)
        for w, bias in zip((gate, up), biases, strict=True)
    ]
    y = run_gated(fmt, "decode", "half", x, (gate, up), m, name, out, biases)
    gated_product(name, *parts, out).check(y)


@on_host
@over_formats(KINDS)
def test_one_launch_by_clusters(fmt):
    """A warp, a CTA and a cluster compute the same sums in another order."""
    rng = np.random.default_rng(9)
    gate, up = (helpers.random_tensor(fmt, 90, 1344, rng) for _ in range(2))
    x = (helpers.normal(5, gate.shape[1], seed=4) / 256).astype(np.float16)
    wide = x.astype(np.float32)
    parts = [helpers.expected_product(wide, w, np.float16, levels_alone=True) for w in (gate, up)]
    y = run_gated(fmt, "decode", "half", x, (gate, up), 5, "silu", m16_tiles=4, warp_split_k=3, cluster_split_k=2)
    gated_product("silu", *parts).check(y)


@on_host
@over_formats(KINDS)
def test_one_launch_by_the_decode_kernel_of_integers(fmt):
    """The products are those of the kernel alone, and y is the gate's function of them."""
    rng = np.random.default_rng(9)
    gate, up = (helpers.random_tensor(fmt, 90, 320, rng) for _ in range(2))
    x = helpers.normal(5, gate.shape[1], seed=4)
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    g, u = (run_decode(fmt, "decode_a8", Q8_1, blocks, w, 5) for w in (gate, up))
    y = run_gated(fmt, "decode_a8", Q8_1, blocks, (gate, up), 5, "silu")
    zero = np.zeros_like(g)
    assert (np.abs(y - function("silu", g) * u) <= gated_bound("silu", g, u, zero, zero)).all()
    np.testing.assert_array_equal(run_gated(fmt, "decode_a8", "float", x[:2], (gate, up), 2, "silu"), y[:2])


@on_host
@given(name=st.sampled_from(list(GATES)), seed=st.integers(0, 99))
def test_an_epilogue_gates_by_its_residual(name, seed):
    """The second of two launches alone."""
    fmt = qgemm.FORMATS["q4_0"]
    w = helpers.random_tensor(fmt, 70, 64, np.random.default_rng(seed))
    x, g = helpers.normal(3, 64, seed=seed).astype(np.float16), 3 * helpers.normal(3, 70, seed=seed + 1)
    bias = helpers.normal(70, seed=seed + 2)
    u = run_decode(fmt, "decode", "half", x, w, 3, bias=bias)
    y = run_decode(fmt, "decode", "half", x, w, 3, bias=bias, residual=g, gate=name)
    zero = np.zeros_like(g)
    assert (np.abs(y - function(name, g) * gated_up(name, u)) <= gated_bound(name, g, u, zero, zero)).all()


@on_host
@pytest.mark.parametrize("out", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("n", "shift"), [(44, 0), (43, 0), (44, 1)], ids=["fours", "odd rows", "unaligned"])
def test_an_epilogue_that_a_launch_of_its_own_adds(n, shift, out):
    """add_epilogue: bias, residual and every gate, by fours and one by one, also where it replaces its residual."""
    m, kernel = 27, harness.Kernel("add_epilogue", **ADD_EPILOGUE.types[0])
    sums, bias = helpers.normal(m, n, seed=1), helpers.normal(n, seed=2).astype(np.float16)
    residual = helpers.normal(m, n, seed=3).astype(float_dtype(out))
    added = sums + bias.astype(np.float32)
    combinations = (1, 0, ""), (0, 1, ""), (1, 1, ""), (1, 1, "silu"), *((0, 1, gate) for gate in GATES)
    for has_bias, has_residual, gate in combinations:
        memory = harness.device_array(m * n + shift, float_dtype(out))
        y = memory[shift:]
        y[:] = residual.reshape(-1)
        address = y.ctypes.data
        types = TYPE_CODES[out], TYPE_CODES["float16"] * has_bias, TYPE_CODES[out] * has_residual
        kernel(
            -(-m * n // (4 * EPILOGUE_THREADS)), EPILOGUE_THREADS,
            harness.to_device(sums), address, harness.to_device(bias) if has_bias else 0, address * has_residual,
            n, m * n, *map(ctypes.c_int, (*types, GATE_CODES.get(gate, 0))),
        )  # fmt: skip
        harness.check_guards(memory)
        total, wide = added if has_bias else sums, residual.astype(np.float32)
        actual = y.reshape(m, n)
        if gate:
            error = gated_bound(gate, wide, total, 0, 0, out) + 2.0**-15 * np.abs(wide * total) * (out != "float32")
            want = function(gate, wide) * gated_up(gate, total)
            assert (np.abs(actual.astype(np.float64) - want) <= error).all()
        else:
            assert_array_equal(actual, (total + wide if has_residual else total).astype(actual.dtype))
