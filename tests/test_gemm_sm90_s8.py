"""gemm_sm90_s8 without a GPU: bytes of W by requantize, order of tiles and work items on the host, slices, routes."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import harness
import numpy as np
import pytest
from eight_bit_codes import codes_of, of_units, prepared
from harness.products import requantized, run_eight_bits
from helpers import random_tensor
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import over_formats

import qgemm
from qgemm.codec.eight_bits import eight_bits
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.jit import codegen
from qgemm.cuda.kernels import gemm_sm90_s8 as gemm
from qgemm.cuda.kernels import prefill_sm90_eight_bits, requantize, routes
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.sm90_config import FLAG, SHARED, WORK_QUEUE
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Output, Problem
from qgemm.formats import format_of

# A zero, a minimum, groups of 16, a codebook, pairs of values and a grid; each by the groups of x for which another
# test compiles it: tests/test_prefill_sm80_eight_bits.py.
SOME = ("q4_0", "q4_k", "q6_k", "mxfp4", "iq4_nl", "iq2_xs")


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([format_of(name) for name in SOME])
def test_bytes_of_w_are_those_of_the_other_kernels(fmt):
    """Codes and scales bit for bit; N and K that end inside a tile, a pair of row_blocks, a CTA's and a stage."""
    more = (requantize.row_blocks_of(fmt) - 1) * tiles.ROWS
    w = random_tensor(fmt, 150 + more, 288, np.random.default_rng(3))
    kind = "a8_g256"
    expected = codes_of(w, run_eight_bits(w, prepared(np.eye(w.shape[1], dtype=np.float32), kind), kind, config=2))
    for ctas in (2, 1):
        actual = requantized(w, ctas)
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_allclose(actual.scale, expected.scale, rtol=2.0**-22)


@given(st.sampled_from(["q4_0", "iq2_xs"]), st.integers(1, 5000), st.integers(1, 200), st.integers(1, 200))
def test_ctas_have_every_row_block_and_stage(name, row_blocks, stages, sms):
    fmt = format_of(name)
    along_k, along_n = requantize.grid(fmt, row_blocks, stages, sms)
    assert 1 <= along_k <= stages
    assert 0 <= along_n * requantize.row_blocks_of(fmt) - row_blocks < requantize.row_blocks_of(fmt)
    if requantize.table_bytes(fmt):
        assert along_k * along_n <= max(sms, along_n), "more than a wave"
        assert requantize.smem_bytes(fmt) <= SHARED


@pytest.mark.compiles
@harness.needs_compiler
def test_bytes_reach_the_ends_of_int8_and_scales_that_are_not_finite_stay_in_their_row():
    _, w = of_units(2, 140, 544, np.random.default_rng(5))
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][66, 9] = np.nan, np.inf
    actual, want = requantized(qgemm.Tensor(w.format, w.shape, blocks), 3), eight_bits(w.format, w.blocks, 544)
    assert (actual.codes[0] == -127).all()
    rows = [row for row in range(140) if row not in (3, 66)]
    np.testing.assert_array_equal(actual.codes[rows], want.codes[rows])
    np.testing.assert_array_equal(actual.scale[rows], want.scale[rows])
    lost = np.zeros(actual.scale.shape, bool)
    lost[3, 0] = lost[66, 1] = True
    np.testing.assert_array_equal(np.isnan(actual.scale), lost)


