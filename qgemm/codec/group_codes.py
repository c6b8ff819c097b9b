"""Codes of groups: weights that share one scale, and a zero or none, w = d * (q - z) with q in 0..2^bits - 1.

This module packs codes into blocks, and finds codes, scales and zeros of values: by rounding to nearest, or by a search
for the least squared error. qgemm/formats/groups.py has the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .format import Blocks
from .packing import Bytes, Floats, as_bytes, pack_planes, reciprocal, round_away, to_codes, unpack_planes
from .scales import absmax, bounds, signed_absmax

# The fields that hold codes of 1 to 8 bits, the field of the lowest bits first: its name, and how many bits it holds.
FIELDS = {
    1: {"qs": 1},
    2: {"qs": 2},
    3: {"qs": 2, "hmask": 1},
    4: {"qs": 4},
    5: {"qs": 4, "qh": 1},
    6: {"qs": 4, "qh": 2},
    7: {"qs": 4, "qh": 2, "qt": 1},
    8: {"qs": 8},
}
MIN_SCALE = np.float32(2.0**-125)  # the reciprocal of a smaller scale overflows
SHARES = 1.0, 0.9, 0.8, 0.7  # the search shrinks either end of the range to these shares
FACTORS = tuple(1 - 0.04 * i for i in range(-2, 11))  # the search multiplies scales without a zero by these


# ---------------------------------------------------------------- where codes lie


def slots(bits: int, weights: int) -> tuple[int, ...]:
    """The weight in each slot of a field with this many bits of a code, slots counted in little-endian bit order.

    One bit: weight j at bit j. Two and four: the lowest bits of all bytes in order, then the next bits, so that the
    codes of neighbours lie in neighbouring bytes. Eight: weight j in byte j.
    """
    if bits == 1:
        return tuple(range(weights))
    per_byte = 8 // bits
    return tuple(j + i * weights // per_byte for j in range(weights // per_byte) for i in range(per_byte))


def pack_codes(blocks: Blocks, codes: Bytes, bits: int) -> None:
    """Codes [n, weights] below 2^bits into the fields of blocks [n]."""
    shift = 0
    for name, part in FIELDS[bits].items():
        field_codes = codes >> np.uint8(shift) & np.uint8((1 << part) - 1) if len(FIELDS[bits]) > 1 else codes
        if part == 1:
            blocks[name] = np.packbits(field_codes, axis=1, bitorder="little")
        else:
            blocks[name] = pack_planes(np.ascontiguousarray(field_codes), part)
        shift += part


def unpack_codes(blocks: Blocks, bits: int, weights: int) -> Bytes:
    """The inverse of `pack_codes`: [n, weights]."""
    codes, shift = np.zeros((0, weights), np.uint8), 0
    for name, part in FIELDS[bits].items():
        packed = as_bytes(blocks[name]).reshape(len(blocks), blocks.dtype[name].itemsize)
        if part == 1:
            field_codes = np.unpackbits(packed, axis=1, bitorder="little")
        elif packed.shape[1] % 8 == 0 and part < 8:
            field_codes = unpack_planes(packed, part)
        else:
            field_codes = packed
        codes = codes | field_codes << np.uint8(shift) if shift else field_codes
        shift += part
    return codes


# ---------------------------------------------------------------- rounding to nearest


class Fit(NamedTuple):
    """Codes [n, k] from 0 on, and the stored scale and, where groups have one, the stored zero of each row [n]."""

    codes: Bytes
    scale: Floats
    zero: Floats | None = None


Rounding = Callable[[Floats], Floats]  # float32 numbers -> the nearest numbers that a block can store, as float32


def one_bit(x: Floats, rounded: Rounding, importance: Floats | None = None) -> Fit:
    """x [n, k]: w = d * (2 q - 1) with the least squared error: d is the mean magnitude, weighted by importance."""
    size = np.abs(x).astype(np.float64)
    if importance is None:
        d = size.mean(axis=1)
    else:
        total = importance.sum(axis=1, dtype=np.float64)
        d = (size * importance).sum(axis=1) / np.where(total > 0, total, 1)
    return Fit((x >= 0).astype(np.uint8), rounded(d.astype(np.float32)))


def symmetric(x: Floats, bits: int, rounded: Rounding) -> Fit:
    """x [n, k]: w = d * (q - 2^(bits - 1)), the value of largest magnitude at the end with one level more.

    Eight bits leave that level out, as int8 quantization usually does: d = absmax / 127.
    """
    middle = 1 << bits - 1
    if bits == 8:
        d = _without_tiny(_of_rows(absmax, x, np.max) / np.float32(127))
        codes = to_codes(round_away(x * reciprocal(d)[:, None]), 127, np.int8).view(np.uint8) ^ np.uint8(128)
        return Fit(codes, rounded(d))
    d = _without_tiny(_signed_absmax(x) / np.float32(-middle))
    return Fit(to_codes(x * reciprocal(d)[:, None] + np.float32(middle + 0.5), 2 * middle - 1), rounded(d))


def with_zero(x: Floats, bits: int, rounded: Rounding, round_zero: Rounding) -> Fit:
    """x [n, k]: w = d * (q - z), d = (max - min) / (2^bits - 1), z = -min / d, with a range that includes 0."""
    max_code = (1 << bits) - 1
    least = _of_rows(lambda part: bounds(part)[0], x, np.min)
    greatest = _of_rows(lambda part: bounds(part)[1], x, np.max)
    least, greatest = np.minimum(least, np.float32(0)), np.maximum(greatest, np.float32(0))
    d = _without_tiny((greatest - least) / np.float32(max_code))
    inverse = reciprocal(d)
    zero = round_zero(-least * inverse)
    codes = to_codes(np.maximum(x * inverse[:, None] + (zero[:, None] + np.float32(0.5)), np.float32(0)), max_code)
    ends = d > 0  # both ends get the end codes despite a rounded zero: quantizing twice finds the same range
    codes[(x == least[:, None]) & ends[:, None]] = 0
    codes[(x == greatest[:, None]) & ends[:, None]] = max_code
    return Fit(codes, rounded(d), zero)


def _without_tiny(d: Floats) -> Floats:
    """Scales, 0 where their reciprocal would overflow; float16 stores 0 for these anyway."""
    return np.where(np.abs(d) < MIN_SCALE, np.float32(0), d)


def integer_zero(zero: Floats) -> Floats:
    """The nearest integer in 0..255, halves down."""
    rounded_zero: Floats = np.clip(np.ceil(np.nan_to_num(zero) - np.float32(0.5)), 0, 255) + np.float32(0)
    return rounded_zero


# ---------------------------------------------------------------- search


def searched(
    x: Floats, importance: Floats, first: Fit, bits: int, rounded: Rounding, round_zero: Rounding | None
) -> Fit:
    """x, importance [n, k], the fit by rounding to nearest -> the fit of the least weighted squared error.

    Candidates are scales around that of `first`, or ranges where there is a zero. Each gives codes, for which least
    squares give the best scale (and zero, unless that is an integer); these are rounded as they are stored and give the
    final codes. The result is never worse than `first`.
    """
    wide, weight = x.astype(np.float64), importance.astype(np.float64)
    max_code = (1 << bits) - 1
    best, least = first, _error(wide, weight, first, bits)
    for scale, zero in _candidates(wide, bits, round_zero):
        fit = _refined(wide, weight, scale, zero, max_code, rounded, round_zero)
        error = _error(wide, weight, fit, bits)
        better = error < least
        least = np.where(better, error, least)
        best = Fit(
            np.where(better[:, None], fit.codes, best.codes),
            np.where(better, fit.scale, best.scale),
            None if best.zero is None or fit.zero is None else np.where(better, fit.zero, best.zero),
        )
    return best


Doubles = NDArray[np.float64]


def _candidates(x: Doubles, bits: int, round_zero: Rounding | None) -> list[tuple[Doubles, Doubles]]:
    """Initial scales and zeros [n]."""
    max_code, middle = (1 << bits) - 1, 1 << bits - 1
    if round_zero is None:
        signed = np.where(x.max(axis=1) > -x.min(axis=1), x.max(axis=1), x.min(axis=1))
        return [(signed * factor / -middle, np.full(len(x), float(middle))) for factor in FACTORS]
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    candidates = []
    for low_share in SHARES:
        for high_share in SHARES:
            scale = (high_share * high - low_share * low) / max_code
            candidates.append(
                (scale, round_zero((-low_share * low * _inverse(scale)).astype(np.float32)).astype(np.float64))
            )
    return candidates


def _refined(
    x: Doubles,
    weight: Doubles,
    scale: Doubles,
    zero: Doubles,
    max_code: int,
    rounded: Rounding,
    round_zero: Rounding | None,
) -> Fit:
    """The scale and zero that least squares fit to the codes of `scale` and `zero`, rounded, and their codes."""
    codes = _nearest(x, scale, zero, max_code)
    levels = codes - zero[:, None]
    with np.errstate(all="ignore"):  # results that are not finite are replaced below
        if round_zero is not None and (round_zero is not integer_zero):
            total = weight.sum(axis=1)
            mean_q, mean_x = (weight * codes).sum(axis=1) / total, (weight * x).sum(axis=1) / total
            apart = codes - mean_q[:, None]
            fitted = (weight * x * apart).sum(axis=1) / (weight * apart * apart).sum(axis=1)
            moved = round_zero((mean_q - mean_x / fitted).astype(np.float32)).astype(np.float64)
            zero = np.where(np.isfinite(moved), moved, zero)
        else:
            fitted = (weight * x * levels).sum(axis=1) / (weight * levels * levels).sum(axis=1)
        scale = np.where(np.isfinite(fitted), fitted, scale)
        stored = rounded(scale.astype(np.float32))
    codes = _nearest(x, stored.astype(np.float64), zero, max_code)
    return Fit(codes.astype(np.uint8), stored, None if round_zero is None else zero.astype(np.float32))


def _nearest(x: Doubles, scale: Doubles, zero: Doubles, max_code: int) -> Doubles:
    with np.errstate(all="ignore"):
        codes: Doubles = np.nan_to_num(np.clip(np.rint(x * _inverse(scale)[:, None] + zero[:, None]), 0, max_code))
    return codes


def _error(x: Doubles, weight: Doubles, fit: Fit, bits: int) -> Doubles:
    zero: Any = float(1 << bits - 1) if fit.zero is None else fit.zero.astype(np.float64)[:, None]
    with np.errstate(all="ignore"):
        difference = fit.scale.astype(np.float64)[:, None] * (fit.codes - zero) - x
        total: Doubles = (weight * difference * difference).sum(axis=1)
    return np.where(np.isnan(total), np.inf, total)


def _inverse(scale: Doubles) -> Doubles:
    with np.errstate(divide="ignore"):
        return np.where(scale == 0, 0.0, 1 / scale)


# ---------------------------------------------------------------- extremes of rows of any length

BLOCK = 32  # a power of two that divides every row


def _of_rows(of_blocks: Callable[[Floats], Floats], x: Floats, op: Callable[..., Any]) -> Floats:
    """Reduces rows [n, k], k a multiple of 32, by a reduction that needs lengths that are powers of two."""
    if x.shape[1] & x.shape[1] - 1 == 0:
        return of_blocks(x)
    reduced: Floats = op(of_blocks(np.ascontiguousarray(x).reshape(-1, BLOCK)).reshape(len(x), -1), axis=1)
    return reduced


def _signed_absmax(x: Floats) -> Floats:
    """scales.signed_absmax for rows of any length."""
    if x.shape[1] & x.shape[1] - 1 == 0:
        return signed_absmax(x)
    largest = signed_absmax(np.ascontiguousarray(x).reshape(-1, BLOCK)).reshape(len(x), -1)
    index = np.abs(largest).argmax(axis=1)
    extreme: Floats = largest[np.arange(len(x)), index]
    return extreme
