"""Codecs: byte for byte ggml's C, bit for bit back; values that a format cannot store are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers import DATA, EXCERPT, set_scales
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import (
    EVERY,
    EVERY_ENCODED,
    EVERY_ENCODED_BLOCK,
    GGML_BLOCKS,
    blocks,
    over_formats,
    raw_blocks,
    seeds,
    values,
)

import qgemm
from qgemm.formats import GGML_TYPES, format_named

GOLDEN = np.load(DATA / "ggml_blocks.npz")
RIGHT_IN_GGUF = [fmt for fmt in GGML_BLOCKS if hasattr(gguf.quants, str(fmt))]  # gguf 0.19: not q8_1, q1_0, q2_0
MXFP4 = qgemm.FORMATS["mxfp4"]
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def ggml_type(fmt):
    return GGMLQuantizationType(fmt.ggml_type)


def encode(fmt, x):
    """Values [n, weights] -> blocks [n]."""
    return fmt.quantize(x).reshape(-1)


def assert_same_bits(got, want):
    """Equal bit for bit, any NaN for any NaN."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@over_formats([fmt for fmt in GGML_BLOCKS if f"{fmt.name}/x" in GOLDEN])  # the others: tests/test_small_types.py
def test_golden_blocks(fmt):
    x, packed, decoded = (GOLDEN[f"{fmt.name}/{part}"] for part in ("x", "blocks", "values"))
    if fmt.encode is not None:
        assert fmt.quantize(x).tobytes() == packed.tobytes()
    assert_same_bits(fmt.dequantize(packed.view(fmt.dtype)), decoded)


# Encoders that take the scale of a block of its largest value; others search, by tries that may leave out a grid's own,
# and nvfp4 rounds the scale, after which another code may be the largest.
NEAREST = [
    fmt
    for fmt in EVERY_ENCODED
    if (fmt.encoding.weighted is None or fmt.family) and fmt.name not in ("iq4_nl", "nvfp4")
]


@over_formats(RIGHT_IN_GGUF)
def test_real_excerpt(fmt):
    """Trained weights quantized by ggml: encoding the float32 tensor gives the file's bytes."""
    with qgemm.open(EXCERPT) as file:
        for layer in ("blk.2.ffn_down", "blk.2.attn_q"):
            source, packed = file.get(f"{layer}.f32"), file.get(f"{layer}.{fmt.name}")
            if source is not None and packed is not None and fmt in EVERY_ENCODED_BLOCK:
                encoded = qgemm.quantize(source.dequantize(), fmt)
                assert encoded.blocks.tobytes() == packed.blocks.tobytes()
            if packed is not None:
                want = gguf.dequantize(packed.blocks.view(np.uint8), ggml_type(fmt))
                assert_same_bits(packed.dequantize(), want)


@over_formats([fmt for fmt in RIGHT_IN_GGUF if fmt in NEAREST])  # gguf 0.19 encodes no others
@given(data=st.data())
def test_encode_agrees_with_gguf(fmt, data):
    """gguf differs from C on negative zeros alone among finite values, so they are made positive here."""
    x = data.draw(values(fmt)) + np.float32(0)
    with np.errstate(all="ignore"):
        want = gguf.quantize(x, ggml_type(fmt))
    assert encode(fmt, x).tobytes() == want.tobytes()


@over_formats(RIGHT_IN_GGUF)
@pytest.mark.parametrize("scale", [0.0, np.inf])
def test_scales_of_zero_and_infinity_decode_as_in_gguf(fmt, scale):
    """Raw blocks whose half scales are these, of either sign: zeros, infinity or NaN, weight by weight."""
    raw = np.frombuffer(np.random.default_rng(5).bytes(40 * fmt.block_bytes), fmt.dtype).copy()
    set_scales(fmt, raw, scale)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw.view(np.uint8).reshape(len(raw), -1), ggml_type(fmt))
    assert_same_bits(fmt.decode(raw), want)


@over_formats(RIGHT_IN_GGUF)
@given(data=st.data())
def test_decode_agrees_with_gguf(fmt, data):
    raw = data.draw(blocks(fmt))
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw.view(np.uint8).reshape(len(raw), -1), ggml_type(fmt))
    assert_same_bits(fmt.decode(raw), want)


