"""prefill_sm90 without a GPU: routes, grids, the exponents of rows, tensor maps."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from strategies import TILED, over_formats

import qgemm
from qgemm.cuda.driver.launch import TensorMap
from qgemm.cuda.kernels import routes, sm90_grid
from qgemm.cuda.layout import row_scale
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.problem import Problem

SMS = (78, 114, 132, 144)  # multiprocessors of an H100 PCIe, an H100 SXM, an H200, a GH100


def test_sm_90_goes_to_prefill_above_decode():
    """From 9 rows of x; codebooks and a8 from 17 rows, a8 with groups of 16 weights from 9."""
    q4_0, q4_k, q6_k, kbit4 = (qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "kbit4"))
    for fmt, m, sm, x, kernel in (
        (q4_0, 8, 90, "half", "decode"),
        (q4_0, 9, 90, "half", "prefill_sm90"),
        (q4_k, 8, 90, "half", "decode"),
        (q4_k, 9, 90, "half", "prefill_sm90"),
        (q4_0, 1 << 20, 90, "bf16", "prefill_sm90"),
        (q4_0, 9, 90, "float", "decode"),
        (q4_0, 17, 90, "float", "dequantize"),
        (q4_0, 16, 100, "half", "decode"),
        (q4_0, 17, 100, "half", "prefill_sm80"),
        (q4_0, 17, 80, "half", "prefill_sm80"),
        (kbit4, 16, 90, "bf16", "decode"),
        (kbit4, 17, 90, "bf16", "prefill_sm90"),
        (kbit4, 17, 90, "float", "dequantize"),
    ):
        assert routes.route(Problem(fmt, "a16", m, 64, 64, sm, x)).kernel.name == kernel
    for fmt, m, x, kernel in (
        (q4_0, 16, "half", "decode_a8"),
        (q4_0, 17, "half", "prefill_sm90"),
        (q4_0, 1 << 20, "bf16", "prefill_sm80_a8"),
        (q6_k, 8, "half", "decode_a8"),
        (q6_k, 9, "half", "prefill_sm90"),
        (q6_k, 9, "bf16", "decode_a8"),
    ):
        assert routes.route(Problem(fmt, "a8", m, 64, 64, 90, x)).kernel.name == kernel


def test_few_tiles_are_split_where_the_reduction_costs_less():
    """split_k is 2, a pair of CTAs; more where K is long or a tile has several row_blocks."""
    assert sm90_grid.grid_of(64, 128, 132) == (128, 0, 2)
    assert sm90_grid.grid_of(64, 1, 132) == (64, 64, 0)
    assert sm90_grid.grid_of(64, 8, 132) == (64, 64, 0)
    assert sm90_grid.grid_of(32, 32, 132) == (64, 0, 2)
    assert sm90_grid.grid_of(32, 80, 132) == (128, 0, 4)
    assert sm90_grid.grid_of(32, 32, 132, k_blocks=2) == (128, 0, 4)
    assert sm90_grid.grid_of(16, 128, 132) == (128, 0, 8)
    assert sm90_grid.grid_of(40, 40, 132) == (80, 0, 2)
    assert sm90_grid.grid_of(40, 80, 132, k_blocks=2) == (120, 0, 0)
    assert sm90_grid.grid_of(1, 16, 132) == (2, 0, 2)


@pytest.mark.parametrize("sms", SMS)
def test_split_k_grows_with_k(sms):
    """For the same tiles split_k never falls as K grows, and never costs more than whole tiles."""
    for count, k_blocks in itertools.product(range(1, sms // 2 + 1), (1, 4, 12)):
        before = 1
        for along in range(24, 1000, 24):  # all numbers of split_k divide 24
            ctas, whole, cluster_split_k = sm90_grid.grid_of(count, along, sms, single_tile=True, k_blocks=k_blocks)
            split_k = ctas // count
            assert ctas == count * split_k <= sms
            assert (whole, cluster_split_k) == (
                count if split_k == 1 else 0,
                0 if split_k % sm90_grid.PAIR else split_k,
            )
            assert before <= split_k
            assert along // split_k * k_blocks + sm90_grid.SPLIT_K_COST[split_k] <= along * k_blocks
            before = split_k


def test_stream_k_where_split_k_leaves_much_idle():
    """From 16 work units of a tile on, and only where a CTA may have several tiles."""
    assert sm90_grid.grid_of(112, 16, 132) == (112, 112, 0)
    assert sm90_grid.grid_of(80, 16, 132) == (132, 0, 0)
    assert sm90_grid.grid_of(80, 16, 132, single_tile=True) == (80, 80, 0)
    assert sm90_grid.grid_of(80, 15, 132) == (80, 80, 0)


BOUNDS = [0, 1e-45, 2.0**-100, 2.0**-17, 1e-3, 0.24, 1, 1e4, 128.5 * 65504, 2.0**27, 1e30, 3e38]


@over_formats(TILED)
def test_no_scale_or_weight_overflows_half_in_its_unit(fmt):
    unit = row_scale.range_of(fmt)
    assert unit.level + 24 <= 15 or tiles.code_exponent(fmt) is not None
    for bound in BOUNDS:
        weight = unit.weight(bound)
        assert unit.min_weight <= weight <= unit.max_weight
        assert all(-126 <= x <= 127 for x in (weight, -weight, -weight - unit.level))  # powers of two in float32
        if weight < unit.max_weight:
            assert bound * 2.0**-weight < 2.0**15
            assert bound / float(tiles.largest_code(fmt)) * 2.0 ** (-weight - unit.level) <= 2.0**15


@pytest.mark.parametrize("largest", [1e-45, 1e-30, 0.1, 1, 7e4, 1e37])
def test_levels_of_any_size_come_into_the_range_of_half(largest):
    """Levels, scales and weights of a codebook in their units are halves."""
    fmt = qgemm.FORMATS["kbit2"].variant([-largest, 0, largest / 9, largest / 2], None)
    level = np.abs(fmt.codebook).max() * 2.0 ** -tiles.level_exponent(fmt)
    unit = row_scale.range_of(fmt)
    assert level <= 2.0**15
    for absmax in (0, 2.0**-14, 1, 31):
        exponent = -unit.weight(float(np.float32(largest * absmax))) - unit.level
        assert -126 <= exponent <= 127
        scale = absmax * 2.0**exponent
        assert scale <= 2.0**15
        assert level * scale <= 2.0**15


def test_a_tensor_map_is_aligned():
    assert all(ctypes.addressof(TensorMap.aligned()) % 64 == 0 for _ in range(50))
