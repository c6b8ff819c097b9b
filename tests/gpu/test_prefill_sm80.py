"""prefill_sm80 and prefill_sm80_a8: every config of y on both sides of its edges, against float64."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from helpers import assert_same_bits, cupy, poisoned, random_tensor
from measured_errors import of_integer_dots
from references import reference
from strategies import INTEGER, TILED, over_formats

import qgemm
from qgemm.codec.error_bound import a16_bound
from qgemm.codec.format import float_dtype
from qgemm.cuda.activations import DeviceActivations
from qgemm.cuda.call.plan import Source, problem, problem_of_launch
from qgemm.cuda.kernels import prefill_sm80, routes
from qgemm.cuda.kernels.activations import scale_launch
from qgemm.cuda.kernels.prefill_sm80 import A8, A16, PREFILL_SM80, PREFILL_SM80_A8, SM80_CONFIGS
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Q8_1, SCALED_ROWS, Output, c_type

LOSS = 2 * 2.0**-11  # relative error of a weight: scale (or minimum) and weight are rounded to half


def each_config(*kernels):
    """Parametrise a test over the configs of these kernels."""
    configs = [config for config in SM80_CONFIGS if config.kernel in kernels]
    return pytest.mark.parametrize("config", configs, ids=lambda config: "x".join(map(str, config[:-1])))


def drawn(fmt, n, blocks, seed):
    """Weights [n, blocks * weights] with tame scales."""
    return random_tensor(fmt, n, blocks * fmt.weights, np.random.default_rng(seed))


def expected_product(x, w, dtype):
    """The product of a Reference w and x of the GPU by sums in float32.

    Weights are off by LOSS, or by the rounding of subnormal halves, whose smallest is 2^-24. Levels of a codebook are
    rounded to half as well.
    """
    fmt, size = w.w.format, abs(x.astype(np.float64))
    lost = (LOSS + fmt.needs_table * 2.0**-11) * (size @ w.magnitudes.T)
    # Half of the least number: of the scale, times a level, of the minimum, and of the weight.
    least = 2.0 ** (w.on_device.exponent - 25) * (float(tiles.largest_code(fmt)) + 2)
    lost += least * size.sum(axis=1)[:, None]
    return w.expected(x, 2 * a16_bound(size, w.magnitudes) + lost, dtype)


def multiply(x, w, dtype="float32", plan=None):
    """x, an array or prepared, times w by its kernel, into an output full of NaN."""
    y = poisoned((x.shape[0], w.shape[0]), dtype)
    launch(x, w, y, cupy().cuda.get_current_stream().ptr, plan)
    return y


def launch(x, w, y, stream, plan=None):
    """y of any type has the same sums."""
    prepared = isinstance(x, DeviceActivations)
    data, source, kernel = (x.data, Q8_1, PREFILL_SM80_A8) if prepared else (x, c_type(x.dtype), PREFILL_SM80)
    if source == "bf16":
        data, source = scaled(x, stream), SCALED_ROWS
    x_source = Source(len(y), x.shape[-1], x.dtype.name, prepared)
    p = problem(w, x_source, "a8" if prepared else "a16")
    p = problem_of_launch(kernel, [p], [Output(w.shape[0], y.dtype.name)], source)
    kernel.launch(p, plan or kernel.choose(p))(stream, data.data.ptr, w.pointer, y.data.ptr, 0, 0)


def scaled(x, stream):
    """x of bfloat16 as the kernel reads it."""
    rows = cupy().empty(scaled_rows.nbytes(*x.shape), np.uint8)
    scale_launch(cupy().cuda.Device().id, x.shape[1], len(x))(stream, x.data.ptr, rows.data.ptr)
    return rows


def on_gpu(x, dtype):
    """A CuPy array of float16 or bfloat16, or "a8": activations prepared from float16."""
    if dtype == "a8":
        return qgemm.quantize_activations(cupy().asarray(x.astype(np.float16)))
    return cupy().asarray(x.astype(float_dtype(dtype)))


def products(fmt, config):
    """Weights with their reference, float64 x and a plan: rows of x and W on both sides of a tile's edges, K of fewer
    k_blocks than stages, of more, and ragged, whole and in split_k."""
    rows, columns = config.row_blocks * 64, tiles.columns(fmt) // fmt.weights
    shapes = (rows + 24, 1), (rows - 8, 11 * columns - columns // 2)
    for n, blocks in shapes:
        w = reference(fmt, n, blocks * fmt.weights)
        for m, split_k in itertools.product((1, config.tokens, config.tokens + 1), (1, 3)):
            x = np.random.default_rng(m).standard_normal((m, w.w.shape[1]))
            yield w, x, prefill_sm80.Plan(config, split_k)


@over_formats(TILED)
@each_config(A16)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_within_bound(fmt, config, dtype):
    for w, x, plan in products(fmt, config):
        x = on_gpu(x, dtype)
        y = multiply(x, w.on_device, plan=plan)
        expected_product(x, w, dtype).check(y)


@over_formats(INTEGER)
@each_config(A8)
def test_a8_is_its_formula(fmt, config):
    """The error is no more than that of float32 sums of the formula's terms."""
    for w, x, plan in products(fmt, config):
        x = on_gpu(x, "float16")
        expected = w.a8(x)
        expected = expected._replace(bound=expected.bound / 2)
        expected.check(multiply(qgemm.quantize_activations(x), w.on_device, plan=plan))


