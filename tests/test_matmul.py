"""Products on the CPU against float64, bounds derived from K and the format; those of a8 are in test_a8.py."""

from __future__ import annotations

import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import assert_a8_formula, exact, expected_sums, random_tensor, tame
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EVERY, EVERY_BLOCK, over_formats, problems, raw_blocks, weights

import qgemm
from qgemm.cpu import reference as cpu

M_EDGES = st.sampled_from((1, 2, 7, cpu.FEW_TOKENS, cpu.FEW_TOKENS + 1, 2 * cpu.FEW_TOKENS))


@pytest.mark.usefixtures("engine")
@over_formats(EVERY)
@settings(max_examples=20)
@given(data=st.data())
def test_a16_within_bound(fmt, data):
    x, w = data.draw(problems(fmt, M_EDGES, finite=False))
    y = qgemm.matmul(x, w)
    assert y.dtype == np.float32
    expected_sums(x, w).check(y)


@pytest.mark.usefixtures("engine")
@over_formats(EVERY_BLOCK)
def test_x_up_to_1e32_stays_finite(fmt):
    """A row of x has the signs of a row of w, so that no terms cancel. docs/limits.md promises this range."""
    w = random_tensor(fmt, cpu.FEW_TOKENS + 5, 512, np.random.default_rng(3))
    signs = np.copysign(np.float32(1e32), w.dequantize())
    for m in (1, 3, len(signs)):
        for packed in (w, w.packed_for_cpu()):
            y = qgemm.matmul(signs[:m], packed)
            assert np.isfinite(y).all()
            expected_sums(signs[:m], w).check_worst_case(y)


