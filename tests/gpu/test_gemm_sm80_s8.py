"""gemm_sm80_s8 on a GPU, wherever routes send its problems: the bits of prefill_sm80_eight_bits."""

from __future__ import annotations

import itertools

import numpy as np
from eight_bit_codes import of_units
from helpers import cupy, random_tensor
from strategies import CODES, over_formats

import qgemm
from qgemm.cuda.kernels import gemm_sm80_s8 as gemm
from qgemm.cuda.kernels.prefill_sm80 import Plan
from qgemm.cuda.kernels.prefill_sm80_eight_bits import PREFILL_SM80_EIGHT_BITS
from qgemm.cuda.problem import EIGHT_BITS, Output, Problem
from qgemm.cuda.problem import gpu as gpu_of

KIND = "a8_g256"


def multiply(kernel, prepared, w, config=None, split_k=1):
    """Prepared activations times a DeviceTensor, with a bias of ones, into an output full of NaN."""
    cp, (m, _), n = cupy(), prepared.shape, w.shape[0]
    on = gpu_of(cp.cuda.Device().id)
    y, bias = cp.full((m, n), cp.nan, np.float32), cp.ones(n, np.float32)
    p = Problem(w.format, KIND, m, *w.shape, on.sm, EIGHT_BITS, (Output(n, bias="float32"),), 0, on.device, on.sms)
    plan = kernel.choose(p) if config is None else Plan(config, split_k)
    stream = cp.cuda.get_current_stream().ptr
    kernel.launch(p, plan)(stream, prepared.pointer, w.pointer, y.data.ptr, bias.data.ptr, 0)
    return y.get()


@over_formats([fmt for fmt in CODES if gemm.serves(fmt)])
def test_products_have_the_bits_of_the_kernel_for_fewer_rows(fmt):
    """M on both sides of a token tile; N and K that end inside a tile or a group; every config, twice."""
    rng = np.random.default_rng(7)
    w = random_tensor(fmt, 330, 1120, rng).to_device()
    (first,) = (plan for plan in PREFILL_SM80_EIGHT_BITS.configs(problem_of(w)) if plan.config.tokens == 16)
    for m, split_k in itertools.product((1, 128, 129, 300), (1, 3)):
        x = cupy().asarray(rng.standard_normal((m, w.shape[1])).astype(np.float16))
        prepared = qgemm.quantize_activations(x, KIND)
        want = multiply(PREFILL_SM80_EIGHT_BITS, prepared, w, first.config, split_k)
        for config in (plan.config for plan in gemm.GEMM_SM80_S8.configs(problem_of(w))):
            for _ in range(2):
                np.testing.assert_array_equal(multiply(gemm.GEMM_SM80_S8, prepared, w, config, split_k), want)


def problem_of(w):
    """Any problem of these weights."""
    return Problem(w.format, KIND, 1, *w.shape, gpu_of(w.device).sm, EIGHT_BITS)


def test_integers_are_exact_to_the_ends_of_int8():
    """Where scales are 1: bit for bit the product on the CPU."""
    x, w = of_units(290, 330, 1120, np.random.default_rng(5))
    want, on_device = qgemm.matmul(x, w, KIND) + 1, w.to_device()
    prepared = qgemm.quantize_activations(cupy().asarray(x), KIND)
    for config, split_k in itertools.product(gemm.measured(), (1, 4)):
        np.testing.assert_array_equal(multiply(gemm.GEMM_SM80_S8, prepared, on_device, config, split_k), want)
