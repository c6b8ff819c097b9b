"""kbit: bit planes, the search for the nearest level, E4M4, and how far a decoded weight lies from its own."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from helpers import expected_sums, tame
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from strategies import CODEBOOKS, codebooks, over_formats, problems, raw_blocks, seeds, values

import qgemm
from qgemm.codec import e4m4
from qgemm.codec.codebook import (
    BINS,
    MIN_ABSMAX,
    SCALE,
    below_bins,
    nearest,
    normal_float,
    product_edges,
    search,
    short_edges,
)

BITS = (2, 3, 4, 5)
every_bits = pytest.mark.parametrize("bits", BITS)
E4M4_VALUES = [Fraction(m, 2**14) if e == 0 else Fraction(2) ** (e - 11) * (1 + Fraction(m, 16))
               for e in range(16) for m in range(16)]  # fmt: skip


def with_codebook(fmt, codebook):
    return fmt.variant(codebook, None)


# ---------------------------------------------------------------- codebooks


@every_bits
def test_normal_float_levels_are_the_means_of_equiprobable_bins(bits):
    """By integrating x * density between the bins' ends, the last of which is 10 standard deviations off."""
    from statistics import NormalDist

    levels = normal_float(bits)
    assert (levels.dtype, len(levels), np.abs(levels).max()) == (np.float32, 2**bits, 1)
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert (np.diff(levels) > 0).all()
    ends = [-10.0, *NormalDist().quantiles(2**bits), 10.0]
    x = np.linspace(ends[:-1], ends[1:], 20001)
    y = x * np.exp(-(x**2) / 2)
    means = ((y[1:] + y[:-1]) * np.diff(x, axis=0)).sum(axis=0)
    np.testing.assert_allclose(levels, means / means[-1], rtol=1e-5)


def test_default_codebooks_stay_as_they_are():
    """Files hold theirs, but blocks that are compared with others were quantized with the same levels."""
    digest = hashlib.sha256(b"".join(normal_float(bits).tobytes() for bits in BITS)).hexdigest()
    assert digest == "5bf50aa09b65b0cb44b9fc062f871df92537017408c495e34320d72cb2447a15"


@over_formats(CODEBOOKS)
@given(data=st.data())
def test_bins_leave_at_most_the_edges_of_their_own(fmt, data):
    """As the kernel finds bins: edges before a value's bin are below it, and at most one more if bins hold one each."""
    between, _ = search(data.draw(codebooks(fmt) | st.just(fmt.codebook)))
    before, apart = below_bins(between)
    inside = between[np.abs(between) < 1]
    near = (inside, np.nextafter(inside, np.float32(-1)), np.nextafter(inside, np.float32(1)))
    v = np.concatenate([*near, np.linspace(-1, 1, 1281, dtype=np.float32)])
    below = (v[:, None] > between).sum(axis=1)
    for inexact in (1 - 2.0**-22, 1, 1 + 2.0**-22):  # the last two of the factor's 24 bits
        place = v * np.float32(BINS / 4 * inexact) + np.float32(1.5 * 2**23 + BINS / 4)
        bins = place.view(np.uint32) % BINS
        assert bins.max() <= BINS // 2
        assert (before[bins] <= below).all()
        assert not apart or (below - before[bins] <= 1).all()


DIVISORS = [np.float32(MIN_ABSMAX), *np.float32(2.0) ** np.arange(-26, 16), np.float32(3e-3), np.float32(65519.9)]


@over_formats(CODEBOOKS[::2])
@given(data=st.data())
def test_products_compare_as_rounded_quotients_do(fmt, data):
    """Beside each edge, subnormal quotients and ties among them included; float64 rounds only numbers far from 0."""
    between = search(data.draw(codebooks(fmt) | st.just(fmt.codebook)))[0].clip(-2, 2)[:, None, None]
    rng = data.draw(seeds())
    d = np.float32([*DIVISORS, *2.0 ** rng.uniform(-26, 16, 50)])[:, None]
    steps = np.array([-2, -1, 0, 1, 2]) * 2.0**-149
    x = np.float32(between.astype(np.float64) * d)
    x = np.concatenate(
        [
            x + np.spacing(x) * rng.integers(-3, 4, 7, np.int8),
            np.broadcast_to(x + np.float32(steps), (*x.shape[:2], 5)),
        ],
        axis=2,
    )
    e, h = (part.astype(np.float64) for part in product_edges(between))
    first = (e * d - SCALE * x).astype(np.float32)
    np.testing.assert_array_equal(h * d + first < 0, x / d > between)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@over_formats(CODEBOOKS[::2])