@pytest.mark.parametrize("constant", ["TILES", "TILE", "SLICE", "PANEL_WEIGHTS", "X_CHUNK", "SUMS", "BLAS_ALONE"])
@pytest.mark.parametrize("m", [3, cpu.FEW_TOKENS + 5])
def test_products_do_not_depend_on_how_work_is_cut(constant, m, monkeypatch):
    """Every constant that cuts rows, tokens or panels, so small that there are several pieces and a rest."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, 96), np.float32), random_tensor(qgemm.FORMATS["q5_1"], 70, 96, rng)
    monkeypatch.setattr(
        cpu, constant, {"X_CHUNK": 96 * 7, "SUMS": 70 * 3 * 2, "BLAS_ALONE": 70 * 2}.get(constant, 96 * 9)
    )
    expected_sums(x, w).check(qgemm.matmul(x, w))
    assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, worst_case=m > 16)  # many rows are multiplied as floats


@over_formats(EVERY)
@settings(max_examples=10)
@given(data=st.data())
def test_bias_and_residual_are_added_in_float32(fmt, data):
    x, w = data.draw(problems(fmt, M_EDGES))
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(w.shape[0]).astype(np.float16)
    residual = rng.standard_normal((len(x), w.shape[0])).astype(np.float32)
    plain = qgemm.matmul(x, w)
    np.testing.assert_array_equal(qgemm.matmul(x, w, bias=bias), plain + bias)
    np.testing.assert_array_equal(qgemm.matmul(x, w, residual=residual), plain + residual)
    want = (plain + bias + residual).astype(np.float16)
    np.testing.assert_array_equal(qgemm.matmul(x, w, bias=bias, residual=residual, dtype="float16"), want)
    assert qgemm.matmul(x, w, bias=bias, residual=residual, out=residual) is residual
    np.testing.assert_array_equal(residual.astype(np.float16), want)


def test_many_weights_of_one_x():
    rng = np.random.default_rng(2)
    ws = [qgemm.quantize(rng.standard_normal((n, 64)).astype(np.float32), t) for n, t in ((5, "q4_0"), (70, "q8_0"))]
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    biases = [rng.standard_normal(5), None]
    for activation in ("a16", "a8"):
        wants = [qgemm.matmul(x, w, activation, bias=b, dtype="float16") for w, b in zip(ws, biases, strict=True)]
        outs = [np.empty((2, 3, w.shape[0]), np.float16) for w in ws]
        ys = qgemm.matmul_many(x, ws, activation, biases=biases, outs=outs)
        fresh = qgemm.matmul_many(x, ws, activation, biases=biases, dtype="float16")
        for y, out, new, want in zip(ys, outs, fresh, wants, strict=True):
            assert y is out
            np.testing.assert_array_equal(y, want)
            np.testing.assert_array_equal(new, want)
    assert qgemm.matmul_many(x, []) == []
    with pytest.raises(qgemm.ShapeError, match="outs has 1 entries for 2 weights"):
        qgemm.matmul_many(x, ws, outs=outs[:1])


def test_addends_that_do_not_fit_are_named():
    w = qgemm.quantize(np.ones((5, 64), np.float32), "q4_0")
    x = np.ones((2, 64), np.float32)
    with pytest.raises(qgemm.ShapeError, match=r"bias has shape \(4,\), y needs \(5,\)"):
        qgemm.matmul(x, w, bias=np.ones(4, np.float32))
    with pytest.raises(qgemm.ShapeError, match=r"residual has shape \(5,\), y needs \(2, 5\)"):
        qgemm.matmul(x, w, residual=np.ones(5, np.float32))
    with pytest.raises(TypeError, match=r"bias must be of float16.*int64"):
        qgemm.matmul(x, w, bias=np.ones(5, np.int64))


@over_formats(EVERY)
def test_identity_gives_the_decoded_matrix(fmt):
    rng = np.random.default_rng(4)
    k = max(96, 2 * fmt.weights)
    w = random_tensor(fmt, 70, k, rng)
    np.testing.assert_array_equal(qgemm.matmul(np.eye(k, dtype=np.float32), w), w.dequantize().T)


@over_formats(EVERY)
@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [3, 100])
def test_nan_stays_in_its_row(fmt, activation, m):
    """A NaN or infinity in one row of x or W reaches no other output. Codes and exponents alone cannot make a NaN."""
    if activation == "a8" and not fmt.integer:
        pytest.skip("numbers and levels of a codebook are no integer codes")
    rng = np.random.default_rng(6)
    k = max(128, 3 * fmt.weights)
    raw = np.frombuffer(rng.bytes(90 * k // fmt.weights * fmt.block_bytes), fmt.dtype).reshape(90, -1)
    blocks = tame(fmt, raw, rng)
    x = rng.standard_normal((m, k)).astype(np.float32)
    clean = qgemm.matmul(x, qgemm.Tensor(fmt, (90, k), blocks), activation)
    touched = np.zeros(clean.shape, bool)
    for bad in [blocks] if fmt.plain else [blocks[name] for name in fmt.scale_fields]:
        bad[17, 2], bad[40, 1] = (0x7FC0, 0x7F80) if fmt.name == "bf16" else (np.nan, np.inf)
        touched[:, [17, 40]] = True
    x[1, 5], x[2, 7] = np.nan, -np.inf
    touched[1:3] = True
    y = qgemm.matmul(x, qgemm.Tensor(fmt, (90, k), blocks), activation)
    assert not np.isfinite(y[touched]).any()
    np.testing.assert_array_equal(y[~touched], clean[~touched])


@over_formats(EVERY_BLOCK)
@given(data=st.data())
def test_raw_blocks_multiply_as_they_decode(fmt, data):
    """Any bit pattern is data: the product is finite exactly where the float64 product of decoded weights is.

    A scale of 2^127 overflows weights, but not their sum, which is scaled last: there a finite product is right too.
    """
    raw = raw_blocks(data.draw, fmt, (20, 3))
    w = qgemm.Tensor(fmt, (20, 3 * fmt.weights), raw)
    x = np.full((2, w.shape[1]), 2.0**-20, np.float32)
    want = np.isfinite(exact(x, w))
    finite = np.isfinite(qgemm.matmul(x, w))
    assert finite[want].all()
    if fmt.scale_fields:
        assert want[finite].all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_dtypes_strides_and_leading_shapes(dtype, activation):
    from ml_dtypes import bfloat16

    rng = np.random.default_rng(8)
    w = qgemm.quantize(rng.standard_normal((33, 64)).astype(np.float32), "q5_1")
    x = rng.standard_normal((4, 6, 128)).astype(bfloat16 if dtype == "bfloat16" else dtype)
    want = qgemm.matmul(np.ascontiguousarray(x[::2, ::-1, ::2].astype(np.float32)), w, activation)
    view = x[::2, ::-1, ::2]
    view.flags.writeable = False
    got = qgemm.matmul(view, w, activation)
    assert got.shape == (2, 6, 33)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(qgemm.matmul(np.asfortranarray(view), w, activation), want)
    np.testing.assert_allclose(qgemm.matmul(view[0, 0], w, activation), want[0, 0], rtol=1e-4, atol=1e-4)
    assert qgemm.matmul(view, w, activation, dtype="bfloat16").dtype == bfloat16
    np.testing.assert_array_equal(qgemm.matmul(view, w, activation, dtype=np.float16), want.astype(np.float16))
    np.testing.assert_array_equal(qgemm.matmul(view, w, activation, dtype=np.float64), want.astype(np.float64))


def test_out_is_written_and_returned():
    rng = np.random.default_rng(9)
    w = qgemm.quantize(rng.standard_normal((64, 64)).astype(np.float32), "q4_0")
    x = rng.standard_normal((3, 64)).astype(np.float32)
    want = qgemm.matmul(x, w)
    for out in (np.full((3, 64), np.nan, np.float32), np.full((3, 128), np.nan, np.float32)[:, ::2]):
        assert qgemm.matmul(x, w, out=out) is out
        np.testing.assert_array_equal(out, want)
    assert qgemm.matmul(x, w, out=x) is x  # y onto x: x is read before it is overwritten
    np.testing.assert_array_equal(x, want)


def test_mapped_and_big_endian_x(tmp_path):
    rng = np.random.default_rng(10)
    w = qgemm.quantize(rng.standard_normal((8, 32)).astype(np.float32), "q8_0")
    x = rng.standard_normal((5, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(qgemm.matmul(mapped, w), qgemm.matmul(x, w))
    np.testing.assert_array_equal(qgemm.matmul(x.astype(">f4"), w), qgemm.matmul(x, w))


@over_formats(EVERY)
def test_empty_m_n_or_k(fmt):
    block = fmt.weights
    for m, n, count in ((0, 3, 2), (2, 0, 2), (2, 3, 0), (0, 0, 0)):
        w = qgemm.Tensor(fmt, (n, count * block), np.zeros((n, count), fmt.dtype))
        for activation in ("a16", "a8") if fmt.integer else ("a16",):
            y = qgemm.matmul(np.ones((m, count * block), np.float32), w, activation)
            assert y.shape == (m, n)
            assert (y == 0).all()


def test_errors_name_what_came_and_what_fits():
    w = qgemm.quantize(np.ones((32, 64), np.float32), "q4_0")
    x = np.ones((2, 64), np.float32)
    refused = [
        (lambda: qgemm.matmul(x, w, "w4a8"), "'a8_g256' or 'e4m3_g256', got 'w4a8'"),
        (lambda: qgemm.matmul(x, w, out=np.empty((2, 32), np.float32), dtype="f2"), "give one of them"),
        (lambda: qgemm.matmul(qgemm.quantize_activations(x), w, "a16"), "for activation 'a8'"),
        (lambda: qgemm.matmul(w[:2], w), "Q8_1"),
        (lambda: qgemm.matmul(x, qgemm.quantize(np.ones((32, 64)), "f16"), "a8"), "F16 has no integer codes"),
        (lambda: qgemm.matmul(x, qgemm.quantize(np.ones((32, 64)), "kbit3"), "a8"), "KBIT3 has no integer codes"),
    ]
    misfits = [
        (lambda: qgemm.quantize_activations(np.ones((2, 100), np.float32)), "100 is not a multiple of 32"),
        (lambda: qgemm.matmul(x[:, :32], w), "x has rows of 32.*needs K = 64"),
        (lambda: qgemm.matmul(np.float32(1), w), "scalar"),
        (lambda: qgemm.matmul(x, w, out=np.empty((2, 31), np.float32)), r"out has shape \(2, 31\), y has \(2, 32\)"),
        (lambda: qgemm.matmul(x, qgemm.quantize(np.ones((2, 32, 64), np.float32), "q4_0")), r"a matrix \(N, K\)"),
    ]
    for call, message in refused:
        with pytest.raises(qgemm.UnsupportedError, match=message):
            call()
    for call, message in misfits:
        with pytest.raises(qgemm.ShapeError, match=message):
            call()
    for bad in (np.ones((2, 64), np.int32), np.ones((2, 64), complex), [["a"] * 64]):
        with pytest.raises(TypeError, match=r"^x must be of float16, float32, float64 or bfloat16, got "):
            qgemm.matmul(bad, w)
    read_only = np.empty((2, 32), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(qgemm.UnsupportedError, match="read-only"):
        qgemm.matmul(x, w, out=read_only)
    with pytest.raises(TypeError, match="dtype must be float16"):
        qgemm.matmul(x, w, dtype=np.int32)


def test_tensor_will_not_inflate_silently():
    w = qgemm.quantize(np.ones((32, 64), np.float32), "q4_0")
    for inflate in (lambda: np.asarray(w), lambda: np.sum(w), lambda: np.ones((1, 64)) * w):
        with pytest.raises(TypeError, match=r"dequantize\(\)"):
            inflate()


def test_indexing_shares_the_blocks():
    experts = qgemm.quantize(np.random.default_rng(0).standard_normal((3, 32, 64)).astype(np.float32), "q4_1")
    expert = experts[1]
    assert expert.shape == (32, 64)
    assert np.shares_memory(expert.blocks, experts.blocks)
    np.testing.assert_array_equal(expert[[3, 1, 3]].dequantize(), experts.dequantize()[1][[3, 1, 3]])
    np.testing.assert_array_equal(experts[2, 5:9].dequantize(), experts.dequantize()[2, 5:9])
    with pytest.raises(IndexError, match="leading axes"):
        expert[0, 0]


@given(data=st.data())
def test_activations_serve_several_weights(data):
    w1 = data.draw(weights(qgemm.FORMATS["q4_0"]))
    x = np.linspace(-1, 1, w1.shape[1], dtype=np.float32)
    w2 = qgemm.quantize(w1.dequantize(), "q8_0")
    prepared = qgemm.quantize_activations(x)
    for w in (w1, w2):
        np.testing.assert_array_equal(qgemm.matmul(prepared, w), qgemm.matmul(x, w, "a8"))


@pytest.mark.parametrize("activation", ["a16", "a8"])
@pytest.mark.parametrize("m", [1, 16, 128])
def test_memory_stays_bounded(activation, m):
    """28672 x 2048 would be 224 MiB of float32; the product may use 64 MiB beside its inputs and output."""
    n, k = 28672, 2048
    blocks = np.zeros((n, k // 32), qgemm.FORMATS["q4_0"].dtype)
    w = qgemm.Tensor("q4_0", (n, k), blocks)
    x, out = np.ones((m, k), np.float32), np.empty((m, n), np.float32)
    tracemalloc.start()
    qgemm.matmul(x, w, activation, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_torch_like_array_comes_back_as_its_kind():
    """CPU arrays of other libraries go in and out through DLPack."""

    class Foreign:
        """The least of the array API and DLPack that a library offers."""

        def __init__(self, data):
            self.data = data

        def __dlpack__(self, **options):
            return self.data.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

        def __array_namespace__(self):
            class Namespace:
                @staticmethod
                def from_dlpack(array):
                    return Foreign(np.from_dlpack(array))

            return Namespace

    w = qgemm.quantize(np.ones((32, 64), np.float32), "q8_0")
    y = qgemm.matmul(Foreign(np.ones((2, 64), np.float32)), w)
    assert isinstance(y, Foreign)
    np.testing.assert_array_equal(y.data, qgemm.matmul(np.ones((2, 64), np.float32), w))


def test_a_library_without_the_array_api(monkeypatch):
    """Its package makes arrays of DLPack; what NumPy's DLPack does not know, bfloat16, goes through `__array__`."""
    from ml_dtypes import bfloat16

    class Foreign:
        __module__ = "library.arrays"

        def __init__(self, data):
            self.data = data

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            raise BufferError("no such type")

        def __array__(self, dtype=None, copy=None):
            return self.data

    monkeypatch.setitem(sys.modules, "library", SimpleNamespace(from_dlpack=Foreign))
    w = qgemm.quantize(np.ones((32, 64), np.float32), "q8_0")
    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64).astype(bfloat16)
    y = qgemm.matmul(Foreign(x), w)
    assert isinstance(y, Foreign)
    np.testing.assert_array_equal(y.data, qgemm.matmul(x, w))


def test_importing_qgemm_touches_no_device_and_no_folder():
    import subprocess
    import sys

    code = "import sys, qgemm.api; assert not any(m.split('.')[0] in ('cupy', 'cuda') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)})
