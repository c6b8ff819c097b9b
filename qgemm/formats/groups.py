"""u1 to u8: groups of weights, or rows, that share a scale and perhaps a zero: the codes of AWQ, GPTQ and HQQ.

    name      u BITS [z | f] _ g32 | g64 | g128 | g256 | row [_bf16]     u4_g128, u4z_g128, u3f_g64, u8_row, u4_g64_bf16
    u4_...    w = d * (q - 8), the zero in the middle of the codes; one bit: w = d * (2 q - 1)
    u4z_...   w = d * (q - z), z an integer of each group
    u4f_...   w = d * (q - z), z a float16 of each group

    bytes                field
    2                    d   float16 scale; in formats that end in _bf16 the bits of a bfloat16
    0, z: 1, f: 2        z   the zero, u8 or float16
    bits * weights / 8   qs, and for 3, 5, 6 and 7 bits hmask, qh, qt: the codes (qgemm/codec/group_codes.py)

Blocks of a row format have 256 weights and a copy of the row's scale and zero. That costs 1/16 bit a weight, and keeps
tiles and kernels independent of rows.

The 240 formats are built at first use: FORMATS finds them by name, and lists none.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec import group_codes
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.group_codes import FIELDS, Fit, Rounding, integer_zero
from qgemm.codec.layouts import overlapping, seven_bits
from qgemm.codec.packing import Floats, to_float16
from qgemm.codec.scales import StoredScale
from qgemm.errors import UnsupportedError

from .plain import encode_bf16

BITS, GROUP_SIZES = range(1, 9), (32, 64, 128, 256, None)
ROW = 256  # weights of a block where a whole row shares a scale
NAME = re.compile(r"u([1-8])([zf]?)_(?:g(32|64|128|256)|row)(_bf16)?")
# Members that stand for the family in tests and in CI's compilations: every number of bits, every group with four bits,
# every kind of zero and scale.
REPRESENTATIVES = (
    "u1_g128", "u2z_g128", "u3_g128", "u4z_g128", "u5_g128_bf16", "u6f_g128", "u7_g128", "u8z_g128",
    "u4_g32", "u4f_g64", "u4_g256", "u4z_row_bf16",
)  # fmt: skip
BF16_LIMIT = 2.0**126  # a range of twice this is still finite


class Zero(NamedTuple):
    """A kind of zeros: its letter in a name, its dtype (None: no field), and how numbers are rounded to it."""

    letter: str
    dtype: str | None
    rounded: Rounding | None


def _wide(bits: NDArray[Any]) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


SCALES = {
    #                    dtype  suffix   encode                           decode                       limit
    "f16":  StoredScale("<f2", "",      to_float16,                      lambda d: d.astype("<f4"),   np.inf),
    "bf16": StoredScale("<u2", "_bf16", lambda d: encode_bf16(d[:, None]), _wide,                     BF16_LIMIT),
}  # fmt: skip
ZEROS = {
    "none":  Zero("",  None,  None),
    "int":   Zero("z", "u1",  integer_zero),
    "float": Zero("f", "<f2", lambda zero: to_float16(zero).astype(np.float32)),
}  # fmt: skip


def group_format(bits: int, group: int | None, *, scale: str = "f16", zero: str = "none") -> Format:
    """The format of groups of `group` weights, None for whole rows, with codes of `bits` bits, cached.

    bits: 1 to 8. group: 32, 64, 128, 256. scale: "f16", "bf16". zero: "none", "int", "float". Else UnsupportedError.
    """
    options = (("bits", bits, BITS), ("group", group, GROUP_SIZES), ("scale", scale, SCALES), ("zero", zero, ZEROS))
    for option, value, choices in options:
        if value not in choices:
            raise UnsupportedError(f"a group format has {option} {', '.join(map(repr, choices))}; got {value!r}")
    return _built(bits, group, scale, zero)


def named(name: str) -> Format | None:
    """The format of this name; None for any other name."""
    match = NAME.fullmatch(name.lower())
    if match is None:
        return None
    bits, letter, group, suffix = match.groups()
    zero = next(kind for kind, zeros in ZEROS.items() if zeros.letter == letter)
    return _built(int(bits), int(group) if group else None, "bf16" if suffix else "f16", zero)


@cache
def _built(bits: int, group: int | None, scale: str, zero: str) -> Format:
    scales, zeros = SCALES[scale], ZEROS[zero]
    weights = ROW if group is None else group
    name = f"u{bits}{zeros.letter}_{'row' if group is None else f'g{group}'}{scales.suffix}"
    fields: list[Any] = [("d", scales.dtype)]
    if zeros.dtype is not None:
        fields.append(("z", zeros.dtype))
    fields += [(field, "u1", weights * part // 8) for field, part in FIELDS[bits].items()]
    dtype = np.dtype(fields)
    plus_minus = bits == 1 and zeros.dtype is None
    middle = 0 if plus_minus else 1 << bits - 1

    def rounded(d: Floats) -> Floats:
        return scales.decode(scales.encode(d))

    def nearest(x: Floats) -> Fit:
        if plus_minus:
            return group_codes.one_bit(x, rounded)
        if zeros.rounded is None:
            return group_codes.symmetric(x, bits, rounded)
        return group_codes.with_zero(x, bits, rounded, zeros.rounded)

    def blocks_of(fit: Fit) -> Blocks:
        """A fit of groups or rows -> their blocks; each block of a row gets a copy of its scale and zero."""
        copies = fit.codes.shape[1] // weights
        scale, zero = (None if part is None else part.repeat(copies) for part in (fit.scale, fit.zero))
        return pack(Levels(fit.codes.reshape(-1, weights), scale, zero=0 if zero is None else zero))

    def encode(x: Floats) -> Blocks:
        """Values [n, weights], or [n, K] for a row format -> blocks [n, ...] in order, rounded to nearest."""
        return blocks_of(nearest(x))

    def weighted(x: Floats, importance: Floats) -> Blocks:
        """Values in groups -> blocks by a search for the least squared error, weighted by importance."""
        if plus_minus:
            return blocks_of(group_codes.one_bit(x, rounded, importance))
        return blocks_of(group_codes.searched(x, importance, nearest(x), bits, rounded, zeros.rounded))

    def pack(levels: Levels) -> Blocks:
        """Codes q [n, weights] or [n, 1, weights] uint8, scale and zero [n] or [n, 1] -> blocks [n]."""
        assert levels.scale is not None
        codes = levels.codes.reshape(-1, weights)
        blocks = np.empty(len(codes), dtype)
        blocks["d"] = scales.encode(levels.scale.reshape(-1))
        if zeros.dtype is not None:
            with np.errstate(over="ignore"):  # the check refuses infinity
                blocks["z"] = np.asarray(levels.zero).reshape(-1)
        group_codes.pack_codes(blocks, codes.astype(np.uint8, copy=False), bits)
        return blocks

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> codes [n, 1, weights], scale and zero [n, 1]."""
        codes: NDArray[Any] = group_codes.unpack_codes(blocks, bits, weights)[:, None]
        if plus_minus:
            codes = codes.view(np.int8) * np.int8(2) - np.int8(1)
        scale = scales.decode(blocks["d"])[:, None]
        return Levels(codes, scale, zero=middle if zeros.dtype is None else blocks["z"][:, None])

    tiled = {3: None, 5: overlapping, 6: overlapping, 7: seven_bits}.get(bits)
    symbol = "z" if zeros.dtype is not None else str(middle)
    numbers = [field for field, kind in (("d", scales.dtype), ("z", zeros.dtype)) if kind in ("u1", "<u2")]
    return Format(
        name, weights, dtype, encode, levels, formula="d * (2 * q - 1)" if plus_minus else f"d * (q - {symbol})",
        codebook=SIGNS if plus_minus else None, pack=pack, family="groups",
        zero_field="" if zeros.dtype is None else "z",
        tile=TileLayout(
            slots={field: group_codes.slots(part, weights) for field, part in FIELDS[bits].items()},
            number_bytes=tuple(numbers), to_tile=None if tiled is None else tiled.to_tile,
            from_tile=None if tiled is None else tiled.from_tile,
            bytes_are_levels=zeros.dtype is None and bits in (3, 8),
        ),
        encoding=Encoding(
            limit=scales.limit, ordinary=({"d": (0x3A00, 0x3D00)} if scale == "bf16" else {}), weighted=weighted,
            whole_rows=group is None,
        ),
    )  # fmt: skip


SIGNS = np.array([-1, 1], np.float32)
SIGNS.flags.writeable = False


def members() -> list[Format]:
    """All formats of the family."""
    return [
        group_format(bits, group, scale=scale, zero=zero)
        for bits in BITS
        for group in GROUP_SIZES
        for scale in SCALES
        for zero in ZEROS
    ]
