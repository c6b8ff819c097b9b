"""prefill_sm80 and prefill_sm80_a8 without a GPU: the choice of a plan."""

from __future__ import annotations

import itertools

import pytest
from strategies import INTEGER, TILED

import qgemm
from qgemm.cuda.kernels import prefill_sm80, routes
from qgemm.cuda.kernels.prefill_sm80 import A8, A16
from qgemm.cuda.problem import Q8_1, TYPES, Problem


@pytest.mark.parametrize(("kernel", "fmt"), [*((A16, fmt) for fmt in TILED), *((A8, fmt) for fmt in INTEGER)], ids=str)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_a_plan_for_every_product(kernel, fmt, sm):
    """It fits the GPU's shared memory, and the CTAs of split_k are at most WAVES waves."""
    for n, m in itertools.product((64, 4096, 28672), (1, 17, 33, 128, 4096)):
        config, split_k = prefill_sm80.ranked(kernel, Problem(fmt, "", m, n, 4096, sm, sms=100))[0][0]
        source = Q8_1 if kernel == A8 else "half"
        stages = prefill_sm80.template(fmt, config, source, "half", sm)["STAGES"]
        assert stages >= prefill_sm80.MIN_STAGES
        assert prefill_sm80.shared_bytes(fmt, config, stages) <= prefill_sm80.shared_limit(sm)
        assert split_k == 1 or prefill_sm80.tiles_of(config, n, m) * split_k <= prefill_sm80.WAVES * 100


def test_plans_fill_the_gpu():
    """Few tiles are shared, many are not; and a config is not far larger than M. As measured on an H200."""
    problems = [Problem(qgemm.FORMATS["q4_0"], "a16", m, 8192, 8192, 90) for m in (32, 64, 256, 4096)]
    plans = {p.m: prefill_sm80.ranked(A16, p)[0][0] for p in problems}
    sizes = {m: (config.tokens, config.row_blocks, split_k) for m, (config, split_k) in plans.items()}
    assert sizes == {32: (32, 1, 1), 64: (64, 4, 4), 256: (128, 4, 2), 4096: (128, 4, 1)}


@pytest.mark.parametrize(
    ("m", "sm", "half", "others"),
    [
        (16, 80, "decode_a8", "decode_a8"),
        (64, 80, A8, A8),
        (65, 80, "dequantize", A8),
        (1 << 20, 89, A8, A8),
        (65, 90, "prefill_sm90", A8),
        (65, 100, "dequantize", A8),
        (129, 120, A8, A8),
    ],
)
def test_a8_goes_to_integer_dots(m, sm, half, others):
    """half x: at any M on GPUs with fast float32 beside the tensor cores; other x, whose panels are float: always."""
    kernels = [routes.route(Problem(qgemm.FORMATS["q4_k"], "a8", m, 64, 256, sm, x)).kernel.name for x in TYPES]
    assert kernels == [{"half": half}.get(x, others) for x in TYPES]
