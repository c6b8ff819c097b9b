"""Weights in another order of columns, and times a factor: every product is that of the weights they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import normal
from measured_errors import Expected, noise_of
from numpy.testing import assert_allclose, assert_array_equal

import qgemm
from qgemm.codec import error_bound as bounds

N, K = 48, 128
COLUMNS = np.random.default_rng(5).permutation(K).astype(np.int32)


def stored(seed: int = 0) -> qgemm.Tensor:
    return qgemm.quantize(normal(N, K, seed=seed), "q4_0")


def reordered(seed: int = 0, columns: np.ndarray = COLUMNS) -> qgemm.Reordered:
    return qgemm.Reordered(stored(seed), columns)


def scaled(factor: object = np.float32(0.37), divides: bool = False) -> qgemm.Scaled:
    return qgemm.Scaled(qgemm.quantize(normal(N, K, seed=3), "nvfp4"), factor, divides)


VIEWS = {
    "reordered": reordered,
    "scaled": scaled,
    "scaled, divides": lambda: scaled(np.float32(1234.5), True),
    "scaled, rows": lambda: scaled(np.linspace(0.1, 3, N, dtype=np.float32)),
}
views = pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)


def close(y: np.ndarray, x: np.ndarray, w: np.ndarray, added: object = 0, dtype: str = "float32") -> None:
    """y, of a dtype, is x @ w.T plus the addends, by float32 sums; weights of views are rounded once more."""
    wide, w = x.astype(np.float64).reshape(-1, K), w.astype(np.float64)
    want = (x.astype(np.float64) @ w.T + added).reshape(-1, N)
    size = np.abs(wide) @ np.abs(w).T
    bound = 2 * bounds.a16_bound(wide, np.abs(w)) + 2**-20 * size + 2**-22 * np.abs(want - wide @ w.T)
    noise = np.hypot(noise_of(wide, np.abs(w), bounds.U, tensor_cores=False), bounds.U * np.abs(want))
    Expected(want, bound, noise).rounded(dtype).check(np.asarray(y).reshape(-1, N))


@views
def test_what_a_product_takes(make):
    """Any rows of x, types, bias, residual, out; and the operators."""
    w = make()
    dense = w.dequantize()
    assert (dense.shape, dense.dtype, w.shape, len(w), w.ndim) == ((N, K), np.float32, (N, K), N, 2)
    assert_array_equal(w.dequantize("float16"), dense.astype(np.float16))
    x, bias, residual = normal(2, 3, K), normal(N, seed=1), normal(2, 3, N, seed=2)
    close(x @ w.T, x, dense)
    close(qgemm.matmul(x[0, 0], w)[None], x[0, :1], dense)
    close(qgemm.matmul(x, w, bias=bias, residual=residual), x, dense, bias + residual)
    y = qgemm.matmul(x.astype(np.float16), w, dtype="float16")
    assert y.dtype == np.float16
    close(y, x.astype(np.float16), dense, dtype="float16")
    out = np.full((2, 3, N), np.nan, np.float16)
    assert qgemm.matmul(x, w, bias=bias, out=out) is out
    close(out, x, dense, bias, "float16")
    doubles = qgemm.matmul(x[0], w, residual=residual[0], out=residual[0])  # the residual may be y
    assert np.shares_memory(doubles, residual)


@pytest.mark.usefixtures("engine")
@views
def test_several_products(make):
    w, other = make(), stored(seed=8)
    x, outs = normal(3, K), [np.empty((3, N), np.float32) for _ in range(3)]
    ys = qgemm.matmul_many(x, [other, w, w], biases=[None, np.ones(N, np.float32), None], outs=outs)
    assert all(y is out for y, out in zip(ys, outs, strict=True))
    for y, weights, added in zip(ys, (other, w, w), (0, 1, 0), strict=True):
        close(y, x, weights.dequantize(), np.float64(added))


@pytest.mark.usefixtures("engine")
@views
def test_gated_products(make):
    """Either or both may be views, of the same order or of two."""
    w, other = make(), stored(seed=8)
    x, bias = normal(3, K), normal(N, seed=4)
    for gate, up in ((w, other), (other, w), (w, make()), (w, reordered(2, np.roll(COLUMNS, 1)))):
        g, u = (x @ weights.dequantize().T for weights in (gate, up))
        out = np.empty((3, N), np.float32)
        assert qgemm.gated(x, gate, up, biases=[bias, None], out=out) is out
        assert_allclose(out, (g + bias) / (1 + np.exp(-(g + bias))) * u, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("engine")
@views
def test_integer_products(make):
    """x is quantized in the order of the blocks, so the product is that of the stored matrix."""
    w, x = make(), normal(3, K)
    y = qgemm.matmul(x, w, "a8")
    moved = x[:, w.columns] if isinstance(w, qgemm.Reordered) else x
    of_blocks = qgemm.matmul(moved, w.tensor, "a8")
    if isinstance(w, qgemm.Scaled):
        of_blocks = of_blocks / w.factor if w.divides else of_blocks * w.factor
    assert_array_equal(y, of_blocks)


def test_what_is_refused():
    w, x = reordered(), normal(3, K)
    with pytest.raises(qgemm.UnsupportedError, match=r"another order .* give x as floats"):
        qgemm.matmul(qgemm.quantize_activations(x), w)
    for view in (w, scaled()):
        with pytest.raises(ValueError, match="64"):
            qgemm.matmul(normal(3, 64), view)
        with pytest.raises(ValueError, match="shape"):
            qgemm.matmul(x, view, out=np.empty((3, 5), np.float32))
        with pytest.raises(qgemm.QgemmError):
            qgemm.moe_matmul(x, view, np.zeros((3, 1), np.int32))
        with pytest.raises(TypeError, match="is not inflated silently"):
            np.asarray(view)
    assert repr(w) == "<Reordered <Tensor Q4_0 48 x 128>>"


def test_scales_of_a_view_are_rounded_before_they_multiply():
    """As quantizers do: the factor goes to the scale of each group, not to the product of scale and code."""
    blocks = qgemm.FORMATS["nvfp4"].quantize(normal(N, K, seed=3))
    levels = qgemm.FORMATS["nvfp4"].levels(blocks.reshape(-1))
    for divides in (False, True):
        factor = np.float32(0.3711)
        scale = levels.scale / factor if divides else levels.scale * factor
        want = (levels.codes * scale[..., None]).astype(np.float32).reshape(N, K)
        assert_array_equal(qgemm.Scaled(qgemm.Tensor("nvfp4", (N, K), blocks), factor, divides).dequantize(), want)


def test_views_are_prepared_as_what_they_multiply_by():
    views = [reordered(), scaled()]
    of_stored = qgemm.prepare([w.tensor for w in views], m=1, progress=False)
    assert qgemm.prepare(views, m=1, progress=False).kernels == of_stored.kernels