def test_slices_are_whole_clusters_of_rows_in_bounded_memory():
    for n, k in ((1, 32), (8192, 8192), (28672, 8192), (131072, 8192), (256000, 20000)):
        parts = gemm.slices(n, k)
        assert [part.first for part in parts[1:]] == [part.first + part.row_blocks for part in parts[:-1]]
        assert parts[-1].first + parts[-1].row_blocks == -(-n // tiles.ROWS)
        assert all(part.first % gemm.CLUSTER_BLOCKS == 0 for part in parts)
        assert all(part.nbytes(k) <= gemm.workspace_bytes(parts, k) <= gemm.WORKSPACE for part in parts)
    assert len(gemm.slices(28672, 8192)) == 1


@cache
def order():
    """The functions of tests/harness/s8_order.cpp."""
    return harness.library(f'#include "{harness.FOLDER / "s8_order.cpp"}"', codegen.headers())


def listed(function, size, fields, capacity, *arguments):
    """Records [n] of int32 fields that a function of `order` writes, and its return value."""
    records = np.zeros(capacity, [(name, "<i4") for name in fields])
    pointer = records.ctypes.data_as(ctypes.c_void_p)
    return records, function(ctypes.byref(size), *map(ctypes.c_uint, arguments), pointer)


@pytest.mark.compiles
@harness.needs_compiler
@given(n=st.integers(1, 40000), k=st.integers(1, 3000), m=st.integers(256, 5000), sms=st.sampled_from((78, 132, 144)))
@example(n=14336, k=4096, m=1024, sms=132)  # a last wave cut in two
@example(n=8192, k=8192, m=256, sms=132)  # nothing but halves
@example(n=8192, k=8192, m=1024, sms=132)  # a last wave that is nearly full
@example(n=28672, k=8192, m=1024, sms=132)  # nearly the largest number of items of a slice
def test_every_half_of_a_tile_and_every_work_item_of_w_comes_once(n, k, m, sms):
    """A last wave is cut in two if it remains one wave; work items of the first wave's rows come first."""
    p = Problem(qgemm.FORMATS["q4_0"], "a8_g256", m, n, k, 90, EIGHT_BITS, (Output(n),), sms=sms)
    (part,) = gemm.slices(n, k)
    size, ctas = gemm.sizes(p, part, gemm.workspace_bytes([part], k))
    clusters, halves = ctas // gemm.CLUSTER, 2 * size.row_tiles * size.token_tiles
    assert clusters == min(sms // gemm.CLUSTER, halves - size.whole)
    tiles_of_y, count = listed(order().s8_tiles, size, ("row_tile", "token_tile", "first_pass", "passes"), halves)
    tiles_of_y = tiles_of_y[:count]
    assert (tiles_of_y["passes"][: size.whole] == 2).all()
    assert (tiles_of_y["passes"][size.whole :] == 1).all()
    assert -(-count // clusters) <= -(-size.row_tiles * size.token_tiles // clusters)  # waves
    assert not size.whole or size.whole % clusters == 0 or size.whole == count
    places = (tiles_of_y["row_tile"] * size.token_tiles + tiles_of_y["token_tile"]) * 2 + tiles_of_y["first_pass"]
    every = np.concatenate([places, (places + 1)[tiles_of_y["passes"] == 2]])
    np.testing.assert_array_equal(np.sort(every), np.arange(halves))
    first = set(tiles_of_y["row_tile"][:clusters].tolist())
    assert first == set(range(size.first_row_tiles))
    total = size.row_tiles * 16 * size.stages
    assert gemm.queue_bytes(size.workspace_bytes) >= WORK_QUEUE + total * FLAG
    seen, fields = [], ("cta_tile", "stage", "m16")
    for start in range(5):
        items, count = listed(order().s8_items, size, fields, total + 1, start, 5)
        assert (items[count]["cta_tile"], items[count]["stage"]) == (2 * size.row_tiles - 1, size.stages - 1)
        panels = items["cta_tile"][:count] // (2 * size.first_row_tiles)
        assert (np.diff(panels * size.stages + items["stage"][:count]) >= 0).all()
        seen.append((items["cta_tile"][:count] * size.stages + items["stage"][:count]) * 8 + items["m16"][:count])
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(total))


@pytest.mark.parametrize("kind", INTEGER)
def test_shared_memory_and_registers_fit(kind):
    """Registers are those of kernels/gemm/sm90/s8_gemm.cuh."""
    for config in gemm.configs_of(kind):
        assert gemm.smem_bytes(config) <= SHARED
        assert gemm.threads(config) in (384, 512)


@over_formats([format_of(name) for name in ("q4_0", "q4_k", "q6_k", "iq4_nl", "iq2_xs")])
def test_formats_with_a_table_have_no_requantizers(fmt):
    p = Problem(fmt, "a8_g256", 1024, 4096, 4096, 90, EIGHT_BITS)
    requantizers = [config.requantizers > 0 for config in gemm.configs(p)]
    assert requantizers == ([False] if requantize.table_bytes(fmt) else [False, True])


@pytest.mark.parametrize("kind", INTEGER)
def test_it_serves_many_rows_of_x_and_every_other_problem_has_a_kernel(kind):
    """It serves no problem of less than a token tile, and is chosen exactly if it is predicted to be faster."""
    for (n, k), m in itertools.product(
        ((64, 32), (4096, 4096), (8192, 8192), (28672, 8192)), (1, 240, 256, 1024, 4096)
    ):
        p = Problem(qgemm.FORMATS["q4_k"], kind, m, n, k, 90, "half")
        chosen = routes.route(p).kernel
        assert chosen.reads(p) == (EIGHT_BITS,)
        assert (chosen is gemm.GEMM_SM90_S8) == (gemm.ranked(p)[0][1] < prefill_sm90_eight_bits.ranked(p)[0][1])
        assert chosen is not gemm.GEMM_SM90_S8 or m >= gemm.BLOCK_TOKENS
    assert chosen is gemm.GEMM_SM90_S8


def test_a_model_is_prepared_for_it():
    """requantize of a format, and the kernel that knows none, are compiled ahead, on sm_90 alone."""
    w = qgemm.Tensor("q4_0", (128, 256), np.zeros((128, 8), qgemm.FORMATS["q4_0"].dtype))
    for sm, there in ((80, False), (90, True)):
        kernels = {name for name, *_ in needed([w], sm, activations=("a8_g256",))}
        assert (requantize.NAME in kernels) == (gemm.NAME in kernels) == there
