"""Kernels that move, decode, encode and multiply without tensor cores, run on the host and compared with NumPy.

Every CTA runs twice, its threads in order and backwards: what lacks a barrier differs.
"""

from __future__ import annotations

from functools import cache

import harness
import helpers
import numpy as np
import pytest
from formats_of_tests import OWN_FORMATS
from harness import Kernel, device_array, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from q8_1_blocks import in_k_blocks
from strategies import CODEBOOKS, EVERY_ENCODED_BLOCK, EVERY_TILED, over_formats, values

import qgemm
from qgemm.codec import q8_1_f32 as blocks_of_activations
from qgemm.codec.error_bound import magnitudes
from qgemm.codec.format import float_dtype
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.cuda.jit import codegen
from qgemm.cuda.jit.twins import TYPE_CODES
from qgemm.cuda.kernels import transforms
from qgemm.cuda.kernels.sm90_config import WORK_QUEUE
from qgemm.cuda.kernels.transforms import GROUPS_TOKENS, groups_template
from qgemm.cuda.layout import group_activations, q8_1_k_blocks
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.layout.group_activations import byte_template
from qgemm.cuda.problem import C_TYPES, Q8_1

pytestmark = [pytest.mark.compiles, harness.needs_compiler]
both_ways = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
kernel = cache(Kernel)


def blocks_of(fmt, rows=100, columns=7 * 32, seed=0):
    """Random bytes, of rows and columns that end inside a tile."""
    return helpers.random_blocks(fmt, rows, columns, np.random.default_rng(seed))


