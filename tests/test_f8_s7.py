"""f8_e4m3, f8_e5m2, s7_1of2 and kbit4_f32: codecs, tiles, and their headers and products by kernels run on the host."""

from __future__ import annotations

from functools import cache

import foreign
import harness
import ml_dtypes
import numpy as np
import pytest
from harness import Kernel, Lanes, device_array, to_device
from harness.products import decode_problem, problem, run_decode, run_prefill
from helpers import assert_a8, normal, random_tensor
from hypothesis import given
from q8_1_blocks import in_k_blocks
from strategies import over_formats, seeds

import qgemm
from qgemm.codec.format import Levels
from qgemm.cuda.kernels import prefill_sm80, transforms
from qgemm.cuda.layout import tile
from qgemm.cuda.problem import Q8_1
from qgemm.formats import format_of
from qgemm.formats.kbit import kbit_float32

S7 = format_of("s7_1of2")
FP4 = kbit_float32(4, foreign.FP4)  # bitsandbytes' fp4, whose codebook has a level twice
F8 = [format_of(name) for name in ("f8_e4m3_g128", "f8_e5m2_g32", "f8_e4m3_g256")]
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
lanes = cache(Lanes)


def kind_of(fmt):
    return TYPES[fmt.name.split("_")[1]]


# ---------------------------------------------------------------- codecs


@over_formats(F8)
@given(rng=seeds())
def test_numbers_of_eight_bits_are_those_of_ml_dtypes(fmt, rng):
    codes = rng.integers(0, 256, (3, fmt.weights)).astype(np.uint8)
    blocks = fmt.pack(Levels(codes, np.ones(3, np.float32)))
    with np.errstate(invalid="ignore"):
        want = codes.view(kind_of(fmt)).astype(np.float32)
    np.testing.assert_array_equal(fmt.decode(blocks), want)


@over_formats(F8)
@given(rng=seeds())
def test_values_go_to_the_nearest_number(fmt, rng):
    """x / d is rounded to nearest even, as by ml_dtypes; values on the grid stay."""
    largest = float(ml_dtypes.finfo(kind_of(fmt)).max)
    d = 2.0 ** rng.integers(-20, 20)
    x = (rng.standard_normal((4, fmt.weights)) * 2.0 ** rng.integers(-12, 4, (4, fmt.weights))).astype(np.float32)
    x = np.clip(x, -largest, largest)
    x[:, 0] = largest
    want = (x.astype(kind_of(fmt)).astype(np.float64) * d).astype(np.float32)
    values = fmt.dequantize(fmt.quantize((x * d).astype(np.float32)))
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(fmt.dequantize(fmt.quantize(values)), values)


@given(rng=seeds())
def test_the_larger_of_two_neighbours_is_kept(rng):
    x = rng.standard_normal((5, 256)).astype(np.float16).astype(np.float32)
    w = S7.dequantize(S7.quantize(x))
    pairs, decoded = x.reshape(5, -1, 2), w.reshape(5, -1, 2)
    second = np.abs(pairs[..., 1]) > np.abs(pairs[..., 0])
    assert (np.take_along_axis(decoded, (~second)[..., None].astype(int), 2) == 0).all()
    larger = np.take_along_axis(pairs, second[..., None].astype(int), 2)
    step = np.abs(x).reshape(5, 2, -1).max(axis=2).repeat(64, axis=1)[..., None] / 64
    error = np.abs(np.take_along_axis(decoded, second[..., None].astype(int), 2) - larger)
    assert (error <= step * (1 + 2.0**-9)).all()
    np.testing.assert_array_equal(S7.dequantize(S7.quantize(w)), w)
    assert S7.bpw == 4.125


@over_formats([S7, *F8, FP4])
@given(rng=seeds())
def test_tiles_hold_blocks_bit_for_bit(fmt, rng):
    blocks = np.frombuffer(rng.bytes(65 * 2 * fmt.block_bytes), fmt.dtype).reshape(65, 2)
    assert tile.unpack(fmt, tile.pack(fmt, blocks), 65, 2 * fmt.weights).tobytes() == blocks.tobytes()


@pytest.mark.usefixtures("engine")
@over_formats([S7, F8[0]])
def test_products_on_the_host(fmt):
    w, x = random_tensor(fmt, 40, 512, np.random.default_rng(1)), normal(7, 512)
    want = x.astype(np.float64) @ w.dequantize(np.float64).T
    np.testing.assert_allclose(qgemm.matmul(x, w), want, rtol=0, atol=np.abs(want).max() * 2.0**-18)


# ---------------------------------------------------------------- headers and kernels, on the host


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([S7, *F8])
def test_levels_of_lanes(fmt):
    """Each weight is in the lane and register that owns it: as halves times a power of two, as floats and as bytes."""
    w = random_tensor(fmt, 64, tile.columns(fmt), np.random.default_rng(2))
    levels = fmt.levels(w.blocks.reshape(-1)).codes.reshape(4, 2, 8, -1, 4, 2, 4, 2)  # m16 r g k_block step far t e
    expected = levels.transpose(3, 0, 2, 6, 4, 5, 1, 7).reshape(-1, 4, 32, 4, 4, 2).astype(np.float32)
    tiles, exponent = to_device(tile.pack(fmt, w.blocks)), fmt.tile.code_exponent
    for name, dtype, factor in (("levels", "f4", 1), ("fragment", "f2", 1), ("codes_f16", "f2", 2.0**-exponent)):
        actual = device_array(expected.shape, dtype)
        lanes(fmt).call(name, 4, tiles, actual)
        np.testing.assert_array_equal(actual.astype(np.float32), expected * np.float32(factor))
    if fmt.integer:
        bytes_of = levels.transpose(3, 0, 2, 6, 4, 1, 7, 5).reshape(-1, 4, 32, 4, 2, 4)
        actual = device_array(bytes_of.shape, "i1")
        lanes(fmt).call("bytes", 4, tiles, actual)
        np.testing.assert_array_equal(actual, bytes_of)


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([S7, F8[0], FP4])
def test_kernels_that_pack(fmt):
    """Byte for byte, with the bounds of rows."""
    w = random_tensor(fmt, 100, 512, np.random.default_rng(3))
    rows, count = w.blocks.shape
    along = count * fmt.weights // tile.columns(fmt)
    expected = tile.pack(fmt, w.blocks)
    packed, bounds = device_array(expected.nbytes), device_array(128, np.float32)
    panels = 2 * -(-along // tile.panel_tiles(fmt))
    source = to_device(w.blocks, -(-w.blocks.nbytes // 16) * 16)
    template = transforms.PACK.template(fmt)
    Kernel("pack", fmt, **template)(panels, tile.PACK_THREADS, source, packed, bounds, rows, count, along)
    assert packed.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(bounds[:rows], tile.row_absmax(fmt, w.blocks))


@pytest.mark.compiles
@harness.needs_compiler
@over_formats([S7, F8[0], FP4])
def test_products_by_kernels(fmt):
    """decode and prefill_sm80 multiply x in half; integer formats also multiply codes of x."""
    w, x, expected = problem(fmt, 5)
    x16 = x.astype(np.float16)
    decode_problem(fmt, 5)[2].check(run_decode(fmt, "decode", "half", x16, w, 5))
    expected.check(run_prefill(fmt, prefill_sm80.A16, "half", x16, w, 5, 2))
    if fmt.integer:
        blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
        assert_a8(run_decode(fmt, "decode_a8", Q8_1, blocks, w, 5), x, w)
        assert_a8(run_prefill(fmt, prefill_sm80.A8, Q8_1, blocks, w, 5, 2), x, w)