@over_formats(NEAREST)
@given(data=st.data())
def test_quantizing_twice_changes_nothing(fmt, data):
    """Rounding to nearest is a projection: a value already on the grid stays where it is.

    With a minimum, d * q + m rounds in float32, so the second scale may differ in its last float16 place.
    """
    once = fmt.decode(encode(fmt, data.draw(values(fmt))))
    twice = fmt.decode(encode(fmt, once))
    if "m" in fmt.scale_fields:
        span = np.abs(once).max(axis=1, keepdims=True)
        assert (np.abs(twice - once) <= span * 2.0**-9 + 2.0**-20).all()
    else:
        np.testing.assert_array_equal(twice, once)


@over_formats(
    [fmt for fmt in NEAREST if not fmt.plain and fmt.codebook is None and fmt.zero is not None and fmt.device is None]
)
@given(data=st.data())
def test_error_is_at_most_half_a_step(fmt, data):
    """Half a level, and the rounding of scale and minimum to float16 (one subnormal place for tiny ones).

    Where the levels of one sign reach one step less far than those of the other, the largest value has the sign that
    reaches further. Values of the other sign that lie beyond the last level become that level.
    """
    x = data.draw(values(fmt)).astype(np.float64)
    span, reach = np.abs(x).max(axis=1), x.max(axis=1) - x.min(axis=1)
    lowest, highest = (code - fmt.zero for code in fmt.code_range)
    if fmt.code_bits == 8:
        lowest = -highest  # encoders leave the lowest of 256 out
    steps = highest - lowest
    step = reach / steps if fmt.has_minimum else span / -lowest
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    beyond = np.where(x * largest < 0, np.abs(x) - highest * step[:, None], 0)
    worst = np.maximum(step[:, None] / 2, 0 if fmt.has_minimum else beyond)
    place = 2.0**-8 if fmt.encoding.limit < np.inf else 2.0**-11  # relative precision of a scale: bfloat16 or float16
    rounding = (span + step * steps) * place + (steps + 1) * 2.0**-25
    error = np.abs(fmt.decode(encode(fmt, x.astype(np.float32))) - x)
    assert (error <= worst * (1 + 2.0**-20) + (rounding + span * 2.0**-22)[:, None]).all()


@over_formats(EVERY)
def test_no_blocks_decode_to_no_weights(fmt):
    for shape in ((0,), (0, 3), (3, 0)):
        empty = np.empty(shape, fmt.dtype)
        assert fmt.dequantize(empty).shape == (*shape[:-1], shape[-1] * fmt.weights)
        assert fmt.levels(empty.reshape(-1)).codes.size == 0


@over_formats(EVERY_ENCODED_BLOCK)
@given(data=st.data())
def test_blocks_are_independent(fmt, data):
    """A block's bytes depend on its own values alone, wherever it stands in a matrix."""
    x = data.draw(values(fmt, max_count=12))
    matrix = np.concatenate([x, x[::-1]]).reshape(2, -1)
    packed = fmt.quantize(matrix)
    assert packed[0].tobytes() == encode(fmt, x).tobytes()
    assert packed[1].tobytes() == encode(fmt, x[::-1]).tobytes()


@over_formats(EVERY_ENCODED_BLOCK)
def test_negative_zeros_as_in_c(fmt):
    """C starts from max = 0 with `<`, so a block of negative zeros has the scale of a block of zeros."""
    zeros = np.zeros((1, fmt.weights), np.float32)
    if "m" in fmt.dtype.names:
        assert fmt.encode(-zeros)["m"].view(np.uint16) == 0x8000  # the first value is the minimum
    else:
        assert fmt.encode(-zeros).tobytes() == fmt.encode(zeros).tobytes()


@over_formats(EVERY_ENCODED_BLOCK)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@given(data=st.data())
def test_what_is_not_finite_is_refused(fmt, bad, data):
    rows, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, count * fmt.weights - 1))
    x = np.ones((rows, count * fmt.weights), np.float32)
    x[place] = bad
    with pytest.raises(
        qgemm.QuantizeError, match=f"{fmt}: block {place[1] // fmt.weights} of row {place[0]} holds NaN"
    ):
        qgemm.quantize(x, fmt)


