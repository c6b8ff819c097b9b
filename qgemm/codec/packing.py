"""Nibbles, bit planes and the roundings of ggml's C reference, on whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Planes = NDArray[np.uint32]
Words = NDArray[np.uint32]
MANTISSA = 0x7FFFFF  # the bits of a float32 that can be set in a subnormal, besides its sign
SUBNORMAL = np.array(1, np.int32).view(np.float32)[()]
LaneWords = dict[str, Words]  # words of codes of a device tile by field; the last axis is a lane's words

# The weight of a 32-weight block that each code slot holds, slots counted in little-endian bit order.
IN_ORDER = tuple(range(32))
HALVES = tuple(weight for j in range(16) for weight in (j, j + 16))  # byte j: weight j low, weight j + 16 high


def unpack_nibbles(packed: Bytes) -> Bytes:
    """Packed [n, b], b a multiple of 8 -> codes [n, 2 b]: every low nibble in order, then every high one (HALVES)."""
    words, low = np.ascontiguousarray(packed).view(np.uint64), np.uint64(0x0F0F0F0F0F0F0F0F)
    codes = np.empty((len(words), 2, words.shape[1]), np.uint64)
    for j in range(words.shape[1]):  # eight bytes at a time, column by column: 2x faster than short rows
        np.bitwise_and(words[:, j], low, out=codes[:, 0, j])
        np.bitwise_and(words[:, j] >> np.uint64(4), low, out=codes[:, 1, j])
    return codes.view(np.uint8).reshape(len(words), 16 * words.shape[1])


def pack_nibbles(codes: Bytes) -> Bytes:
    """Codes [n, 32] of 4 bits -> packed [n, 16]; the inverse of `unpack_nibbles`."""
    words = codes.view(np.uint64)  # eight codes in a word, combined column by column: 4x faster than short rows
    packed = np.empty((len(codes), 2), np.uint64)
    for j in range(2):
        packed[:, j] = words[:, j] | words[:, j + 2] << np.uint64(4)
    return packed.view(np.uint8)


def unpack_fives(nibbles: Bytes, fifth: Bytes) -> Bytes:
    """Nibbles [n, 16], fifth bits [n, 4] (bit j: weight j) -> codes [n, 32] in 0..31."""
    high = np.unpackbits(fifth, axis=1, bitorder="little")
    return unpack_nibbles(nibbles) | high << np.uint8(4)


def pack_fives(codes: Bytes) -> tuple[Bytes, Bytes]:
    """Codes [n, 32] in 0..31 -> nibbles [n, 16], fifth bits [n, 4]; the inverse of `unpack_fives`."""
    return pack_nibbles(codes & np.uint8(0x0F)), np.packbits(codes >> 4, axis=1, bitorder="little")


def unpack_planes(packed: Bytes, bits: int) -> Bytes:
    """Packed [n, b], b a multiple of 8 -> codes [n, 8 b / bits]: the lowest bits of every byte in order, then the next.

    bits = 1, 2, 4.
    """
    words = np.ascontiguousarray(packed).view(np.uint64)  # the mask clears bits that a shift moved into the next byte
    shifts = np.arange(0, 8, bits, dtype=np.uint64)
    codes = words[:, None] >> shifts[:, None] & np.uint64((2**bits - 1) * 0x0101010101010101)
    return codes.view(np.uint8).reshape(len(packed), packed.shape[1] * (8 // bits))


def pack_planes(codes: Bytes, bits: int) -> Bytes:
    """Codes [n, 8 b / bits] below 2^bits -> packed [n, b]; the inverse of `unpack_planes`, for any b."""
    planes = codes.reshape(len(codes), 8 // bits, codes.shape[1] * bits // 8)
    packed = planes[:, 0].copy()
    for i in range(1, planes.shape[1]):
        packed |= planes[:, i] << np.uint8(bits * i)
    return packed


# SPREAD[b][byte]: a word of eight bytes, bit b of byte i being bit i of the given byte.
SPREAD = [
    np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view("<u8") << np.uint64(b) for b in range(8)
]


def pack_bit_planes(codes: Bytes, bits: int) -> Planes:
    """Codes [n, 32] below 2^bits -> planes [n, bits] uint32: bit j of plane b is bit b of code j."""
    planes = np.empty((len(codes), bits), "<u4")
    for b in range(bits):
        planes[:, b] = np.packbits(codes & np.uint8(1 << b), bitorder="little").view("<u4")
    return planes


def unpack_bit_planes(planes: Planes) -> Bytes:
    """Planes [n, bits] uint32 -> codes [n, 32]; the inverse of `pack_bit_planes`."""
    rows = as_bytes(planes.T)  # [bits, 4 n]
    words = SPREAD[0].take(rows[0])  # eight codes at a time: 2x faster than whole bytes for each bit
    for b in range(1, len(rows)):
        words |= SPREAD[b].take(rows[b])
    codes: Bytes = words.view(np.uint8)
    return codes.reshape(-1, 32)


def unpack_sixes(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 6-bit scales of a K-quant [n, 12] -> scales [n, 8], minimums [n, 8] in 0..63 (layout: formats/q4_k.py)."""
    scales, minimums, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    upper_scales = rest & np.uint8(0x0F) | scales >> 6 << np.uint8(4)
    upper_minimums = rest >> 4 | minimums >> 6 << np.uint8(4)
    low = np.uint8(0x3F)
    return np.hstack([scales & low, upper_scales]), np.hstack([minimums & low, upper_minimums])