@given(data=st.data())
@example(data=None)
def test_short_values_compare_by_one_product(fmt, dtype, data):
    """Beside each edge times each divisor, which is every number of 16 bits that an absmax can be."""
    dtype = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    codebook = data.draw(codebooks(fmt)) if data else fmt.codebook
    between = search(codebook)[0].clip(-2, 2)
    edges_of_x = short_edges(between)
    assume(edges_of_x is not None)
    positive = np.arange(1, 0x7C00, dtype=np.uint16).view(dtype)
    numbers, largest = positive.astype(np.float32), positive[-1]
    d = np.append(numbers[(numbers >= MIN_ABSMAX) & (numbers < 2**16)], MIN_ABSMAX)
    exact = d.astype(np.float64)  # NumPy 1 rounds the product of a float64 scalar and a float32 array to float32
    for edge, e in zip(between, edges_of_x.astype(np.float64), strict=True):
        near = np.clip(edge * exact, -d, d).astype(dtype)
        for x in (near, np.nextafter(near, np.zeros_like(near)), np.nextafter(near, np.copysign(largest, near))):
            x = x.astype(np.float32)
            np.testing.assert_array_equal(e * exact - x < 0, x / d > edge)


def test_default_codebooks_are_looked_up_by_one_comparison():
    for fmt in CODEBOOKS:
        between, _ = search(fmt.codebook)
        assert below_bins(between)[1]
        assert short_edges(between) is not None


@pytest.mark.slow
@over_formats(CODEBOOKS[::2])
@settings(max_examples=100)
@given(data=st.data())
def test_nearest_against_brute_force(fmt, data):
    """In exact arithmetic, of equally near levels the first: on levels, in their middles, and right beside both."""
    codebook, rng = data.draw(codebooks(fmt)), data.draw(seeds())
    pairs = rng.choice(codebook.astype(np.float64), (2, 8))
    middles = np.float32(pairs.sum(axis=0) / 2)
    v = np.concatenate([codebook[:8], middles, rng.uniform(-1.2, 1.2, 8).astype(np.float32), np.float32([0, -0.0])])
    v = np.concatenate([v, np.nextafter(v, np.float32(np.inf)), np.nextafter(v, np.float32(-np.inf))])
    exactly = [Fraction(float(level)) for level in codebook]
    want = [min(range(len(exactly)), key=lambda c: (abs(exactly[c] - Fraction(float(x))), c)) for x in v]
    assert nearest(v, codebook).tolist() == want


@over_formats(CODEBOOKS)
@given(data=st.data())
def test_blocks_against_the_definition(fmt, data):
    """A block at a time, a weight at a time."""
    x = data.draw(values(fmt, max_count=4))
    fmt = with_codebook(fmt, data.draw(codebooks(fmt)))
    packed = fmt.encode(x)
    decoded = fmt.decode(packed)
    for row, block, w in zip(x, packed, decoded, strict=True):
        absmax = np.abs(row).max()
        if fmt.scale_fields:
            stored = np.float16(absmax)
            assert block["absmax"].tobytes() == stored.tobytes()
        else:
            distance = [abs(value - Fraction(float(absmax))) for value in E4M4_VALUES]
            assert distance[block["absmax"]] == min(distance)
            stored = E4M4_VALUES[block["absmax"]]
        indices = nearest(row / max(absmax, np.float32(1e-8)), fmt.codebook)
        planes = [int(plane) for plane in block["planes"]]
        assert indices.tolist() == [sum((plane >> j & 1) << b for b, plane in enumerate(planes)) for j in range(32)]
        with np.errstate(over="ignore"):  # extreme codebooks overflow
            np.testing.assert_array_equal(w, np.float32(float(stored)) * fmt.codebook[indices])