@over_formats([fmt for fmt in EVERY_ENCODED_BLOCK if fmt.scale_fields])
def test_scale_beyond_float16_is_refused(fmt):
    """An exponent in place of float16 scales holds every finite value."""
    x = np.ones((2, 2 * fmt.weights), np.float32)
    x[1, fmt.weights + 8] = 3e38
    with pytest.raises(qgemm.QuantizeError, match="block 1 of row 1 needs a scale beyond float16"):
        qgemm.quantize(x, fmt)


@over_formats(EVERY_ENCODED_BLOCK)
def test_float64_beyond_float32_is_refused(fmt):
    """Also where an exponent holds every finite float32."""
    x = np.ones((2, 2 * fmt.weights))
    x[1, fmt.weights + 8] = -1e300
    with pytest.raises(qgemm.QuantizeError, match=r"block 1 of row 1 needs a scale beyond .* magnitude 1e\+300"):
        qgemm.quantize(x, fmt)


def test_a_format_without_encoder_says_so():
    without = replace(qgemm.FORMATS["q4_0"], encode=None)
    for quantize in (without.quantize, lambda x: qgemm.quantize(x, without)):
        with pytest.raises(qgemm.UnsupportedError, match="Q4_0 has no encoder"):
            quantize(np.ones((2, 32), np.float32))


@given(data=st.data())
def test_mxfp4_takes_the_nearest_value(data):
    """By C's search through all 16, the first of equals, around the ties and at both ends of float32."""
    rng = data.draw(seeds())
    scale = 2.0 ** data.draw(st.integers(-126, 125))  # e = floor(log2(12 * scale)) + 125 is 2 at least
    largest = float(np.finfo(np.float32).max)
    x = rng.choice([0.5, 1.5, 2.5, 3.5, 5, 7, 10, *MXFP4_VALUES], (4, 32)) * scale
    x[:, 0] = 12 * scale
    x = np.clip(x, -largest, largest).astype(np.float32)
    x = rng.choice([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(largest))])
    x *= rng.choice(np.array([-1, 1], np.float32), x.shape)
    packed = encode(MXFP4, x)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.ldexp(np.ones(4, np.float32), packed["e"].astype(int) - 128)
        levels = scales[:, None] * np.array(MXFP4_VALUES, np.float32)
        codes = np.abs(levels[:, None] - x[..., None]).argmin(axis=-1)
    np.testing.assert_array_equal(packed["qs"] & 15, codes[:, :16])
    np.testing.assert_array_equal(packed["qs"] >> 4, codes[:, 16:])


def test_mxfp4_exponent_of_every_magnitude():
    """e is from log2f, which rounds up just below large powers of two; it wraps below 2^-125, as x86 converts it."""
    powers = np.ldexp(np.ones(277, np.float32), np.arange(-149, 128))
    x = np.zeros((len(powers), 32), np.float32)
    x[:, 7] = -powers
    np.testing.assert_array_equal(encode(MXFP4, x)["e"], (np.arange(-149, 128) + 125) % 256)
    assert (MXFP4.decode(encode(MXFP4, x))[powers < 2.0**-125] == 0).all()
    for below, e in ((2.0**-1, 123), (2.0**100, 225), (np.inf, 253)):  # the predecessors; log2f(0.49999997) is not -1
        x[0, 7] = np.nextafter(np.float32(below), np.float32(0))
        assert encode(MXFP4, x[:1])["e"] == e


def test_mxfp4_scales_at_the_ends():
    """e = 0 and 1 are subnormal; 254 overflows with large codes; 255 is 2^127, not the standard's NaN, as in ggml."""
    blocks = np.zeros(4, MXFP4.dtype)
    blocks["e"] = 0, 1, 254, 255
    blocks["qs"] = 0x91  # the codes of 1 and -1
    want = np.array([2.0**-128, 2.0**-127, 2.0**126, 2.0**127], np.float32)
    np.testing.assert_array_equal(MXFP4.decode(blocks), np.repeat([[1, -1]], 16, axis=1) * want[:, None])
    blocks["qs"] = 0x7F
    assert np.isinf(MXFP4.decode(blocks)[2:]).all()