def pack_sixes(scales: Bytes, minimums: Bytes) -> Bytes:
    """Scales and minimums [n, 8] in 0..63 -> the 6-bit scales of a K-quant [n, 12]; the inverse of `unpack_sixes`."""
    upper, low = (scales[:, 4:], minimums[:, 4:]), np.uint8(0x0F)
    high = [values >> 4 << np.uint8(6) for values in upper]
    return np.hstack(
        [scales[:, :4] | high[0], minimums[:, :4] | high[1], upper[0] & low | (upper[1] & low) << np.uint8(4)]
    )


def unpack_slots(packed: Bytes, bits: int) -> Bytes:
    """Packed [..., b] -> codes [..., 8 b / bits], in little-endian bit order, for bits = 1, 2, 4, 8."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = packed[..., None] >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * len(shifts))


def pack_slots(codes: Bytes, bits: int) -> Bytes:
    """Codes [..., 8 b / bits] -> packed [..., b]; the inverse of `unpack_slots`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    slots = codes.reshape(*codes.shape[:-1], codes.shape[-1] // len(shifts), len(shifts)) << shifts
    packed: Bytes = np.bitwise_or.reduce(slots, axis=-1, dtype=np.uint8)
    return packed


def pick(values: Floats, index: NDArray[np.intp]) -> Floats:
    """Values [n, w], index [n] -> the value of each row at its index, [n]."""
    return values[np.arange(len(values)), index]


def reciprocal(d: Floats) -> Floats:
    """1 / d in float32, 0 where d is 0, infinite where d is subnormal, as in every ggml encoder."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d == 0, np.float32(0), np.float32(1) / d)


def to_codes(values: Floats, max_code: int, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """min(max_code, trunc(values)) as integers; 0 where not finite, as ggml gets from x86's conversion.

    Overwrites the values.
    """
    finite = np.isfinite(values)
    if not finite.all():
        values = np.where(finite, values, np.float32(0))
    return np.minimum(values, np.float32(max_code), out=values).astype(dtype)


def round_away(values: Floats) -> Floats:
    """C's roundf: to nearest, halves away from zero. Exact also at 0.49999997, where trunc(v + 0.5) is not."""
    whole = np.trunc(values)
    whole += np.trunc(2 * (values - whole))
    return whole


def to_float16(values: Floats) -> NDArray[np.float16]:
    """To nearest even; values beyond 65504 become infinite without a warning, since callers check or mean it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def flushes() -> bool:
    """Whether arithmetic of this thread treats subnormals as zero: a library built with -ffast-math sets that for all.

    Conversions from float16 are exact anyway; those between float32 and float64 are not.
    """
    return not SUBNORMAL * np.float32(1)


def from_float16(half: NDArray[np.float16]) -> Floats:
    """float16 [n] -> float32 [n], exactly; 2x faster than astype, whose conversion NumPy 2.4 has no vector code for."""
    bits = half.view(np.int16)
    if ((bits & np.int16(0x7C00)) == 0x7C00).any() or flushes():  # NaN and infinity have exponents of large numbers
        return half.astype(np.float32)
    wide = bits.astype(np.int32)
    wide <<= 13  # the sign is in its place, and in three bits below it
    wide &= ~0x70000000
    values = wide.view(np.float32)
    values *= np.float32(2.0**112)  # the difference of the exponents' biases; subnormals become normal
    return values


def to_float64(values: Floats) -> NDArray[np.float64]:
    """float32 [...] -> float64 [...], exactly."""
    wide = values.astype(np.float64)
    if flushes():
        small = subnormal(values)
        wide[small] = np.copysign((values[small].view(np.int32) & MANTISSA) * 2.0**-149, values[small])
    return wide


def subnormal(values: Floats) -> NDArray[np.bool_]:
    """Which numbers are subnormal."""
    magnitudes = values.view(np.int32) & 0x7FFFFFFF
    return (magnitudes <= MANTISSA) & (magnitudes > 0)


def times(codes: Floats, scales: Floats) -> Floats:
    """Codes [n, groups, k] times scales [n, groups], exact also where arithmetic flushes subnormals."""
    products = codes * scales[..., None]
    small = subnormal(scales) & (np.rint(codes) == codes).all(axis=-1)
    codes, scales = codes[small], scales[small]
    size = np.abs(codes).astype(np.int64) * (scales.view(np.int32) & MANTISSA)[:, None]  # in units of 2^-149
    normal = size.astype(np.float32).view(np.int32) - (149 << 23)
    bits = np.where(size <= MANTISSA, size, normal).astype(np.int32)
    bits |= (np.signbit(codes) ^ np.signbit(scales)[:, None]).astype(np.int32) << 31
    products[small] = bits.view(np.float32)
    return products


def rotate_left(words: Words, bits: int) -> Words:
    """Every word rotated left by a number of bits, to the right if it is negative."""
    left, right = np.uint32(bits % 32), np.uint32(-bits % 32)
    return words << left | words >> right


def as_bytes(field: NDArray[Any]) -> Bytes:
    """Field [..., (shape)] of a block array -> its bytes [..., b], contiguous."""
    return np.ascontiguousarray(field).view(np.uint8)