@pytest.mark.parametrize("kind", [list, tuple, np.float64, np.float16, ">f4"], ids=str)
def test_codebooks_of_every_kind(kind):
    levels = [1.0, -1.0, 0.25, 0.25]
    codebook = kind(levels) if kind in (list, tuple) else np.array(levels, kind)
    w = qgemm.quantize(np.array([[1.0, -1.0, 0.3, 0.0] * 8]), "kbit2", codebook=codebook)
    assert w.codebook.tolist() == levels
    assert not w.codebook.flags.writeable
    assert w.dequantize()[0, :4].tolist() == [1, -1, 0.25, 0.25]
    assert w.blocks.tobytes() == b"\xb0" + b"\x22" * 4 + b"\xcc" * 4  # 1.0; codes 0, 1, 2, 2: the first of two equals


@pytest.mark.usefixtures("engine")
def test_a_codebook_is_the_tensors_own():
    levels = np.linspace(-1, 1, 8, dtype=np.float32)
    x = np.random.default_rng(0).standard_normal((4, 6, 64)).astype(np.float32)
    w = qgemm.quantize(x, "kbit3", codebook=levels)
    levels[:] = 0
    assert w.codebook[-1] == 1
    assert w[1, 2:].codebook is w.codebook
    np.testing.assert_array_equal(w[1, 2:].dequantize(), w.dequantize()[1, 2:])
    np.testing.assert_array_equal(qgemm.matmul(np.eye(64), w[1]), w.dequantize()[1].T)
    encoded = qgemm.quantize(x, w.format)
    assert encoded.blocks.tobytes() == w.blocks.tobytes()
    assert qgemm.quantize(x, "kbit3").codebook is qgemm.FORMATS["kbit3"].codebook
    assert qgemm.quantize(x, "q4_0").codebook is None


def test_formats_are_equal_if_name_and_codebook_are():
    plain = qgemm.FORMATS["kbit2"]
    first, two = (with_codebook(plain, [0, 0.25, 0.5, 1]) for _ in range(2))
    assert first == two
    assert hash(first) == hash(two)
    assert len({first, two, plain, with_codebook(plain, plain.codebook)}) == 2
    assert first != plain != qgemm.FORMATS["kbit2_f16"]
    assert with_codebook(plain, [-0.0, 0.25, 0.5, 1]) != first
    assert (str(first), first.bpw, first.group) == ("KBIT2", 2.25, 32)


def test_kinds_of_absmax():
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    for bits in BITS:
        small, half = qgemm.FORMATS[f"kbit{bits}"], qgemm.FORMATS[f"kbit{bits}_f16"]
        assert (small.block_bytes, half.block_bytes) == (4 * bits + 1, 4 * bits + 2)
        for fmt in (small, half):
            assert qgemm.quantize(x, fmt).format == fmt
            assert qgemm.quantize(x, fmt, absmax="e4m4").format == small
            assert qgemm.quantize(x, fmt, absmax="float16").format == half
    levels = [-1, -0.5, 0.5, 1]
    w = qgemm.quantize(x, "kbit2", codebook=levels, absmax="float16")
    assert (str(w.format), w.codebook.tolist()) == ("KBIT2_F16", levels)
    assert qgemm.quantize(x, w.format, absmax="e4m4").codebook.tolist() == levels


@pytest.mark.parametrize(
    ("codebook", "message"),
    [
        (np.zeros(15), r"KBIT4: a codebook holds 16 levels, got an array of shape \(15,\)"),
        (np.zeros((2, 8)), r"16 levels, got an array of shape \(2, 8\)"),
        (1.0, r"16 levels, got an array of shape \(\)"),
        ([*range(15), np.nan], "level 15 is nan"),
        ([-np.inf, *range(15)], "a level must be finite in float32, level 0 is -inf"),
        ([0, 1e39, *range(14)], "level 1 is inf"),
        (np.zeros(16, complex), "holds numbers, got complex128"),
        (["1"] * 16, "holds numbers, got <U1"),
        ([None] * 16, "holds numbers, got object"),
        ([[1], [1, 2]], "a list of numbers"),
    ],
)
def test_codebooks_that_are_refused(codebook, message):
    with pytest.raises(qgemm.CodebookError, match=message) as caught:
        qgemm.quantize(np.ones((2, 64)), "kbit4", codebook=codebook)
    assert isinstance(caught.value, ValueError)