@given(data=st.data())
def test_iq4_nl_is_no_worse_than_any_of_its_tries(data):
    """A try maps the value of largest magnitude to 127, or to -127 + step for steps of -7 to 7, and refits d."""
    fmt = qgemm.FORMATS["iq4_nl"]
    x = np.clip(data.draw(values(fmt)), -1e3, 1e3).astype(np.float64)
    weight, rows = x**2, np.arange(len(x))
    largest = x[rows, np.abs(x).argmax(axis=1)]
    rounding = np.abs(largest) * 2.0**-10 + 127 * 2.0**-25  # rounding d to half

    def error(differences):
        return np.sqrt((weight * differences**2).sum(axis=1))

    actual = error(fmt.decode(encode(fmt, x.astype(np.float32))) - x)
    for peak in (127, *(-127 + step for step in range(-7, 8))):
        d = largest / peak
        nearest = np.abs(d[:, None, None] * fmt.codebook - x[..., None]).argmin(axis=-1)
        levels = fmt.codebook.astype(np.float64)[nearest]
        norms = (weight * levels**2).sum(axis=1)
        refitted = np.divide((weight * levels * x).sum(axis=1), norms, out=np.zeros(len(x)), where=norms > 0)
        best = error(refitted[:, None] * levels - x)
        assert (actual <= best * (1 + 2.0**-10) + rounding * np.sqrt(weight.sum(axis=1))).all()


@pytest.mark.parametrize(("name", "value"), [("f16", 1e6), ("bf16", 3.4e38), ("f32", 1e300)])
def test_plain_overflow_is_refused_but_infinity_kept(name, value):
    x = np.array([[1.0, value]])
    with pytest.raises(qgemm.QuantizeError, match=f"{name.upper()}: value 1 of row 0"):
        qgemm.quantize(x, name)
    decoded = qgemm.quantize(np.array([[np.nan, np.inf, -np.inf, -0.0]]), name).dequantize()
    np.testing.assert_array_equal(decoded, [[np.nan, np.inf, -np.inf, 0]])
    assert np.signbit(decoded[0, 3])


@given(rng=seeds())
@example(rng=np.random.default_rng(0))
def test_bf16_agrees_with_gguf_and_ml_dtypes(rng):
    from ml_dtypes import bfloat16

    x = np.frombuffer(rng.bytes(4096), np.float32).reshape(-1, 1)
    got = qgemm.FORMATS["bf16"].encode(x)
    with np.errstate(invalid="ignore", over="ignore"):
        want = x[:, 0].astype(bfloat16).view(np.uint16)
    nan = np.isnan(x[:, 0])
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(qgemm.FORMATS["bf16"].decode(got)[nan]).all()
    bits = gguf.quantize(x.reshape(1, -1), GGMLQuantizationType.BF16).view(np.uint16)[0]
    np.testing.assert_array_equal(got[~nan], bits[~nan])


