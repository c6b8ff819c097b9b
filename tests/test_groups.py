"""The family of group formats: names, codecs, the search, rows that share a scale."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from helpers import assert_a8_formula, expected_sums, normal, random_tensor
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

import qgemm
from qgemm.codec.format import Levels
from qgemm.codec.search import quantize as by_importance
from qgemm.cpu import native
from qgemm.cuda.layout import tile
from qgemm.formats import format_named, format_of
from qgemm.formats.groups import BITS, GROUP_SIZES, SCALES, ZEROS, group_format, members

FAMILY = members()
family = st.sampled_from(FAMILY)


def scales(fmt, rng, n):
    """Scales [n] float32 that the format holds."""
    d = rng.uniform(-0.05, 0.05, n).astype(np.float32)
    return (d.view(np.uint32) & 0xFFFF0000).view(np.float32) if fmt.dtype["d"].kind == "u" else d.astype("<f2", "K")


def drawn(fmt, rng, n):
    """Codes, scales and zeros of n groups, as Levels that `pack` takes."""
    codes = rng.integers(0, 1 << fmt.code_bits, (n, fmt.weights)).astype(np.uint8)
    zero = None
    if fmt.zero_field:
        of_bytes = fmt.dtype["z"].kind == "u"
        zero = rng.integers(0, 256, n) if of_bytes else rng.uniform(-1, 1 << fmt.code_bits, n).astype(np.float16)
    return Levels(codes, scales(fmt, rng, n).astype(np.float32), zero=0 if zero is None else zero)


def test_all_have_names_of_their_own():
    assert len({fmt.name for fmt in FAMILY}) == len(FAMILY) == 240
    for fmt in FAMILY:
        assert format_of(fmt.name.upper()) is format_named(fmt.name) is qgemm.FORMATS[fmt.name] is fmt
        assert fmt.name in qgemm.FORMATS
    assert not {fmt.name for fmt in FAMILY} & set(qgemm.FORMATS)


@pytest.mark.parametrize(
    "name", ["u0_g32", "u9_g32", "u4_g16", "u4_g512", "u4x_g64", "u4_g64_f16", "u4", "xu4_g64", ""]
)
def test_other_names_are_no_formats(name):
    assert name not in qgemm.FORMATS
    with pytest.raises(qgemm.NameNotFoundError, match="there is no format"):
        format_of(name)


@pytest.mark.parametrize("wrong", [{"bits": 9}, {"group": 48}, {"scale": "f32"}, {"zero": "half"}])
def test_the_constructor_names_what_it_does_not_know(wrong):
    (option, value), options = next(iter(wrong.items())), {"bits": 4, "group": 64, **wrong}
    with pytest.raises(qgemm.UnsupportedError, match=f"a group format has {option} .*; got {value!r}"):
        group_format(options.pop("bits"), options.pop("group"), **options)


@given(rng=seeds(), fmt=family)
def test_pack_is_the_inverse_of_levels(rng, fmt):
    original = drawn(fmt, rng, 3)
    blocks = fmt.pack(original)
    decoded = fmt.levels(blocks)
    codes = (decoded.codes + 1) // 2 if fmt.codebook is not None else decoded.codes
    np.testing.assert_array_equal(codes[:, 0], original.codes)
    np.testing.assert_array_equal(decoded.scale[:, 0], original.scale)
    if fmt.zero_field:
        np.testing.assert_array_equal(decoded.zero[:, 0], original.zero)
    recoded = decoded._replace(codes=np.asarray(codes, np.uint8))  # shapes [n, 1, weights] and [n, 1]
    assert fmt.pack(recoded).tobytes() == blocks.tobytes()


@given(rng=seeds(), fmt=family)
def test_weights_are_codes_less_the_zero_times_the_scale(rng, fmt):
    """In float32, both steps rounded."""
    original = drawn(fmt, rng, 2)
    zero = np.float32(original.zero) if fmt.zero_field else np.float32([1 << fmt.code_bits - 1])
    want = original.scale[:, None] * (original.codes.astype(np.float32) - zero[:, None])
    if fmt.code_bits == 1 and not fmt.zero_field:
        want = original.scale[:, None] * (original.codes.astype(np.float32) * 2 - 1)
    np.testing.assert_array_equal(fmt.decode(fmt.pack(original)), want)


def test_groups_of_32_are_the_blocks_of_ggml():
    """Without a zero: q4_0, q5_0, the latter but for the order of its fields, and q8_0 with unsigned codes."""
    x = normal(9, 96)
    assert qgemm.quantize(x, "u4_g32").blocks.tobytes() == qgemm.quantize(x, "q4_0").blocks.tobytes()
    for group, ggml in (("u5_g32", "q5_0"), ("u8_g32", "q8_0")):
        np.testing.assert_array_equal(qgemm.quantize(x, group).dequantize(), qgemm.quantize(x, ggml).dequantize())


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", BITS)
@given(rng=seeds(), group=st.sampled_from(GROUP_SIZES), scale=st.sampled_from(list(SCALES)))
def test_quantizing_is_a_projection_within_a_step(bits, zero, group, scale, rng):
    """Each value is off by at most a step, and by half of one where its group reaches; again nothing changes."""
    fmt = group_format(bits, group, scale=scale, zero=zero)
    x = (rng.standard_normal((3, 2 * fmt.weights)) * 2.0 ** rng.integers(-8, 8)).astype(np.float16).astype(np.float32)
    once = fmt.quantize(x)
    decoded = fmt.dequantize(once)
    assert fmt.dequantize(fmt.quantize(decoded)).tobytes() == decoded.tobytes()
    if bits == 1:
        return
    step = np.abs(fmt.levels(once.reshape(-1)).scale).reshape(3, 2).repeat(fmt.weights, axis=1)
    rounding = step * 2.0**bits * 2.0**-8
    assert (np.abs(decoded - x) <= step * (1 if zero == "none" else 0.5 if zero == "float" else 1) + rounding).all()


@given(rng=seeds())
def test_zeros_are_codes_and_constants_stay(rng):
    """The range of a group with a zero is widened to hold 0: a constant of either sign is an end of it."""
    for name in ("u4z_g32", "u8z_g64", "u3f_g32"):
        fmt = format_of(name)
        x = np.repeat(rng.standard_normal((6, 1)).astype(np.float16).astype(np.float32), fmt.weights, axis=1)
        np.testing.assert_allclose(fmt.dequantize(fmt.quantize(x)), x, rtol=2.0**-10, atol=2.0**-17)


@pytest.mark.parametrize("name", ["u1_g32", "u2z_g64", "u3_g32", "u4_g32", "u4f_g64", "u6z_row_bf16", "u8_g128"])
@given(rng=seeds())
def test_the_search_is_no_worse_than_rounding(name, rng):
    """By the error that it weighs, ggml's own weights being one here."""
    fmt = format_of(name)
    x, importance = rng.standard_t(3, (4, 512)).astype(np.float32), rng.uniform(0, 1, 512)

    def error(blocks):
        return (importance * (fmt.dequantize(blocks).astype(np.float64) - x) ** 2).sum()

    assert error(by_importance(fmt, x, importance)) <= error(fmt.quantize(x)) * (1 + 2.0**-20)