def sizes(fmt, blocks):
    """(rows, blocks of a row, tiles of a row)"""
    rows, count = blocks.shape
    return rows, count, -(-count * fmt.weights // tiles.columns(fmt))


def panels(fmt, blocks):
    """CTAs that move all panels of all row_blocks."""
    rows, _, along = sizes(fmt, blocks)
    return -(-rows // tiles.ROWS) * -(-along // tiles.panel_tiles(fmt))


@both_ways
@over_formats(EVERY_TILED)
@pytest.mark.parametrize("columns", [7 * 32, 32, 700])
def test_blocks_to_tiles(fmt, columns, backwards):
    """pack, byte for byte, with bounds of the rows; nothing beyond the last block is read as a weight."""
    blocks = blocks_of(fmt, columns=columns)
    expected = tiles.pack(fmt, blocks)
    packed, bounds = device_array(expected.nbytes), device_array(-(-len(blocks) // 64) * 64, np.float32)
    source = to_device(blocks, -(-blocks.nbytes // 16) * 16)
    source[blocks.nbytes :] = 0xFF
    pack = kernel("pack", fmt, **transforms.PACK.template(fmt))
    pack(panels(fmt, blocks), tiles.PACK_THREADS, source, packed, bounds, *sizes(fmt, blocks), backwards=backwards)
    assert packed.tobytes() == expected.tobytes()
    assert_array_equal(bounds[: len(blocks)], tiles.row_absmax(fmt, blocks))
    assert not bounds[len(blocks) :].any()


@both_ways
@over_formats(EVERY_TILED)
@pytest.mark.parametrize("columns", [7 * 32, 32, 700])
def test_tiles_to_blocks(fmt, columns, backwards):
    """unpack, byte for byte."""
    blocks = blocks_of(fmt, columns=columns, seed=1)
    actual = device_array(-(-blocks.nbytes // 16) * 16)
    unpack = kernel("unpack", fmt, **transforms.UNPACK.template(fmt))
    packed = to_device(tiles.pack(fmt, blocks))
    unpack(panels(fmt, blocks), tiles.PACK_THREADS, packed, actual, *sizes(fmt, blocks), backwards=backwards)
    assert actual[: blocks.nbytes].tobytes() == blocks.tobytes()
    assert not actual[blocks.nbytes :].any()


def assert_weights(fmt, blocks, actual, expected):
    """The host's weights exactly, or, of d * q - d * z with any number z, but for the rounding of the difference."""
    if fmt.zero is None and fmt.dtype[fmt.zero_field].kind == "f":
        assert (np.abs(actual - expected) <= magnitudes(fmt, blocks) * 2.0**-23).all()
    else:
        assert_array_equal(actual, expected)


@both_ways
@over_formats(EVERY_TILED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times a code of 0
def test_tiles_to_weights(fmt, backwards):
    """dequantize: every weight as NumPy decodes random bytes, infinite scales among them, exact in float."""
    blocks = blocks_of(fmt, seed=2).copy()
    for name in (name for name in fmt.dtype.names if fmt.dtype[name].kind == "f"):
        blocks[name][::3], blocks[name][1::3] = np.inf, -np.inf
    if fmt.zero is None:  # d * q - d * z is d * (q - z) where d is finite
        blocks = helpers.tame(fmt, blocks, np.random.default_rng(2))
    rows, _, along = sizes(fmt, blocks)
    expected = fmt.dequantize(blocks)
    actual = device_array(expected.shape, np.float32)
    grid = along * tiles.k_blocks(fmt), -(-rows // tiles.ROWS)
    dequantize = kernel("dequantize", fmt, Out="float")
    dequantize(grid, 128, to_device(tiles.pack(fmt, blocks)), actual, *expected.shape, 1.0, backwards=backwards)
    assert_weights(fmt, blocks, actual, expected)


@both_ways
@over_formats(EVERY_TILED)
@pytest.mark.parametrize("columns", [7 * 32, 2500])
def test_tiles_to_rows(fmt, columns, backwards):
    """gather_rows: those of an index, in its order and as often as it names them; nothing beside them is written."""
    blocks = helpers.tame(fmt, blocks_of(fmt, columns=columns, seed=3), np.random.default_rng(3))
    rows, *_ = sizes(fmt, blocks)
    index = np.random.default_rng(4).integers(0, rows, 40)
    index[:4] = rows - 1, 0, 8, 0
    expected = fmt.dequantize(blocks)[index]
    gather = kernel("gather_rows", fmt, **transforms.GATHER_ROWS.template(fmt, Out="float"))
    packed, actual = to_device(tiles.pack(fmt, blocks)), device_array(expected.shape, np.float32)
    grid = len(index), -(-4 * -(-expected.shape[1] // 64) // transforms.GATHER_THREADS)
    gather(
        grid, transforms.GATHER_THREADS, packed, to_device(index), actual, rows, expected.shape[1], backwards=backwards
    )
    assert_weights(fmt, blocks[index], actual, expected)


# ---------------------------------------------------------------- encoders


def encoded(fmt, x, backwards=False):
    """(blocks, ENCODE_STATS of the CTAs) of values [n, 32] float32 by the kernel."""
    count, ctas = len(x), 2
    blocks = device_array(-(-count // transforms.BLOCKS_PER_WARP) * transforms.BLOCKS_PER_WARP, fmt.dtype)
    stats = device_array(ctas, transforms.ENCODE_STATS)
    encode = kernel("encode", fmt, **transforms.ENCODE.template(fmt, In="float"))
    encode(ctas, transforms.ENCODE_THREADS, to_device(x), blocks, stats, count, backwards=backwards)
    return blocks[:count], stats


@over_formats([fmt for fmt in EVERY_ENCODED_BLOCK if transforms.encodes(fmt)])
@settings(max_examples=15)
@given(data=st.data())
def test_encoders(fmt, data):
    """Four lanes a block make the bytes that NumPy makes, also of ties, zeros of either sign, subnormals."""
    x = data.draw(values(fmt, max_count=150))
    with np.errstate(all="ignore"):  # 1 / d may be infinite
        expected = fmt.encode(x)
    blocks, stats = encoded(fmt, x, backwards=data.draw(st.booleans()))
    assert blocks.tobytes() == expected.tobytes()
    assert stats["refused"].min() == len(x)
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.square(fmt.decode(expected) - wide).sum()
    assert stats["error"].sum() == pytest.approx(error, rel=1e-4)
    assert stats["power"].sum() == pytest.approx(np.square(wide).sum(), rel=1e-5)


@over_formats([fmt for fmt in EVERY_ENCODED_BLOCK if transforms.encodes(fmt)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_the_first_block_that_cannot_be_held(fmt, value):
    x = helpers.normal(100, 32)
    x[[70, 41], [3, 30]] = value
    with np.errstate(all="ignore"):
        refused = fmt.refused(x, fmt.encode(x))
    assert encoded(fmt, x)[1]["refused"].min() == (100 if refused is None else refused.argmax())


@over_formats(CODEBOOKS)
@pytest.mark.parametrize("kind", ["float", "half"])
@settings(max_examples=10)
@given(data=st.data())
def test_codebooks(fmt, kind, data):
    """quantize_codebook and dequantize_codebook: the absmax, the planes and the weights of NumPy."""
    x = data.draw(values(fmt, max_count=150))
    if kind == "half":  # rounded to half, the largest that E4M4 holds would be one that it does not
        x = np.clip(x, -min(31, fmt.encoding.limit), min(31, fmt.encoding.limit)).astype(np.float16)
    with np.errstate(all="ignore"):
        expected = fmt.encode(x.astype(np.float32))
    count, backwards = len(x), data.draw(st.booleans())
    absmax, planes = (device_array(count, expected.dtype[name]) for name in ("absmax", "planes"))
    refused = device_array(1, np.uint64)
    refused[:] = count
    quantize = kernel("quantize_codebook", fmt, **transforms.QUANTIZE_CODEBOOK.template(fmt, In=kind))
    quantize(1, transforms.PLANES_THREADS, to_device(x), absmax, planes, refused, count, backwards=backwards)
    assert absmax.tobytes() == expected["absmax"].tobytes()
    assert_array_equal(planes, expected["planes"])
    assert refused[0] == count
    weights = device_array((count, 32), np.float32)
    dequantize = kernel("dequantize_codebook", fmt, **transforms.DEQUANTIZE_CODEBOOK.template(fmt, Out="float"))
    dequantize(1, transforms.PLANES_THREADS, absmax, planes, weights, count, backwards=backwards)
    assert_array_equal(weights, fmt.decode(expected))


# ---------------------------------------------------------------- products

# One format of each kind: zero, minimum, super-block with either, exponent, table, long groups, grid without and with a
# minimum. Of the others the same functions run in test_harness.py and test_harness_mma.py.
OF_EACH_KIND = ("q4_0", "q5_1", "q4_k", "q6_k", "mxfp4", "kbit3", "u4z_g128", "u8_g256", "iq3_s", "iq1_s")
KINDS = [fmt for fmt in EVERY_TILED if fmt.name in OF_EACH_KIND]


@both_ways
@over_formats(KINDS)
def test_products_in_float32(fmt, backwards):
    """gemv_simt: exact levels, float32 sums."""
    w = helpers.random_tensor(fmt, 70, 300, np.random.default_rng(3))
    m, (n, k) = 3, w.shape
    x = helpers.normal(m, k, seed=4)
    y = device_array((m, n), np.float32)
    gemv = kernel("gemv", fmt, In="float", Out="float", TOKENS=4, WARP_SPLIT_K=4)
    row_blocks = -(-n // tiles.ROWS)
    gemv(row_blocks, 512, to_device(tiles.pack(fmt, w.blocks)), to_device(x), y, n, k, m, backwards=backwards)
    helpers.expected_product(x, w, "float32").check(y)


@both_ways
@over_formats([fmt for fmt in KINDS if fmt.integer])
def test_products_of_quantized_activations(fmt, backwards):
    """gemv_dp4a: integer dots by dp4a, of the bytes of a header."""
    w = helpers.random_tensor(fmt, 70, 300, np.random.default_rng(3))
    m, (n, k) = 3, w.shape
    x = helpers.normal(m, k, seed=4)
    y = device_array((m, n), np.float32)
    gemv = kernel("gemv", fmt, In=Q8_1, Out="float", TOKENS=4, WARP_SPLIT_K=4)
    row_blocks, blocks = -(-n // tiles.ROWS), in_k_blocks(qgemm.quantize_activations(x).blocks)
    gemv(row_blocks, 512, to_device(tiles.pack(fmt, w.blocks)), to_device(blocks), y, n, k, m, backwards=backwards)
    helpers.assert_a8(y, x, w)


@over_formats([fmt for fmt in KINDS if fmt.integer])
def test_products_of_extreme_activations(fmt):
    """gemv_dp4a of x from 1e-30 to 1e30."""
    w = helpers.random_tensor(fmt, 70, 320, np.random.default_rng(3))
    n, k = w.shape
    x = helpers.extreme(k)
    y = device_array((len(x), n), np.float32)
    gemv = kernel("gemv", fmt, In=Q8_1, Out="float", TOKENS=8, WARP_SPLIT_K=4)
    blocks = in_k_blocks(qgemm.quantize_activations(x).blocks)
    gemv(-(-n // tiles.ROWS), 512, to_device(tiles.pack(fmt, w.blocks)), to_device(blocks), y, n, k, len(x))
    helpers.assert_a8_formula(y, x, w, worst_case=True, levels_first=fmt.tile.bytes_are_levels)


# ---------------------------------------------------------------- activations

X_DTYPES = {"float": "float32", "half": "float16", "bf16": "bfloat16"}


def some_activations(kind):
    """[11, 320]: ordinary rows, scales too small for 1 / d, zeros, a NaN, an infinity, extreme ones, the largest."""
    x = np.concatenate([helpers.normal(4, 320, seed=6), helpers.extreme(320)])
    x[1, :96] *= np.float32(2.0**-20)
    x[1, 96:128], x[2, 5], x[2, 70] = 0, np.nan, np.inf
    x[3, :32], x[3, 32:64], x[3, 64:96], x[3, 96:128] = 3e-37, 4e-37, 3e38, -3e38
    if kind == "half":
        x = np.clip(x, -65504, np.where(x == np.inf, np.inf, 65504))
    return x.astype(float_dtype(X_DTYPES[kind]))


@both_ways
@pytest.mark.parametrize("activation", GROUP_COLUMNS)
@pytest.mark.parametrize("kind", X_DTYPES)
def test_activations_become_eight_bits(kind, activation, backwards):
    """quantize_activations_groups: the codes and scales of NumPy, zeros beyond m and k."""
    x = some_activations(kind)
    (m, k), group, want = x.shape, GROUP_COLUMNS[activation], qgemm.quantize_activations(x, activation).blocks
    actual = device_array((group_activations.nbytes(m, k, group),), np.uint8)
    actual[...] = 255
    quantize = kernel("quantize_activations_groups", In=kind, **groups_template(activation))
    grid = group_activations.rows_of(m) // GROUPS_TOKENS, 1
    quantize(grid, 128, to_device(x), actual, k, m, backwards=backwards)
    got = group_activations.blocks_of(actual, m, k, group)
    for name in ("qs", "d"):
        assert_array_equal(got[name], want[name])
    padded = group_activations.blocks_of(actual, group_activations.rows_of(m), group_activations.columns_of(k), group)
    assert not padded["qs"][m:].any()
    assert not padded["qs"][:, k // 32 :].any()
    assert not padded["d"][m:].any()
    assert not padded["d"][:, -(-k // group) * group // 32 :].any()


@both_ways
@pytest.mark.parametrize("activation", GROUP_COLUMNS)
@pytest.mark.parametrize("kind", X_DTYPES)
def test_warps_of_a_kernel_make_the_same_eight_bits(kind, activation, backwards):
    """The bytes of quantize_activations_groups, by units that the first CTA takes; counters are zeros again."""
    x = some_activations(kind)
    (m, k), group = x.shape, GROUP_COLUMNS[activation]
    size, rows = group_activations.nbytes(m, k, group), group_activations.rows_of(m)
    want, actual = device_array((size,), np.uint8), device_array((WORK_QUEUE + size,), np.uint8)
    quantize = kernel("quantize_activations_groups", In=kind, **groups_template(activation))
    quantize((rows // GROUPS_TOKENS, 1), 128, to_device(x), want, k, m)
    within = kernel("quantize_x_by_warp", **byte_template(activation), GROUP=group)
    type_code = TYPE_CODES[next(name for name, c_type in C_TYPES.items() if c_type == kind)]
    for _ in range(2):
        actual[WORK_QUEUE:] = 255
        within(3, 64, to_device(x), actual, type_code, k, m, rows, backwards=backwards)
        assert not actual[:WORK_QUEUE].any()
        assert_array_equal(actual[WORK_QUEUE:], want)


@both_ways
@pytest.mark.parametrize("kind", X_DTYPES)
def test_activations_become_blocks(kind, backwards):
    """quantize_activations: the bytes of NumPy, in the order of the weights; zeros beyond k."""
    x = some_activations(kind)
    expected = in_k_blocks(qgemm.quantize_activations(x).blocks)
    actual = device_array(expected.shape, q8_1_k_blocks.DTYPE)
    quantize = kernel("quantize_activations", In=kind)
    quantize((len(x), 1), 128, to_device(x), actual, x.shape[1], len(x), backwards=backwards)
    for name in ("qs", "ds"):
        assert_array_equal(actual[name], expected[name])


@pytest.mark.parametrize("kind", X_DTYPES)
def test_blocks_become_activations(kind):
    """dequantize_activations and round_activations: d * q, as NumPy decodes the blocks, half's largest for more."""
    x, out = some_activations(kind), "half" if kind == "half" else "float"
    blocks = qgemm.quantize_activations(x).blocks
    expected = blocks_of_activations.FORMAT.dequantize(blocks)
    if out == "half":
        expected = np.clip(expected, -65504, 65504).astype(np.float16)
    for name, source, types in (
        ("dequantize_activations", in_k_blocks(blocks), {"Out": out}),
        ("round_activations", x, {"In": kind, "Out": out}),
    ):
        actual = device_array(x.shape, expected.dtype)
        grid = (len(x), 1) if name == "dequantize_activations" else (-(-x.size // 1024), 1)
        kernel(name, **types)(grid, 128, to_device(source), actual, x.shape[1], len(x))
        assert_array_equal(actual, expected)


SHARED_ENCODERS = (
    ("q6_0", "SymmetricEncoder<q6_0_block, 32>", "write_codes has no place for the sixth bit of a code"),
    ("q3_0", "SymmetricEncoder<q3_0_block, 4>", "write_codes writes codes of four or five bits"),
    ("q3_0", "SymmetricEncoder<q3_0_block, 8>", "write_codes writes codes of four or five bits"),
    ("q3_0", "SignedEncoder<q3_0_block>", "SignedEncoder writes codes of eight bits"),
)


@pytest.mark.parametrize(("name", "encoder", "sentence"), SHARED_ENCODERS, ids=lambda value: value[:32])
def test_an_encoder_that_does_not_fit_the_block_does_not_compile(name, encoder, sentence):
    """A shared encoder that would leave bits unwritten, or write beyond a field, is refused with the reason."""
    fmt = OWN_FORMATS[name]
    header = (harness.OF_TESTS / "formats" / f"{name}.cuh").read_text()
    own = f"using Encoder = {name}_encoder;"
    assert own in header
    headers = {**codegen.headers(fmt), f"formats/{name}.cuh": header.replace(own, f"using Encoder = {encoder};")}
    source = codegen.compose("encode", fmt, **transforms.ENCODE.template(fmt, In="float"))
    with pytest.raises(harness.HostCompileError, match=sentence):
        harness.library(source, headers)
