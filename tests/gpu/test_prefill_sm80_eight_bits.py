"""prefill_sm80_eight_bits on a GPU, wherever routes send its problems: every format and config, equal bits, NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from eight_bit_codes import codes_of, of_units
from helpers import assert_same_bits, cupy, guarded, normal, random_tensor
from measured_errors import of_groups
from strategies import CODES, over_formats

import qgemm
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.kernels import prefill_sm80_eight_bits as prefill
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels.prefill_sm80 import Plan
from qgemm.cuda.problem import EIGHT_BITS, Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

every_kind = pytest.mark.parametrize("kind", INTEGER)


def multiply(prepared, w, kind, plan=None, y=None, bias=0):
    """Prepared activations times a DeviceTensor by a plan of the kernel, into an output full of NaN."""
    cp, (m, _), n = cupy(), prepared.shape, w.shape[0]
    on = gpu_of(cp.cuda.Device().id)
    y = cp.full((m, n), cp.nan, np.float32) if y is None else y
    p = Problem(w.format, kind, m, *w.shape, on.sm, EIGHT_BITS, (Output(n),), 0, on.device, on.sms)
    plan = plan or prefill.PREFILL_SM80_EIGHT_BITS.choose(p)
    run = prefill.PREFILL_SM80_EIGHT_BITS.launch(p, plan)
    run(cp.cuda.get_current_stream().ptr, prepared.pointer, w.pointer, y.data.ptr, bias, 0)
    return y


def on_gpu(x, kind):
    """Prepared activations of a NumPy array."""
    return qgemm.quantize_activations(cupy().asarray(x), kind)


def of_kernel(w, on_device):
    """The codes that the kernel multiplies."""
    kind = "a8_g256"
    return codes_of(w, multiply(on_gpu(np.eye(w.shape[1], dtype=np.float32), kind), on_device, kind).get())


@over_formats([fmt for fmt in CODES if fmt.tiled])
def test_products_are_the_formula_in_exact_integers(fmt):
    """M on both sides of each token tile; N and K that end inside a tile or a group; nothing beside y is touched."""
    rng = np.random.default_rng(7)
    w = random_tensor(fmt, 200, 1120, rng)
    on_device = w.to_device()
    weights = of_kernel(w, on_device)
    for kind, m in itertools.product(INTEGER, (1, 17, 64, 150)):
        prepared = on_gpu(rng.standard_normal((m, w.shape[1])).astype(np.float16), kind)
        rows, y = guarded(m, 200)
        multiply(prepared, on_device, kind, y=y)
        got = rows.get()
        assert np.isnan(got[[0, -1]]).all()
        expected = of_groups(prepared.blocks(), weights)
        expected.check(got[1:-1])


@every_kind
@over_formats([fmt for fmt in CODES if fmt.name in ("q4_0", "q8_0", "q6_k")])
@pytest.mark.parametrize("config", prefill.measured(), ids=lambda config: str(config).replace(" ", "_"))
def test_every_config(fmt, kind, config):
    """Over CTAs along K, slices without a stage among them; the same bits again."""
    rng = np.random.default_rng(config.tokens)
    for n, k in ((config.row_blocks * 64 + 24, 256), (config.row_blocks * 64 - 8, 1600)):
        w = random_tensor(fmt, n, k, rng)
        on_device = w.to_device()
        weights = of_kernel(w, on_device)
        for m, split_k in itertools.product((1, config.tokens, config.tokens + 1), (1, 3, 4)):
            prepared = on_gpu(rng.standard_normal((m, w.shape[1])).astype(np.float16), kind)
            expected = of_groups(prepared.blocks(), weights)
            y = multiply(prepared, on_device, kind, Plan(config, split_k))
            expected.check(y.get())
            assert bool((multiply(prepared, on_device, kind, Plan(config, split_k)) == y).all())


@every_kind
def test_integers_are_exact_to_the_ends_of_int8(kind):
    """Where scales are 1: bit for bit the product on the CPU."""
    x, w = of_units(130, 330, 1120, np.random.default_rng(5))
    want, prepared, on_device = qgemm.matmul(x, w, kind), on_gpu(x, kind), w.to_device()
    assert want[0, 0] == -want[1, 0] == -1120 * 127**2
    for config, split_k in itertools.product(prefill.measured(), (1, 4)):
        np.testing.assert_array_equal(multiply(prepared, on_device, kind, Plan(config, split_k)).get(), want)


@every_kind
@pytest.mark.parametrize("split_k", [1, 4])
def test_same_bits_again(kind, split_k):
    w = random_tensor(qgemm.FORMATS["q5_1"], 320, 2048, np.random.default_rng(3)).to_device()
    prepared, plan = on_gpu(normal(77, 2048), kind), Plan(prefill.measured()[0], split_k)
    assert_same_bits(multiply(prepared, w, kind, plan), lambda: multiply(prepared, w, kind, plan))


@every_kind
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity(kind):
    w, x = random_tensor(qgemm.FORMATS["q4_0"], 150, 512, np.random.default_rng(1)), normal(140, 512)
    want = multiply(on_gpu(x, kind), w.to_device(), kind).get()
    x[1, 7], x[133, 300] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][140, 9] = np.nan, np.inf
    y = multiply(on_gpu(x, kind), qgemm.Tensor(w.format, w.shape, blocks).to_device(), kind).get()
    lost = np.zeros(y.shape, bool)
    lost[[1, 133]] = lost[:, [3, 140]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_by_matmul(kind, dtype, monkeypatch):
    """Where the route leads to it: bias and residual, y of another type, activations prepared for several products."""
    rows = [row._replace(least=75) for row in routes.ROUTES if row.kernel.name == prefill.NAME]
    monkeypatch.setattr(routes, "ROUTES", (*rows, *routes.ROUTES))
    cp, rng = cupy(), np.random.default_rng(8)
    w = random_tensor(qgemm.FORMATS["q4_k"], 200, 1024, rng).to_device()
    x = cp.asarray(rng.standard_normal((70, 1024)).astype(np.float16))
    first = qgemm.matmul(x, w, kind)
    assert bool((first == multiply(qgemm.quantize_activations(x, kind), w, kind)).all())
    bias, residual = cp.asarray(normal(200)), cp.asarray(normal(70, 200, seed=1))
    prepared = qgemm.quantize_activations(x, kind)
    for source in (x, prepared, prepared):
        y = qgemm.matmul(source, w, kind, bias=bias, residual=residual, dtype=dtype)
        np.testing.assert_array_equal(y.get(), (first + bias + residual).astype(dtype).get())