@over_formats(EVERY)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@given(data=st.data())
def test_dequantize_rounds_once(fmt, dtype, data):
    from ml_dtypes import bfloat16

    raw = raw_blocks(data.draw, fmt, (3, 5))
    tensor = qgemm.Tensor(fmt, (3, 5 * fmt.weights), raw)
    wide = fmt.decode(raw.reshape(-1)).reshape(tensor.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        want = wide.astype(bfloat16 if dtype == "bfloat16" else dtype)
        got = tensor.dequantize(dtype).astype(np.float64)
        np.testing.assert_array_equal(got, want.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_every_float_dtype_quantizes_as_float32(dtype):
    from ml_dtypes import bfloat16

    x = np.linspace(-1, 1, 512).reshape(2, 256).astype(bfloat16 if dtype == "bfloat16" else dtype)
    for fmt in EVERY_ENCODED:
        assert qgemm.quantize(x, fmt).blocks.tobytes() == qgemm.quantize(x.astype(np.float32), fmt).blocks.tobytes()
        strided = np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2]
        assert qgemm.quantize(strided, fmt).blocks.tobytes() == qgemm.quantize(x, fmt).blocks.tobytes()


def test_every_ggml_type_is_known_by_name_and_size():
    for kind, (count, size) in GGML_QUANT_SIZES.items():
        fmt = GGML_TYPES[int(kind)]
        assert (str(fmt), fmt.weights, fmt.ggml_type) == (kind.name, count, int(kind))
        assert fmt.block_bytes == (36 if kind is GGMLQuantizationType.Q8_1 else size)


def test_a_type_without_codec_says_so_when_used():
    fmt = GGML_TYPES[GGMLQuantizationType.Q8_K]
    tensor = qgemm.Tensor(fmt, (2, 256), np.zeros((2, 1), fmt.dtype))
    for use in (tensor.dequantize, lambda: qgemm.matmul(np.ones((1, 256), np.float32), tensor)):
        with pytest.raises(qgemm.UnsupportedError, match="Q8_K has no decoder"):
            use()
    with pytest.raises(qgemm.UnsupportedError, match=r"no format 'q8_k'; close are .*Q8_0"):
        qgemm.Tensor("q8_k", (2, 256), tensor.blocks)


@pytest.mark.parametrize("name", ["q4_9", GGML_TYPES[GGMLQuantizationType.Q8_K], None])
def test_what_cannot_be_written_lists_what_can(name):
    """A type that has no encoder, or none at all: a message that named such would lead to the next."""
    with pytest.raises(qgemm.UnsupportedError, match="those that can be written: ") as refusal:
        qgemm.quantize(np.ones((1, 256), np.float32), name)
    listed = str(refusal.value).partition("written: ")[2].split(", ")
    assert listed == [str(fmt) for fmt in qgemm.FORMATS.values() if fmt.encode is not None]


def test_names_in_any_case():
    assert format_named("Q4_0") is format_named("q4_0") is qgemm.FORMATS["q4_0"] is qgemm.FORMATS["Q4_0"]
    assert str(qgemm.FORMATS["q4_0"]) == "Q4_0"
    assert "Q4_0" in qgemm.FORMATS
    assert qgemm.FORMATS.get("Iq4_Nl") is qgemm.FORMATS["iq4_nl"]
    assert [name.lower() for name in qgemm.FORMATS] == list(qgemm.FORMATS)
    assert len(qgemm.FORMATS) == len(list(qgemm.FORMATS))


def test_an_unknown_format_names_those_that_are_close():
    with pytest.raises(KeyError, match=r"^there is no format 'q4-0'; close are Q4_0$") as error:
        qgemm.FORMATS["q4-0"]
    assert "close are Q4_0" in repr(error.value)
    assert isinstance(pickle.loads(pickle.dumps(error.value)), qgemm.NameNotFoundError)
    with pytest.raises(qgemm.QgemmError, match=r"no format 4; there are BF16, F16, .*, TQ2_0$"):
        qgemm.FORMATS[4]
    assert 4 not in qgemm.FORMATS
    assert qgemm.FORMATS.get("q4-0") is None
    with pytest.raises(qgemm.UnsupportedError, match=r"no format 'iq2_xxl'; close are IQ2_XXS"):
        qgemm.Tensor("iq2_xxl", (1, 256), np.zeros((1, 1), "u1"))


@over_formats(EVERY_ENCODED_BLOCK)
def test_rows_must_hold_whole_blocks(fmt):
    with pytest.raises(qgemm.ShapeError, match=f"{fmt}: row length 100 is not a multiple of {fmt.weights}"):
        qgemm.quantize(np.ones((2, 100), np.float32), fmt)
    with pytest.raises(qgemm.ShapeError, match="scalar"):
        qgemm.quantize(np.float32(1), fmt)
    with pytest.raises(TypeError, match="int64"):
        qgemm.quantize(np.ones((2, fmt.weights), np.int64), fmt)
    assert qgemm.quantize(np.ones((0, 2 * fmt.weights), np.float32), fmt).blocks.shape == (0, 2)
    assert qgemm.quantize(np.ones((2, 0), np.float32), fmt).dequantize().shape == (2, 0)