@pytest.mark.parametrize("name", ["u4_row", "u4z_row_bf16", "u1f_row"])
def test_a_row_has_one_scale(name):
    """That of all its values; blocks hold copies. Rows of 768 are no power of two."""
    fmt = format_of(name)
    x = normal(5, 768, seed=3)
    x[:, ::100] *= 3
    for blocks in (fmt.quantize(x), by_importance(fmt, x, np.ones(768))):
        assert blocks.shape == (5, 3)
        for field in ("d", *([fmt.zero_field] if fmt.zero_field else [])):
            assert (blocks[field] == blocks[field][:, :1]).all()
    if not fmt.zero_field:
        largest = np.abs(x).max(axis=1) / 8
        np.testing.assert_allclose(np.abs(fmt.levels(fmt.quantize(x)[:, 0]).scale[:, 0]), largest, rtol=2.0**-10)


@pytest.mark.parametrize("fmt", FAMILY[::7], ids=str)
def test_formats_are_copied_and_pickled_as_themselves(fmt):
    assert pickle.loads(pickle.dumps(fmt)) is copy.deepcopy(fmt) is fmt
    tensor = qgemm.quantize(normal(2, 256), fmt)
    assert pickle.loads(pickle.dumps(tensor)).format is fmt


def test_bfloat16_scales_hold_what_float16_cannot():
    x = normal(2, 64) * np.float32(1e30)
    with pytest.raises(qgemm.QuantizeError, match="needs a scale beyond float16"):
        qgemm.quantize(x, "u4_g64")
    np.testing.assert_allclose(qgemm.quantize(x, "u4_g64_bf16").dequantize(), x, atol=np.abs(x).max() / 8)
    with pytest.raises(qgemm.QuantizeError, match="U4_G64_BF16: block 0 of row 1 needs"):
        qgemm.quantize(np.concatenate([x, np.full((1, 64), 1e38, np.float32)])[1:], "u4_g64_bf16")


