"""prefill_sm80_eight_bits without a GPU: its products on the host, its plans and routes."""

from __future__ import annotations

import itertools

import harness
import numpy as np
import pytest
from eight_bit_codes import check_ends_of_int8, check_epilogue, codes_of, prepared
from harness.products import run_eight_bits
from helpers import normal, random_tensor
from strategies import CODES, over_formats

import qgemm
from qgemm.codec.error_bound import a8_g256_exact, excess
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.kernels import prefill_sm80_eight_bits as prefill
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels.decode_config import shared_limit
from qgemm.cuda.kernels.prefill_sm80 import WAVES, tiles_of
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem
from qgemm.formats import format_of

# A code, scale and minimum of each kind, and both kinds of tables; the harness has the codes of all formats
# (tests/test_operand_a.py).
SOME = ("q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "mxfp4", "iq4_nl", "iq2_xs", "u8_g256")
every_kind = pytest.mark.parametrize("kind", INTEGER)


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([format_of(name) for name in SOME])
def test_products_are_the_formula_in_exact_integers(fmt):
    """N, K and M that end inside a tile, a stage and a token tile; integers are of the kernel's codes of W."""
    (kind,) = INTEGER
    w = random_tensor(fmt, 70, 288, np.random.default_rng(3))
    identity, blocks = np.eye(w.shape[1], dtype=np.float32), prepared(normal(5, w.shape[1], seed=4), kind)
    weights = codes_of(w, run_eight_bits(w, prepared(identity, kind), kind, config=2))
    want, near = a8_g256_exact(blocks, weights)
    y = run_eight_bits(w, blocks, kind, config=2)
    assert excess(y.astype(np.float64), want, 2 * near) <= 1


@pytest.mark.compiles
@harness.needs_compiler
@every_kind
@pytest.mark.parametrize("config", range(len(prefill.measured())))
def test_integers_are_exact_to_the_ends_of_int8(kind, config):
    """Over CTAs along K as well, threads in either order."""
    check_ends_of_int8(run_eight_bits, kind, config, (70, 140, 544), ((1, False), (3, True)))


@pytest.mark.compiles
@harness.needs_compiler
@pytest.mark.parametrize(("out", "bias", "residual"), [("float16", "float32", None), ("float32", None, "bfloat16")])
def test_epilogue(out, bias, residual):
    check_epilogue(run_eight_bits, "a8_g256", 2, out, bias, residual)


@pytest.mark.compiles
@harness.needs_compiler
@every_kind
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity(kind):
    w = random_tensor(qgemm.FORMATS["q4_0"], 70, 320, np.random.default_rng(1))
    x = normal(20, 320)
    want = run_eight_bits(w, prepared(x, kind), kind, 2)
    x[1, 7], x[17, 300] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][66, 9] = np.nan, np.inf
    y = run_eight_bits(qgemm.Tensor(w.format, w.shape, blocks), prepared(x, kind), kind, 2)
    lost = np.zeros(y.shape, bool)
    lost[[1, 17]] = lost[:, [3, 66]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@every_kind
@over_formats([fmt for fmt in CODES if fmt.tiled])
@pytest.mark.parametrize("sm", [80, 86, 89, 100, 120])
def test_a_plan_for_every_product(fmt, sm, kind):
    """It fits the GPU's shared memory, and does not keep more sums of split_k than it may."""
    for n, m in itertools.product((64, 4096, 28672), (1, 17, 4096)):
        p = Problem(fmt, kind, m, n, 4096, sm, EIGHT_BITS, sms=100)
        plan = prefill.ranked(p)[0][0]
        assert prefill.PREFILL_SM80_EIGHT_BITS.template(p, plan)["SMEM_BYTES"] <= shared_limit(sm)
        assert plan.split_k == 1 or tiles_of(plan.config, n, m) * plan.split_k <= WAVES * 100


@every_kind
@pytest.mark.parametrize("x", TYPES)
def test_routes(kind, x):
    """By wgmma on sm_90, by mma.sync from sm_80 on elsewhere, for any number of rows of x."""
    for m, sm in itertools.product((1, 64, 240), (80, 86, 89, 90, 100, 120)):
        p = Problem(qgemm.FORMATS["q4_k"], kind, m, 64, 256, sm, x)
        assert routes.route(p).kernel.name == ("prefill_sm90_eight_bits" if sm == 90 else prefill.NAME)
    with pytest.raises(qgemm.UnsupportedError, match="on sm_75"):
        routes.route(Problem(qgemm.FORMATS["q4_k"], kind, 64, 64, 256, 75, x))
