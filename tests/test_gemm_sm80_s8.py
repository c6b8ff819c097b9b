"""gemm_sm80_s8 without a GPU: its products on the host, its plans and routes."""

from __future__ import annotations

import itertools
from functools import partial

import harness
import numpy as np
import pytest
from eight_bit_codes import check_ends_of_int8, check_epilogue, prepared
from harness.products import run_eight_bits
from helpers import normal, random_tensor
from strategies import CODES, over_formats

import qgemm
from qgemm.cuda.kernels import gemm_sm80_s8 as gemm
from qgemm.cuda.kernels import prefill_sm80_eight_bits as prefill
from qgemm.cuda.kernels import routes
from qgemm.cuda.kernels.decode_config import shared_limit
from qgemm.cuda.kernels.prefill_sm80 import Plan, may_share
from qgemm.cuda.problem import EIGHT_BITS, TYPES, Problem
from qgemm.formats import format_of

KIND = "a8_g256"
# A code, scale and minimum of each kind, groups of 16, 32 and 256, tiles of one and of several k_blocks.
SOME = ("q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "mxfp4", "tq1_0", "u8_g256")
SERVED = [fmt for fmt in CODES if gemm.serves(fmt)]
every_config = pytest.mark.parametrize("config", range(len(gemm.measured())))
run = partial(run_eight_bits, record=gemm.GEMM_SM80_S8)


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([format_of(name) for name in SOME])
def test_products_have_the_bits_of_the_kernel_for_fewer_rows(fmt):
    """N, K and M that end inside a tile, a group, a chunk and a token tile."""
    w = random_tensor(fmt, 150, 544, np.random.default_rng(3))
    blocks = prepared(normal(147, w.shape[1], seed=4), KIND)
    np.testing.assert_array_equal(run(w, blocks, KIND), run_eight_bits(w, blocks, KIND, config=2))


@pytest.mark.compiles
@harness.needs_compiler
@every_config
def test_integers_are_exact_to_the_ends_of_int8(config):
    """Over CTAs along K as well, threads in either order."""
    check_ends_of_int8(run, KIND, config, (140, 300, 1056), ((1, False), (3, True), (4, False)))


@pytest.mark.compiles
@harness.needs_compiler
@pytest.mark.parametrize(("out", "bias", "residual"), [("float16", "float32", None), ("bfloat16", None, "float32")])
def test_epilogue(out, bias, residual):
    check_epilogue(run, KIND, 0, out, bias, residual)


@pytest.mark.compiles
@harness.needs_compiler
def test_nothing_but_its_own_row_and_column_meets_nan_and_infinity():
    w, x = random_tensor(qgemm.FORMATS["q4_0"], 70, 320, np.random.default_rng(1)), normal(20, 320)
    want = run(w, prepared(x, KIND), KIND)
    x[1, 7], x[17, 300] = np.nan, -np.inf
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][66, 9] = np.nan, np.inf
    y = run(qgemm.Tensor(w.format, w.shape, blocks), prepared(x, KIND), KIND)
    lost = np.zeros(y.shape, bool)
    lost[[1, 17]] = lost[:, [3, 66]] = True
    np.testing.assert_array_equal(np.isnan(y), lost)
    np.testing.assert_array_equal(y[~lost], want[~lost])


@over_formats(SERVED)
@pytest.mark.parametrize("sm", [80, 86, 89, 100, 120])
def test_a_plan_for_every_product(fmt, sm):
    """It fits the GPU's shared memory, for as many CTAs as the cost model says; CTAs along K are at most two waves."""
    for n, m in itertools.product((64, 4096, 28672), (1, 257, 4096)):
        p = Problem(fmt, KIND, m, n, 4096, sm, EIGHT_BITS, sms=100)
        plan = gemm.ranked(p)[0][0]
        nbytes, ctas = gemm.GEMM_SM80_S8.template(p, plan)["SMEM_BYTES"], gemm.ctas_of_sm(p, plan.config)
        assert nbytes <= shared_limit(sm)
        assert 1 <= ctas <= gemm.SM_WARPS * 32 // plan.config.threads
        assert ctas * (nbytes + 1024) <= shared_limit(sm) + 2048
        assert may_share(plan, n, m, 100)


def test_the_cost_model_has_the_measured_order():
    """Two CTAs of four warps share an SM where their memory fits: q4_0 on 99 KB, not q8_0; alone they waste it."""
    for name, row_blocks, us in (("q4_0", 2, 147), ("q8_0", 4, 152)):
        p = Problem(qgemm.FORMATS[name], KIND, 512, 8192, 8192, 86, EIGHT_BITS, sms=132)
        plan, predicted = gemm.ranked(p)[0]
        assert plan == Plan(plan.config)
        assert plan.config.row_blocks == row_blocks
        assert round(predicted) == us
    p = Problem(qgemm.FORMATS["q4_0"], KIND, 256, 8192, 8192, 86, EIGHT_BITS, sms=132)
    assert gemm.ranked(p)[0][0].split_k == 2


@pytest.mark.parametrize("x", TYPES)
def test_it_serves_many_rows_where_it_is_faster(x):
    """On GPUs without wgmma, and formats without a table of levels."""
    for name, m, sm in itertools.product(("q4_k", "iq2_xs"), (1, 255, 256, 512, 4096), (80, 86, 89, 90, 100, 120)):
        p = Problem(qgemm.FORMATS[name], KIND, m, 8192, 8192, sm, x)
        served = name == "q4_k" and m >= 256 and sm != 90
        assert (routes.route(p).kernel is gemm.GEMM_SM80_S8) == served
    p = Problem(qgemm.FORMATS["q4_k"], KIND, 320, 64, 8192, 80, x)
    assert (gemm.ranked(p)[0][1] < prefill.ranked(p)[0][1]) == (routes.route(p).kernel is gemm.GEMM_SM80_S8)