@pytest.mark.parametrize("bits", BITS)
@given(
    rng=seeds(),
    group=st.sampled_from(GROUP_SIZES),
    scale=st.sampled_from(list(SCALES)),
    zero=st.sampled_from(list(ZEROS)),
)
def test_tiles_hold_blocks_bit_for_bit(bits, group, scale, zero, rng):
    """For all layouts of codes, and groups that span k_blocks."""
    fmt = group_format(bits, group, scale=scale, zero=zero)
    blocks = np.frombuffer(rng.bytes(65 * 2 * fmt.block_bytes), fmt.dtype).reshape(65, 2)
    tiles = tile.pack(fmt, blocks)
    assert tile.unpack(fmt, tiles, 65, 2 * fmt.weights).tobytes() == blocks.tobytes()
    assert tiles.shape == (2, -(-2 * fmt.weights // tile.columns(fmt)))


@pytest.mark.usefixtures("engine")
@given(rng=seeds(), m=st.sampled_from((1, 3, 70)), activation=st.sampled_from(("a16", "a8")))
def test_products_are_those_of_the_decoded_weights(rng, m, activation):
    for name in ("u1_g32", "u1f_g64", "u2z_g64", "u3_g128", "u4z_g128", "u5f_g32_bf16", "u6_row", "u7z_g32", "u8z_g64"):
        fmt = format_of(name)
        w = qgemm.quantize(rng.standard_normal((9, 512)).astype(np.float32), fmt)
        x = rng.standard_normal((m, 512)).astype(np.float32)
        activations = x if activation == "a16" else qgemm.quantize_activations(x)
        seen = x if activation == "a16" else activations.dequantize(np.float64)
        want = seen.astype(np.float64) @ w.dequantize(np.float64).T
        size = np.abs(seen) @ (np.abs(w.dequantize()) + np.abs(fmt.levels(w.blocks.reshape(-1)).scale).max() * 255).T
        got = qgemm.matmul(activations, w, activation=activation)
        assert (np.abs(got - want) <= size * (2.0**-15 if activation == "a16" else 2.0**-9)).all()


@pytest.mark.compiles
@pytest.mark.skipif(bool(native.reason()), reason=f"no compiled code: {native.reason()}")
@pytest.mark.parametrize(
    "name",
    ["u1_g32", "u1z_g64", "u2_g32", "u2_g128", "u3_g256", "u4f_g64_bf16", "u5z_g128", "u6_g32", "u7z_g64", "u8_row"],
)  # fmt: skip
def test_compiled_products_of_each_layout(name, monkeypatch):
    """By the header of the family: a16 and a8, few and many rows; K ends inside 256 columns; weights bit for bit."""
    monkeypatch.delenv("QGEMM_CPU")
    fmt, rng = format_of(name), np.random.default_rng(5)
    w = random_tensor(fmt, 35, fmt.weights * 3, rng)
    for m in (1, 70):
        x = normal(m, w.shape[1], seed=m)
        expected_sums(x, w).check(qgemm.matmul(x, w))
        assert_a8_formula(qgemm.matmul(x, w, "a8"), x, w, partial_dots=True)
    values = np.empty(w.shape, np.float32)
    assert native.decode(fmt, w.blocks, None, values) == (fmt.zero is not None or fmt.dtype["z"].kind == "u")
    if native.decode(fmt, w.blocks, None, values):
        np.testing.assert_array_equal(values, fmt.dequantize(w.blocks))
