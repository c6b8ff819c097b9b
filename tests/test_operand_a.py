"""Weights as prefill_sm90 computes them from codes, scales and minimums, by the kernel's own code on the host."""

from __future__ import annotations

from functools import cache

import harness
import numpy as np
import pytest
from harness import device_array, to_device
from helpers import random_blocks, tame
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import EVERY_TILED, over_formats, seeds

from qgemm.codec.eight_bits import COLUMNS, eight_bits, level_range
from qgemm.codec.format import Format
from qgemm.cuda.jit import codegen
from qgemm.cuda.layout import group_activations, row_scale
from qgemm.cuda.layout import tile as tiles

pytestmark = [pytest.mark.compiles, harness.needs_compiler]


@cache
def kernel(fmt: Format):
    exponents = row_scale.range_of(fmt)
    limits = {
        "LEVEL": exponents.level,
        "HEADROOM": exponents.above,
        "MIN": exponents.min_weight,
        "MAX": exponents.max_weight,
    }
    template = {f"ROW_SCALE_{name}": value for name, value in limits.items()}
    unit = f'{codegen.config(fmt, **template)}#include "{harness.FOLDER / "operand_a.cpp"}"\n'
    return harness.library(unit, codegen.headers(fmt))


def operand_a(fmt: Format, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [64, columns] of a tile's blocks [64, b] as halves, and the exponents of rows [64].

    The arrangement of a lane's registers is operand A's: rows g and g + 8, columns 2t and 2t + 8 of a step.
    """
    columns = tiles.columns(fmt)
    weights, exponents = device_array(64 * columns, np.uint16), device_array(64, np.int32)
    absmax = to_device(tiles.row_absmax(fmt, blocks))
    arrays = (to_device(tiles.pack(fmt, blocks)), absmax, weights, exponents)
    kernel(fmt).operand_a(*map(harness.argument_of, arrays))
    for array in arrays:
        harness.check_guards(array)
    lanes = weights.reshape(-1, 4, 8, 4, 4, 2, 2, 2)  # k_block, m16, g, t, step, far, r, e
    rows = lanes.transpose(1, 6, 2, 0, 4, 5, 3, 7).reshape(64, columns)
    return rows.view(np.float16), exponents


def spread(fmt: Format, rng: np.random.Generator, exponent: int) -> np.ndarray:
    """A tile's blocks of random codes, whose scales differ by up to 2^12 within a row."""
    blocks = tame(fmt, random_blocks(fmt, 64, tiles.columns(fmt), rng), rng)
    for name in fmt.scale_fields:
        if fmt.dtype[name].kind == "f":
            sizes = np.ldexp(rng.uniform(1, 2, blocks.shape), exponent - rng.integers(0, 12, blocks.shape))
            blocks[name] = sizes * rng.choice([-1, 1], blocks.shape)
    return blocks


def factors(fmt: Format, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each weight [64, columns]: level, scale and minimum in the units of its row, float64; exponents of rows."""
    unit = row_scale.range_of(fmt)
    exponents = np.array([unit.weight(bound) for bound in tiles.row_absmax(fmt, blocks)])
    codes, scale, minimum, zero = fmt.decode_levels(blocks.reshape(-1)).zeros_as_minimums()
    levels = np.ldexp(codes.astype(np.float64).reshape(64, -1) - zero, unit.level)
    per_row = [
        np.repeat(values.astype(np.float64).reshape(64, -1), fmt.group, axis=1)
        for values in (scale, np.zeros_like(scale) if minimum is None else minimum)
    ]
    return (
        levels,
        *(np.ldexp(x, -exponents[:, None] - up) for x, up in zip(per_row, (unit.level, 0), strict=True)),
        exponents,
    )


@over_formats(EVERY_TILED)
@settings(max_examples=10)
@given(seeds(), st.integers(-24, 14))
@example(np.random.default_rng(0), 14)  # the largest rows, which are scaled down to fit half
def test_one_multiply_add_makes_a_weight_of_a_code(fmt, rng, exponent):
    """Level, scale and minimum are rounded to half once each, and their product and sum once. Weights agree bit for bit
    where rows are not scaled down, and elsewhere up to the rounding of subnormal halves.
    """
    blocks = spread(fmt, rng, exponent)
    weights, exponents = operand_a(fmt, blocks)
    levels, scale, minimum, expected = factors(fmt, blocks)
    np.testing.assert_array_equal(exponents, expected)
    levels, scale, minimum = (x.astype(np.float16).astype(np.float64) for x in (levels, scale, minimum))
    want = levels * scale + minimum
    assert np.isfinite(want.astype(np.float16)).all()
    same = (exponents <= 0) & (tiles.scale_factors(fmt) in (1, 2))
    np.testing.assert_array_equal(weights[same], want.astype(np.float16)[same])
    assert (np.abs(weights - want) <= np.maximum(np.abs(want) * 2.0**-11, 3 * 2.0**-25)).all()


@cache
def quad_scales(fmt: Format):
    config = codegen.config(fmt, ROW_SCALE_LEVEL=row_scale.range_of(fmt).level)
    unit = f'{config}#include "{harness.FOLDER / "quad_scales.cpp"}"\n'
    return harness.library(unit, codegen.headers(fmt)).quad_scales


EVERY_KIND = ("q4_0", "q4_k", "q6_k", "mxfp4", "kbit3", "u4z_g128", "u8_g256", "u7_g128_bf16")
GROUPED = [fmt for fmt in EVERY_TILED if fmt.name in EVERY_KIND]


@over_formats(GROUPED)
@pytest.mark.parametrize("few_tokens", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 4])
@settings(max_examples=3)
@given(seeds())
def test_lanes_share_the_scales_that_each_would_load(fmt, stage, few_tokens, rng):
    """Scales agree at every step for groups of 16 to 256 weights, both types of x and splits of K by warpgroups."""
    k_blocks = 4 * max(stage, tiles.k_blocks(fmt))
    blocks = spread(fmt, rng, 0)
    along = [tiles.pack(fmt, np.roll(blocks, i, axis=0)) for i in range(k_blocks // tiles.k_blocks(fmt))]
    memory = to_device(np.concatenate(along))
    for wg_split_k in (1, 2, 3):
        assert quad_scales(fmt)(harness.argument_of(memory), k_blocks, wg_split_k, stage, few_tokens) == 0


@cache
def eight_bit_scales(fmt: Format):
    least, greatest = level_range(fmt)
    levels = {"LEAST_LEVEL": int(least), "GREATEST_LEVEL": int(greatest)}
    unit = f'{codegen.config(fmt, **levels)}#include "{harness.FOLDER / "eight_bit_scales.cpp"}"\n'
    return harness.library(unit, codegen.headers(fmt)).eight_bit_scales


EIGHT = ("q4_0", "q5_1", "q8_0", "q2_0", "q4_k", "q6_k", "mxfp4", "iq2_xs")  # a code, scale and minimum of each kind


@over_formats([fmt for fmt in EVERY_TILED if fmt.name in EIGHT])
@settings(max_examples=3)
@given(seeds(), st.integers(-24, 10))
def test_weights_become_eight_bits(fmt, rng, exponent):
    """Codes of every lane are off by half a unit of the scale of a row and 256 columns. Minimums add three errors of
    rounding to 11 bits: the ratio of scales, times codes below 256, the offset, below 256 units, and their sum, below
    128. Without minimums the ratio is a multiple of 1 / zero: it is off by half of one, times a level up to the zero.
    """
    along = tiles.k_blocks(fmt)
    count = max(8, along)
    blocks = [spread(fmt, rng, exponent) for _ in range(count // along)]
    k_blocks = count - 3 // along * along  # the last stage is not full
    memory = to_device(np.concatenate([tiles.pack(fmt, tile) for tile in blocks]))
    codes, units = device_array((64, count * 4, 4, 4), np.int8), device_array((count // 4, 64), np.float32)
    eight_bit_scales(fmt)(
        *map(harness.argument_of, (memory,)), count, k_blocks, *map(harness.argument_of, (codes, units))
    )
    ordered = np.empty((64, count * 4, 16), np.int8)
    ordered[..., group_activations.ORDER] = codes.reshape(ordered.shape)
    k = 64 * k_blocks
    row_blocks = np.concatenate(blocks, axis=1)[:, : k // fmt.weights]
    want = eight_bits(fmt, row_blocks, k)
    np.testing.assert_allclose(units.T, want.scale, rtol=2.0**-22)
    scale = want.scale.repeat(COLUMNS, axis=1)[:, :k].astype(np.float64)
    off = np.abs(ordered.reshape(64, -1)[:, :k] * scale - fmt.dequantize(row_blocks, np.float64))
    minimum = fmt.decode_levels(row_blocks.reshape(-1)).zeros_as_minimums().minimum
    lost = 0.5 + 2.0**-10 if minimum is None else (256 + 256 + 128) * 2.0**-11
    assert (off <= (0.5 + lost) * scale).all()
