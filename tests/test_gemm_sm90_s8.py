"""gemm_sm90_s8 without a GPU: the bytes of W that requantize makes, on the host; slices, shared memory, routes."""

from __future__ import annotations

import itertools

import harness
import numpy as np
import pytest
from eight_bit_codes import codes_of, of_units
from harness.products import requantized, run_eight_bits
from helpers import random_tensor
from strategies import each

import qgemm
from qgemm.codec.eight_bits import eight_bits
from qgemm.codec.group_activations import INTEGER
from qgemm.cuda.kernels import gemm_sm90_s8 as gemm
from qgemm.cuda.kernels import prefill_sm90_eight_bits, routes
from qgemm.cuda.kernels.needed import needed
from qgemm.cuda.kernels.sm90_config import SHARED
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import EIGHT_BITS, Problem
from qgemm.formats import format_of

# A zero, a minimum, groups of 16, a codebook and a grid; each by the groups of x for which another test compiles it:
# tests/test_prefill_sm80_eight_bits.py.
SOME = {"q4_0": "a8_g128", "q4_k": "a8_g256", "q6_k": "a8_g128", "mxfp4": "a8_g256", "iq2_xs": "a8_g256"}


def prepared(x, kind):
    """Blocks [M, K / 32] of activations."""
    return qgemm.quantize_activations(x, kind).blocks


@pytest.mark.compiles
@harness.needs_compiler
@each([format_of(name) for name in SOME])
def test_bytes_of_w_are_those_of_the_other_kernels(fmt):
    """Codes and scales bit for bit; N and K that end inside a tile, a pair of row_blocks and a stage."""
    w = random_tensor(fmt, 150, 288, np.random.default_rng(3))
    kind = SOME[fmt.name]
    known = codes_of(w, run_eight_bits(w, prepared(np.eye(w.shape[1], dtype=np.float32), kind), kind, config=2))
    for ctas in (2, 1):
        found = requantized(w, ctas)
        np.testing.assert_array_equal(found.codes, known.codes)
        np.testing.assert_allclose(found.scale, known.scale, rtol=2.0**-22)


@pytest.mark.compiles
@harness.needs_compiler
def test_bytes_reach_the_ends_of_int8_and_scales_that_are_not_finite_stay_in_their_row():
    _, w = of_units(2, 140, 544, np.random.default_rng(5))
    blocks = w.blocks.copy()
    blocks["d"][3, 2], blocks["d"][66, 9] = np.nan, np.inf
    found, want = requantized(qgemm.Tensor(w.format, w.shape, blocks), 3), eight_bits(w.format, w.blocks, 544)
    assert (found.codes[0] == -127).all()
    rows = [row for row in range(140) if row not in (3, 66)]
    np.testing.assert_array_equal(found.codes[rows], want.codes[rows])
    np.testing.assert_array_equal(found.scale[rows], want.scale[rows])
    lost = np.zeros(found.scale.shape, bool)
    lost[3, 0] = lost[66, 1] = True
    np.testing.assert_array_equal(np.isnan(found.scale), lost)


def test_slices_are_whole_clusters_of_rows_in_bounded_memory():
    for n, k in ((1, 32), (8192, 8192), (28672, 8192), (131072, 8192), (256000, 20000)):
        parts = gemm.slices(n, k)
        assert [part.first for part in parts[1:]] == [part.first + part.row_blocks for part in parts[:-1]]
        assert parts[-1].first + parts[-1].row_blocks == -(-n // tiles.ROWS)
        assert all(part.first % gemm.CLUSTER_BLOCKS == 0 for part in parts)
        assert all(part.nbytes(k) <= gemm.workspace_bytes(parts, k) <= gemm.WORKSPACE for part in parts)
    assert len(gemm.slices(28672, 8192)) == 1


@pytest.mark.parametrize("kind", INTEGER)
def test_shared_memory_fits(kind):
    assert gemm.template(gemm.config_of(kind))["SMEM_BYTES"] <= SHARED


@pytest.mark.parametrize("kind", INTEGER)
def test_it_serves_many_rows_of_x_and_every_other_problem_has_a_kernel(kind):
    """Of fewer than a token tile it has none; where it is chosen it is predicted to take less time than the other."""
    for (n, k), m in itertools.product(
        ((64, 32), (4096, 4096), (8192, 8192), (28672, 8192)), (1, 240, 256, 1024, 4096)
    ):
        p = Problem(qgemm.FORMATS["q4_k"], kind, m, n, k, 90, "half")
        chosen = routes.route(p).kernel
        assert chosen.takes(p._replace(x=EIGHT_BITS))
        assert (chosen is gemm.GEMM_SM90_S8) == (gemm.predicted(p) < prefill_sm90_eight_bits.ranked(p)[0][1])
        assert chosen is not gemm.GEMM_SM90_S8 or m >= gemm.TOKENS
    assert chosen is gemm.GEMM_SM90_S8


def test_a_model_is_prepared_for_it():
    """requantize of a format, and the kernel that knows none, are compiled ahead, on sm_90 alone."""
    w = qgemm.Tensor("q4_0", (128, 256), np.zeros((128, 8), qgemm.FORMATS["q4_0"].dtype))
    for sm, there in ((80, False), (90, True)):
        kernels = {name for name, *_ in needed([w], sm, activations=("a8_g256",))}
        assert (gemm.REQUANTIZE in kernels) == (gemm.NAME in kernels) == there