@pytest.fixture
def routed_to_a8(monkeypatch):
    """Its route on every GPU."""
    rows = [row._replace(least=80, below=routes.ANY) for row in routes.ROUTES if row.kernel.name == A8]
    monkeypatch.setattr(routes, "ROUTES", (*rows, *routes.ROUTES))


@pytest.mark.usefixtures("routed_to_a8")
@over_formats(INTEGER)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a8_by_matmul(fmt, dtype):
    """x of every type, bias and residual, y of the type of x: M on both sides of a token tile."""
    kind = float_dtype(dtype)
    w = drawn(fmt, 200, 5, 1)
    on_device, rng = w.to_device(), np.random.default_rng(4)
    for m in (31, 33, 130):
        x = rng.standard_normal((m, w.shape[1])).astype(kind)
        bias, residual = (rng.standard_normal(shape).astype(np.float32) for shape in ((200,), (m, 200)))
        added = {"bias": cupy().asarray(bias), "residual": cupy().asarray(residual)}
        y = qgemm.matmul(cupy().asarray(x), on_device, "a8", dtype=kind, **added).get()
        expected = of_integer_dots(qgemm.quantize_activations(x).blocks, w)
        expected._replace(bound=expected.bound / 2).plus(bias, residual).rounded(dtype).check(y)
        (repeated,) = qgemm.matmul_many(qgemm.quantize_activations(cupy().asarray(x)), [on_device], dtype=kind)
        assert (repeated == qgemm.matmul(cupy().asarray(x), on_device, "a8", dtype=kind)).all()


@over_formats(TILED)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_identity_gives_the_weights(fmt, dtype):
    """Each weight alone: rounded to half (twice, with its scale), then to y's type, which may be subnormal."""
    w = reference(fmt, 200, 3 * fmt.weights)
    for source in ("float16", "bfloat16"):
        x = on_gpu(np.eye(w.w.shape[1]), source)
        expected_product(x, w, source).rounded(dtype).check_worst_case(multiply(x, w.on_device, dtype))


@each_config(A16, A8)
@pytest.mark.parametrize("split_k", [1, 4])
def test_same_bits_again_and_in_a_graph(config, split_k):
    cp = cupy()
    plan = prefill_sm80.Plan(config, split_k)
    w = drawn(qgemm.FORMATS["q5_1"], 320, 20, 3).to_device()
    x = on_gpu(np.random.default_rng(3).standard_normal((77, 640)), "a8" if config.kernel == A8 else "float16")
    first = multiply(x, w, "float16", plan)
    assert_same_bits(first, lambda: multiply(x, w, "float16", plan))
    y = cp.empty_like(first)
    with cp.cuda.Stream(non_blocking=True) as stream:
        run = partial(launch, x, w, y, stream.ptr, plan)
        run()  # takes its memory
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        for _ in range(3):
            y.fill(cp.nan)
            graph.launch(stream)
            assert (y == first).all()
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("m", [17, 64, 130])
@pytest.mark.parametrize("dtype", ["float16", "a8"])
def test_nan_stays_in_its_row_and_guards_stay(m, dtype):
    cp = cupy()
    blocks = drawn(qgemm.FORMATS["q4_1"], 100, 9, m).blocks.copy()
    x = np.random.default_rng(m).standard_normal((m, 288))
    clean = multiply(on_gpu(x, dtype), qgemm.Tensor("q4_1", (100, 288), blocks).to_device()).get()
    blocks["d"][17, 2], x[m // 2, 5] = np.nan, np.inf
    guarded = cp.full((m + 2, 100), 7.0, np.float32)
    w = qgemm.Tensor("q4_1", (100, 288), blocks).to_device()
    launch(on_gpu(x, dtype), w, guarded[1:-1], cp.cuda.get_current_stream().ptr)
    y = guarded.get()
    touched = np.zeros(clean.shape, bool)
    touched[m // 2], touched[:, 17] = True, True
    assert not np.isfinite(y[1:-1][touched]).any()
    np.testing.assert_array_equal(y[1:-1][~touched], clean[~touched])
    assert (y[[0, -1]] == 7).all()
