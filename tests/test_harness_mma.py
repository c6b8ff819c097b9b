"""Kernels of sm_80 on tensor cores, run on the host: mma.sync, ldmatrix and cp.async by their definitions.

Every format that such a kernel takes, those of tests included: groups of 128 and 256 weights, a zero of each group.
"""

from __future__ import annotations

from functools import cache

import harness
import helpers
import numpy as np
import pytest
from harness import Kernel, device_array, to_device
from q8_1_blocks import in_k_blocks
from strategies import EVERY_INTEGER, EVERY_TILED, each

import qgemm
from qgemm.cuda.jit.twins import Products, Types
from qgemm.cuda.kernels import decode, prefill_sm80
from qgemm.cuda.kernels.decode_config import decode_configs_for, decode_template
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Q8_1

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
kernel = cache(Kernel)
SM = 80


@cache
def problem(fmt, m, k=320, n=70):
    """W [n, k'] with ordinary scales, x [m, k'] on the float16 grid, and their product with its bound."""
    w = helpers.random_tensor(fmt, n, k, np.random.default_rng(3))
    x = helpers.normal(m, w.shape[1], seed=4).astype(np.float16).astype(np.float32)
    return (
        w,
        x,
        helpers.exact(x, w),
        helpers.product_bound(x, w, np.dtype(np.float16)) + helpers.level_loss(x, w, "float16"),
    )


def run_prefill(fmt, name, source, x, w, m, split_k):
    """y [m, n] by the first config of a kernel of sm_80."""
    config = prefill_sm80.sm80_configs_for(name, fmt, SM)[0]
    n, k = w.shape
    count = prefill_sm80.tiles_of(config, n, m)
    y, counters = device_array((m, n), np.float32), device_array(count, np.uint32)
    of_tile = config.warp_split_k * config.row_blocks * tiles.ROWS * config.tokens
    partials = device_array(count * split_k * of_tile, np.float32)
    made = kernel(name, fmt, **prefill_sm80.template(fmt, config, source, "float", SM))
    factors = (2.0 ** tiles.level_exponent(fmt), 1.0) if name == prefill_sm80.A16 else ()
    packed = to_device(tiles.pack(fmt, w.blocks))
    made(count * split_k, config.threads, packed, to_device(x), y, partials, counters, n, k, m, split_k, *factors)
    assert not counters.any()
    return y


@each(EVERY_TILED)
def test_prefill(fmt):
    """W dequantized to half in registers, sums in float32, over CTAs in order."""
    w, x, expected, bound = problem(fmt, 5)
    y = run_prefill(fmt, prefill_sm80.A16, "half", x.astype(np.float16), w, len(x), 2)
    assert (np.abs(y - expected) <= bound).all()


@each(EVERY_INTEGER)
def test_prefill_of_quantized_activations(fmt):
    """Integer products of codes."""
    w, x, _, _ = problem(fmt, 5)
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    y = run_prefill(fmt, prefill_sm80.A8, Q8_1, blocks, w, len(x), 1)
    helpers.assert_a8(y, x, w)


def run_decode(fmt, name, source, x, w, m):
    """y [m, n] by the first config of a decode kernel."""
    n, k = w.shape
    tokens = decode.token_tile(m)
    config = next(iter(decode_configs_for(fmt, name, tokens, SM)))
    template = decode_template(fmt, config, tokens, name, source, SM)
    rows = 16 * config.m16_tiles
    y, packed, given = device_array((m, n), np.float32), to_device(tiles.pack(fmt, w.blocks)), to_device(x)
    products = Products(k=k, m=m, x=given.ctypes.data)
    products.of[0].n, products.of[0].end, products.of[0].types = n, -(-n // rows), Types.of("float32", "", "")
    products.arrays[0].tiles, products.arrays[0].outputs.y = packed.ctypes.data, y.ctypes.data
    kernel(name, fmt, **template)(-(-n // rows), 32 * template["WARP_SPLIT_K"], products)
    for array in (y, packed, given):
        harness.check_guards(array)
    return y


@each(EVERY_TILED)
def test_decode(fmt):
    """Codes on tensor cores as they lie, scales on sums in float32."""
    w, x, expected, bound = problem(fmt, 5)
    y = run_decode(fmt, "decode", "half", x.astype(np.float16), w, 5)
    assert (np.abs(y - expected) <= bound).all()


@each(EVERY_INTEGER)
def test_decode_of_quantized_activations(fmt):
    """Integer products of codes."""
    w, x, _, _ = problem(fmt, 5)
    y = run_decode(fmt, "decode_a8", Q8_1, in_k_blocks(qgemm.quantize_activations(x).blocks), w, 5)
    helpers.assert_a8(y, x, w)


@each([qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "kbit3")])
def test_decode_of_one_token(fmt):
    """One row of x is read as the eight columns of an instruction."""
    w, x, expected, bound = problem(fmt, 1)
    assert (np.abs(run_decode(fmt, "decode", "half", x.astype(np.float16), w, 1) - expected) <= bound).all()
