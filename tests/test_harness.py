"""Format headers compiled for the host: what every lane makes of a tile, compared with NumPy."""

from __future__ import annotations

import ctypes
from functools import cache

import harness
import numpy as np
import pytest
from harness import Lanes, device_array, to_device
from helpers import bytes_as_blocks
from numpy.testing import assert_array_equal
from strategies import BYTE_LEVELS, CODEBOOKS, EVERY_INTEGER, EVERY_TILED, GRIDS, over_formats

import qgemm
from qgemm.codec.format import Format
from qgemm.cuda.jit import sources
from qgemm.cuda.layout import tile as tiles

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
each_size = pytest.mark.parametrize("m16_tiles", [1, 4])  # a copy of some row groups, the whole tile

lanes_of = cache(Lanes)


@cache
def one_tile(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [64, columns / weights] of random bytes, and their tile by NumPy."""
    count = tiles.columns(fmt) // fmt.weights
    blocks = bytes_as_blocks(fmt, (64, count), np.random.default_rng(11))
    return blocks, to_device(tiles.pack(fmt, blocks))


def levels_of(fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Facts of those blocks: codes - zero [64, columns], scale and minimum [64, groups] or zeros."""
    blocks, _ = one_tile(fmt)
    codes, scale, minimum, zero = fmt.decode_levels(blocks.reshape(-1)).zeros_as_minimums()
    minimum = np.zeros_like(scale) if minimum is None else minimum
    return codes.reshape(64, -1).astype(np.float32) - zero, scale.reshape(64, -1), minimum.reshape(64, -1)


def in_lanes(rows: np.ndarray) -> np.ndarray:
    """Each weight of a tile [64, columns] -> [k_block, group, lane, step, register, 2] as operand A has them."""
    split = rows.reshape(4, 2, 8, -1, 4, 2, 4, 2)  # group r g k_block step far t e
    return split.transpose(3, 0, 2, 6, 4, 5, 1, 7).reshape(-1, 4, 32, 4, 4, 2)


def in_owners(rows: np.ndarray) -> np.ndarray:
    """Rows in the order of lanes, each of which owns columns 4t to 4t + 3."""
    split = rows.reshape(4, 2, 8, -1, 4, 4, 2, 2)  # group r g k_block step t q e
    return split.transpose(3, 0, 2, 5, 4, 6, 1, 7).reshape(-1, 4, 32, 4, 4, 2)


def in_bytes(rows: np.ndarray) -> np.ndarray:
    """Weights of a tile [64, columns] -> [k_block, group, lane, step, r, 4] of columns 2t, 2t + 8, 2t + 1, 2t + 9."""
    split = rows.reshape(4, 2, 8, -1, 4, 2, 4, 2)  # group r g k_block step far t e
    return split.transpose(3, 0, 2, 6, 4, 1, 7, 5).reshape(-1, 4, 32, 4, 2, 4)


def in_pairs(rows: np.ndarray) -> np.ndarray:
    """Each group of weights of a tile's rows [64, groups] -> [group of rows, g, index, row g and row g + 8]."""
    return rows.reshape(4, 2, 8, -1).transpose(0, 2, 3, 1)


def result(fmt: Format, name: str, m16_tiles: int, like: np.ndarray, dtype: str) -> np.ndarray:
    """The result of a function of the header for the tile, in the shape of `like`."""
    out = device_array(like.shape, dtype)
    lanes_of(fmt).call(name, m16_tiles, one_tile(fmt)[1], out)
    return out


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal with the sign of zero, where neither is NaN; NaN where the other is."""
    assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


# ---------------------------------------------------------------- headers


@over_formats(EVERY_TILED + BYTE_LEVELS)
def test_facts_of_a_header_are_those_of_the_format(fmt):
    facts = lanes_of(fmt).facts
    blocks, _ = one_tile(fmt)
    codes, _, minimum, _ = fmt.decode_levels(blocks.reshape(-1)).zeros_as_minimums()
    assert facts["HAS_MINIMUM"] == (minimum is not None)
    assert facts["GROUP_SIZE"] == codes.shape[-1] == fmt.group
    assert facts["SUPER_BLOCK"] == (fmt.weights > fmt.group)
    assert facts["SCALE_FACTORS"] == tiles.scale_factors(fmt)
    assert facts["TABLE_BYTES"] == tiles.table_bytes(fmt)
    assert facts["TILE_SIZE"] == tiles.tile_dtype(fmt).itemsize
    if fmt.integer and fmt.zero is not None:
        assert facts["ZERO"] == (0 if fmt.tile.bytes_are_levels else fmt.zero), "bytes_are_levels of the record"
    exponent = tiles.code_exponent(fmt)
    assert facts["CODES_ARE_LEVELS"] == (exponent is not None)
    if exponent is not None:
        assert facts["CODE_EXPONENT"] == exponent


@each_size
@over_formats(EVERY_TILED + BYTE_LEVELS)
def test_levels(fmt, m16_tiles):
    """The level of every weight, in the lane and register that owns it."""
    expected = in_lanes(levels_of(fmt)[0])
    assert_array_equal(result(fmt, "levels", m16_tiles, expected, "float32"), expected)


@each_size
@over_formats(EVERY_INTEGER + BYTE_LEVELS)
def test_fragments(fmt, m16_tiles):
    """Codes as halves; codes times a power of two, before their zero is taken away; as bf16; as bytes."""
    facts = lanes_of(fmt).facts
    expected = in_lanes(levels_of(fmt)[0])
    lanes_of(fmt).library.fill_half(0)  # the table of a grid
    assert_array_equal(result(fmt, "fragment", m16_tiles, expected, "float16"), expected)
    shifted = np.array([0, facts["HIGH_ROW_SHIFT"]] * 2)[:, None]  # registers 1 and 3 are row g + 8
    codes = np.ldexp(expected + np.float32(facts["CODE_BIAS"]), shifted - facts["CODE_EXPONENT"])
    assert_array_equal(result(fmt, "codes_f16", m16_tiles, expected, "float16"), codes)
    lanes_of(fmt).library.fill_bf16(0)
    bf16 = result(fmt, "bf16", m16_tiles, expected, "uint16")
    assert_array_equal((bf16.astype(np.uint32) << 16).view(np.float32), expected)
    expected = in_bytes(levels_of(fmt)[0])
    assert_array_equal(result(fmt, "bytes", m16_tiles, expected, "int8"), expected + np.float32(facts["ZERO"]))


@each_size
@over_formats(GRIDS)
def test_levels_of_owned_columns(fmt, m16_tiles):
    """What decode's lanes find of the columns that they own, times a power of two."""
    expected = np.ldexp(in_owners(levels_of(fmt)[0]), -lanes_of(fmt).facts["CODE_EXPONENT"])
    lanes_of(fmt).library.fill_half(0)
    assert_array_equal(result(fmt, "owned_f16", m16_tiles, expected, "float16"), expected)


@each_size
@over_formats(CODEBOOKS)
def test_levels_looked_up_in_shared_memory(fmt, m16_tiles):
    """Rounded to the type that fills the table, times a power of two."""
    exponent = lanes_of(fmt).facts["CODE_EXPONENT"]
    expected = np.ldexp(in_lanes(levels_of(fmt)[0]), -exponent)
    lanes_of(fmt).library.fill_half(exponent)
    for name in ("fragment", "codes_f16"):
        same_bits(result(fmt, name, m16_tiles, expected, "float16"), expected.astype(np.float16))
    lanes_of(fmt).library.fill_bf16(exponent)
    actual = result(fmt, "bf16", m16_tiles, expected, "uint16").astype(np.uint32) << 16
    bits = expected.view(np.uint32)
    assert_array_equal(actual, (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)


@each_size
@over_formats(EVERY_TILED + BYTE_LEVELS)
def test_scales_and_minimums(fmt, m16_tiles):
    """As NumPy decodes random bytes, infinity and NaN included."""
    _, scale, minimum = map(in_pairs, levels_of(fmt))
    same_bits(result(fmt, "scale", m16_tiles, scale, "float32"), scale)
    same_bits(result(fmt, "minimum", m16_tiles, minimum, "float32"), minimum)


@each_size
@over_formats([fmt for fmt in EVERY_TILED if tiles.scale_factors(fmt) in (1, 2)])
def test_factors_that_are_exact_as_halves(fmt, m16_tiles):
    """One half, or that of a super-block times an integer, which is given in any unit."""
    _, scale, minimum = map(in_pairs, levels_of(fmt))
    factors, minimums = (device_array(scale.shape, np.float16) for _ in range(2))
    lanes_of(fmt).call("half_scale", m16_tiles, one_tile(fmt)[1], factors, minimums)
    if fmt.zero_field:  # minimums are the zeros of groups
        minimum = in_pairs(one_tile(fmt)[0][fmt.zero_field].astype(np.float32))
    wide = [factors.astype(np.float32), minimums.astype(np.float32)]
    if tiles.scale_factors(fmt) == 2:
        for unit in (1.0, 2.0**-7):
            lanes_of(fmt).call("sub_scale", m16_tiles, one_tile(fmt)[1], factors, minimums, unit=unit)
            with np.errstate(invalid="ignore"):  # infinity times zero
                assert_array_equal(wide[0] * (factors.astype(np.float32) / np.float32(unit)), scale)
                assert_array_equal(wide[1] * (minimums.astype(np.float32) / np.float32(unit)), minimum)
    else:
        same_bits(wide[0], scale)
        same_bits(wide[1], minimum)


@each_size
@over_formats([fmt for fmt in EVERY_TILED if fmt.has_minimum and fmt.weights > fmt.group])
def test_minimums_of_a_super_block(fmt, m16_tiles):
    """The super-block's scale times integers, as pairs of bf16 of neighbouring groups."""
    minimum = in_pairs(levels_of(fmt)[2])  # [4, 8, groups, 2]
    of_pairs = (4, 8, minimum.shape[2] // 2)
    common, pairs = device_array((*of_pairs, 2), np.float32), device_array((*of_pairs, 2, 2), np.uint16)
    lanes_of(fmt).call("super_minimum", m16_tiles, one_tile(fmt)[1], common, pairs)
    integers = (pairs.astype(np.uint32) << 16).view(np.float32)  # [..., pair, r, group of the pair]
    with np.errstate(invalid="ignore"):
        products = common[..., None] * integers
    assert_array_equal(products.swapaxes(-1, -2).reshape(minimum.shape), minimum)


@over_formats([fmt for fmt in EVERY_TILED + BYTE_LEVELS if fmt.tile.to_tile is not None])
def test_words_of_a_tile_and_back(fmt):
    """Random words, by the header and by the format's module."""
    rng = np.random.default_rng(5)
    widths = {name: tiles.tile_dtype(fmt)["k_blocks"].base[name].shape[-1] for name in fmt.tile.slots}
    parts = {name: tiles.tile_dtype(fmt)["k_blocks"].base[name].shape[1] for name in fmt.tile.slots}
    count = 500
    words = {name: rng.integers(0, 2**32, (count, parts[name] * widths[name]), np.uint32) for name in fmt.tile.slots}
    size = lanes_of(fmt).facts["CODES_SIZE"]
    used = sum(4 * value.shape[1] for value in words.values())
    together = np.zeros((count, size), np.uint8)
    together[:, :used] = np.concatenate([value.view(np.uint8) for value in words.values()], axis=1)
    device = to_device(together)
    for function, expected in (("to_tile", fmt.tile.to_tile(words)), ("from_tile", words)):
        getattr(lanes_of(fmt).library, function)(ctypes.c_void_p(device.ctypes.data), count)
        harness.check_guards(device)
        joined = np.concatenate([expected[name].view(np.uint8).reshape(count, -1) for name in fmt.tile.slots], axis=1)
        assert_array_equal(device.reshape(count, size)[:, :used], joined)


# ---------------------------------------------------------------- lies

LIES = (
    # header                       truth                lie                    what notices it
    ("formats/q4_0.cuh",           "8>",                "7>",                  "q4_0", test_levels),
    ("codes/masked.cuh",           "HIGH_ROW_SHIFT = 4", "HIGH_ROW_SHIFT = 8", "q4_1", test_fragments),
    ("codes/masked.cuh",           "CODE_BIAS = BIAS",  "CODE_BIAS = 0",       "q4_0", test_fragments),
    ("codes/half_scales.cuh",      "this->m[m16]",      "this->d[m16]",        "q5_1", test_scales_and_minimums),
    ("codes/six_bit_scales.cuh",   "p < 2 ? 0 : 2",     "p < 2 ? 0 : 1",       "q4_k", test_scales_and_minimums),
    ("codes/overlapping.cuh",      "word >> 8;",        "word >> 4;",          "q6_k", test_levels),
    ("codes/overlapping.cuh",      "<< ABOVE * (step",  "<< (step",            "q6_k", test_words_of_a_tile_and_back),
    ("formats/mxfp4.cuh",          "(e << 21)",         "(e << 22)",           "mxfp4", test_scales_and_minimums),
    ("formats/nvfp4.cuh",          "__float2half2_rn(128)", "__float2half2_rn(64)", "nvfp4", test_scales_and_minimums),
    ("formats/nvfp4.cuh",          "& ~pair &",         "&",                   "nvfp4", test_scales_and_minimums),
    ("formats/q2_k.cuh",           "(index & 1) + 4)",  "(index & 1))",        "q2_k", test_scales_and_minimums),
    ("codes/one_bit.cuh",          "- 254 *",           "- 253 *",             "q1_0", test_fragments),
    ("codes/ternary.cuh",          "? 9 : 1",           "? 3 : 1",             "tq1_0", test_levels),
    ("codes/codebook.cuh",         "30, 2 * word",      "30, word",            "kbit3", test_levels),
)  # fmt: skip


@pytest.mark.parametrize(("header", "truth", "lie", "name", "notices"), LIES, ids=lambda value: str(value)[:24])
def test_a_lie_in_a_header_is_noticed(header, truth, lie, name, notices, monkeypatch):
    """One number of a header changed: the test that holds it fails."""
    text = (sources.kernels_dir() / header).read_text()
    assert truth in text
    changed = {header: text.replace(truth, lie)}
    monkeypatch.setitem(globals(), "lanes_of", cache(lambda fmt: Lanes(fmt, changed)))
    fmt = qgemm.FORMATS[name]
    with pytest.raises(AssertionError):
        notices(fmt) if notices is test_words_of_a_tile_and_back else notices(fmt, 4)