def test_options_that_do_not_fit():
    x = np.ones((2, 64))
    for options in ({"codebook": np.zeros(16)}, {"absmax": "e4m4"}):
        with pytest.raises(qgemm.UnsupportedError, match="Q4_0 has neither a codebook nor a choice of absmax"):
            qgemm.quantize(x, "q4_0", **options)
    for kind in ("fp8", ""):
        with pytest.raises(qgemm.UnsupportedError, match=f"KBIT4: absmax is 'e4m4' or 'float16', got {kind!r}"):
            qgemm.quantize(x, "kbit4", absmax=kind)


@every_bits
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_magnitudes_beyond_the_absmax_are_refused(bits, dtype):
    below = np.nextafter(np.array(31.5, dtype), np.array(0, dtype))
    x = np.ones((3, 64), dtype)
    x[1, 40] = -below if dtype != "float64" else -31.499
    assert qgemm.quantize(x, f"kbit{bits}").dequantize()[1, 40] == -31
    x[2, 3] = -31.5
    message = rf"KBIT{bits}: block 0 of row 2 needs a scale beyond 31.5, where its own end \(largest .* 31.5\)"
    with pytest.raises(qgemm.QuantizeError, match=message):
        qgemm.quantize(x, f"kbit{bits}")
    assert qgemm.quantize(x, f"kbit{bits}_f16").dequantize()[2, 3] == -31.5
    x[1, 40] = np.nan
    with pytest.raises(qgemm.QuantizeError, match="block 1 of row 1 holds NaN"):
        qgemm.quantize(x, f"kbit{bits}")


def test_float64_that_rounds_to_the_limit_is_refused():
    with pytest.raises(qgemm.QuantizeError, match="block 0 of row 0 needs"):
        qgemm.quantize(np.full((1, 32), 31.5 - 1e-12), "kbit4")
    with pytest.raises(qgemm.QuantizeError, match="block 0 of row 0 needs"):
        qgemm.quantize(np.full((1, 32), 1e300), "kbit4")


# ---------------------------------------------------------------- products


@pytest.mark.usefixtures("engine")
@over_formats(CODEBOOKS)
@given(data=st.data())
def test_products_with_any_codebook(fmt, data):
    """Within the bound of float32 sums over K, of any rows, for levels of any order and sign."""
    x, w = data.draw(problems(fmt, st.sampled_from((1, 3, 64, 65))))
    levels = np.clip(data.draw(codebooks(fmt)), -1e30, 1e30)
    w = qgemm.Tensor(with_codebook(fmt, levels), w.shape, w.blocks)
    expected_sums(x, w).check(qgemm.matmul(x, w))


@pytest.mark.usefixtures("engine")
def test_a_product_and_a_decoded_panel_agree_on_a_ragged_matrix():
    """77 rows; few tokens take the products of groups, many take panels."""
    fmt = with_codebook(qgemm.FORMATS["kbit5"], np.random.default_rng(0).uniform(0, 1, 32))
    rng = np.random.default_rng(1)
    blocks = tame(fmt, raw_blocks(lambda _: rng, fmt, (77, 3)), rng)
    w = qgemm.Tensor(fmt, (77, 96), blocks)
    x = rng.standard_normal((200, 96)).astype(np.float32)
    expected = expected_sums(x, w)
    for m in (1, 64, 200):
        expected.only(slice(m)).check(qgemm.matmul(x[:m], w))


def test_e4m4_is_what_the_formats_store():
    x = np.random.default_rng(0).uniform(0, 31, (1000, 32)).astype(np.float32)
    packed = qgemm.quantize(x, "kbit4").blocks
    np.testing.assert_array_equal(packed["absmax"][:, 0], qgemm.encode_e4m4(x.max(axis=1)))
    assert e4m4.LIMIT == 31.5
