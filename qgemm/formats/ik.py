"""The types of ik_llama.cpp: q6_0, iq2_k .. iq6_k, iq2_ks .. iq5_ks, iq4_kss, iq2_kl, iq1_kt .. iq4_kt, iq1_bn, iq2_bn.

All are w = d * sc * level. d belongs to a block of 256 weights, or to a row, whose blocks here repeat it in a first
field (the file has it once, before the blocks of the row: files/gguf/foreign.py). sc is an integer of 16 or 32
weights, level an integer of eight bits: a value of a table, to which a bit of each group may add a shift, or (the
trellis types, *_kt) a sum of bytes of pseudorandom numbers, started by an index of four or eight weights.

    type     d        sc of       level
    q6_0     block of 32          q - 32
    iq2_k    block    16 weights  one of 4 values, shift 5
    iq3_k    block    16          one of 8, shift 4
    iq4_k    block    16          one of 16, shift 4
    iq5_k    block    16          one of 32, shift 2
    iq6_k    block    16          one of 64, shift 1
    iq2_ks   row      32          as iq2_k
    iq3_ks   row      32          as iq3_k
    iq4_ks   row      32          as iq4_k
    iq4_kss  row      32          as iq4_k
    iq5_ks   row      32          as iq5_k
    iq2_kl   row      32          two weights at a time: one of 32 pairs
    iq1_kt   row      32          trellis, 13 bits for 8 weights
    iq2_kt   row      32          trellis, 16 bits for 8
    iq3_kt   row      32          trellis, 16 bits for 8 magnitudes, and their signs
    iq4_kt   row      32          trellis, 15 bits for 4
    iq1_bn   row      1           -1, 0, 1: five digits to the base 3 in a byte
    iq2_bn   row      1           -1, 0, 1 in 2 bits

They are read, multiplied and converted from. A GPU holds their levels as bytes (i8_levels.py). FORMATS finds them by
name, and lists none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Bytes, unpack_nibbles, unpack_planes, unpack_slots

from . import iq4_nl
from .i8_levels import device_form
from .ik_trellis import TRELLIS

Decode = Callable[[Blocks], tuple[NDArray[Any], NDArray[Any]]]  # blocks -> levels [n, 256], sc [n, groups]


def _with_shift(values: tuple[int, ...] | NDArray[Any], shift: int) -> NDArray[np.int8]:
    """The levels of codes, then those of codes in a group with a shift."""
    plain = np.array(values, np.int16)
    return np.concatenate([plain, plain + shift]).astype(np.int8)


OF_2_BITS = _with_shift((-31, -13, 1, 17), 5)
OF_3_BITS = _with_shift((-63, -40, -23, -10, 1, 13, 28, 47), 4)
OF_4_BITS = _with_shift(iq4_nl.VALUES, 4)
OF_5_BITS = _with_shift(
    (
        -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
        -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
    ),
    2,
)  # fmt: skip
OF_6_BITS = _with_shift(
    (
        -127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
        -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
        -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
        47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121,
    ),
    1,
)  # fmt: skip
# The second levels that pairs of iq2_kl have, by the number of the first.
EIGHT = np.array([-63, -40, -23, -10, 1, 13, 28, 47], np.int8)
PAIRS_BY_FIRST = {
    0: (2, 5), 1: (0, 3, 5, 7), 2: (1, 2, 4, 5, 6), 3: (0, 4, 5, 7),
    4: (2, 3, 4, 5, 6), 5: (1, 2, 3, 4, 5), 6: (0, 2, 4, 6, 7), 7: (2, 5),
}  # fmt: skip
PAIRS = np.array([(EIGHT[a], EIGHT[b]) for a, seconds in PAIRS_BY_FIRST.items() for b in seconds], np.int8)


def _levels(table: NDArray[np.int8], codes: Bytes, shifted: NDArray[Any]) -> NDArray[np.int8]:
    """Codes [n, 256], whether each group has the shift [n, groups] -> levels [n, 256]."""
    shifts = shifted.astype(np.uint8).repeat(codes.shape[1] // shifted.shape[1], axis=1)
    return table[codes + shifts * np.uint8(len(table) // 2)]


def _bits(field: NDArray[Any], count: int, step: int = 1) -> Bytes:
    """A field of integers [n] -> the numbers of `step` bits in it [n, count], the lowest first."""
    shifts = np.arange(0, count * step, step, dtype=field.dtype)
    numbers: Bytes = (field[:, None] >> shifts & field.dtype.type((1 << step) - 1)).astype(np.uint8)
    return numbers


def _six_bits(blocks: Blocks) -> NDArray[np.int8]:
    """Scales of 16 groups of iq4_k and iq5_k, sc in -32..31."""
    low, high = unpack_slots(blocks["scales_l"], 4), unpack_slots(blocks["scales_h"], 2)
    return (low | high << np.uint8(4)).view(np.int8) - np.int8(32)


# ---------------------------------------------------------------- codes, weight by weight


def _two_bits(blocks: Blocks) -> Bytes:
    """Byte 32 h + j holds weights 128 h + 32 i + j in bits 2 i."""
    return unpack_planes(blocks["qs"].reshape(-1, 32), 2).reshape(-1, 256)


def _third_bit(blocks: Blocks) -> Bytes:
    """Byte j of qh holds weight 32 i + j in bit i."""
    return unpack_planes(blocks["qh"], 1)


def _nibbles_of_32(blocks: Blocks) -> Bytes:
    """Byte 16 g + j holds weights 32 g + j and 32 g + j + 16."""
    return unpack_nibbles(blocks["qs"].reshape(-1, 16)).reshape(-1, 256)


def _nibbles_of_64(blocks: Blocks) -> Bytes:
    """Byte 32 c + j holds weights 64 c + j and 64 c + j + 32."""
    return unpack_nibbles(blocks["qs"].reshape(-1, 32)).reshape(-1, 256)


# ---------------------------------------------------------------- types


def _q6_0(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """qh: byte j holds the high bits of weights j, j + 16, j + 8, j + 24, two each, from bit 0 on."""
    parts = unpack_slots(blocks["qh"], 2).reshape(-1, 8, 2, 2)  # [n, j, half of the byte, plane]
    high = np.moveaxis(parts, (3, 2, 1), (1, 2, 3)).reshape(-1, 32)
    codes = unpack_nibbles(blocks["qs"]) | high << np.uint8(4)
    return codes.view(np.int8) - np.int8(32), np.ones((len(blocks), 1), np.int8)


def _iq2_k(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    codes = _levels(OF_2_BITS, _two_bits(blocks), _bits(blocks["extra"], 16))
    return codes, unpack_slots(blocks["scales"], 4).view(np.int8) - np.int8(8)


def _iq3_k(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    codes = _two_bits(blocks) | _third_bit(blocks) << np.uint8(2)
    size = 2 * unpack_slots(blocks["scales_l"], 4).view(np.int8) + np.int8(1)
    sc = np.where(_bits(blocks["scales_h"], 16) > 0, -size, size)
    return _levels(OF_3_BITS, codes, _bits(blocks["extra"], 16)), sc


def _iq4_k(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    return _levels(OF_4_BITS, _nibbles_of_32(blocks), _bits(blocks["extra"], 16)), _six_bits(blocks)


def _iq5_k(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    codes = _nibbles_of_64(blocks) | _third_bit(blocks) << np.uint8(4)
    return _levels(OF_5_BITS, codes, _bits(blocks["extra"], 16)), _six_bits(blocks)


def _iq6_k(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    high = unpack_planes(blocks["qh"].reshape(-1, 32), 2).reshape(-1, 256)
    codes = _nibbles_of_64(blocks) | high << np.uint8(4)
    return _levels(OF_6_BITS, codes, _bits(blocks["extra"], 16)), blocks["scales"]


def _iq2_ks(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """extra: bits 0 to 7 the shifts, bits 8 to 15 the fifth bits of sc."""
    sc = unpack_slots(blocks["scales"], 4) | _bits(blocks["extra"] >> np.uint16(8), 8) << np.uint8(4)
    return _levels(OF_2_BITS, _two_bits(blocks), _bits(blocks["extra"], 8)), sc.view(np.int8) - np.int8(16)


def _iq3_ks(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """extra: bits 0 to 7 the fifth bits of sc, bits 8 to 15 the shifts. Nibble i of byte j: sc of group 4 i + j."""
    low = np.concatenate([blocks["scales"] & np.uint8(15), blocks["scales"] >> np.uint8(4)], axis=1)
    sc = low | _bits(blocks["extra"], 8) << np.uint8(4)
    codes = _two_bits(blocks) | _third_bit(blocks) << np.uint8(2)
    return _levels(OF_3_BITS, codes, _bits(blocks["extra"] >> np.uint16(8), 8)), sc.view(np.int8) - np.int8(16)


def _of_bytes(scales: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bytes of scales [n, 8] -> shifts, bit 0, and sc, the rest minus 127."""
    return scales & np.uint8(1), (scales & np.uint8(254)).astype(np.int16) - np.int16(127)


def _iq4_ks(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    shifted, sc = _of_bytes(blocks["scales"])
    return _levels(OF_4_BITS, _nibbles_of_32(blocks), shifted), sc


def _iq4_kss(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bit 0 of the eight words of a group are its byte of scales; the rest are codes, each bit xor that above it."""
    words = blocks["qs"].reshape(-1, 8, 8)
    scales = np.packbits((words & 1).astype(np.uint8), axis=2, bitorder="little")[:, :, 0]
    codes = words & np.uint16(0xFFFE)
    codes ^= codes >> np.uint16(1)
    shifted, sc = _of_bytes(scales)
    nibbles = unpack_nibbles(np.ascontiguousarray(codes).view(np.uint8).reshape(-1, 16)).reshape(-1, 256)
    return _levels(OF_4_BITS, nibbles, shifted), sc


def _iq5_ks(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    shifted, sc = _of_bytes(blocks["scales"])
    codes = _nibbles_of_64(blocks) | _third_bit(blocks) << np.uint8(4)
    return _levels(OF_5_BITS, codes, shifted), sc


def _iq2_kl(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """Byte 16 c + j of qs: pairs j of groups 2 c and 2 c + 1; bit g of byte j of qh: the fifth bit of pair j, group g.

    Nibble i of byte j of scales_l: the low bits of sc of group 4 i + j.
    """
    low = unpack_nibbles(blocks["qs"].reshape(-1, 16)).reshape(-1, 8, 16)  # [n, group, pair]
    pairs = low | unpack_planes(blocks["qh"], 1).reshape(-1, 8, 16) << np.uint8(4)
    low_bits = np.concatenate([blocks["scales_l"] & np.uint8(15), blocks["scales_l"] >> np.uint8(4)], axis=1)
    sc = low_bits | _bits(blocks["scales_h"], 8, 2) << np.uint8(4)
    return PAIRS[pairs].reshape(-1, 256), sc.view(np.int8) - np.int8(32)


def _iq1_bn(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """Byte j of ql: five weights, their digits the highest first; extra: every sixteenth weight."""
    powers = np.array([81, 27, 9, 3, 1], np.uint8)
    digits = blocks["ql"].reshape(-1, 4, 3, 1) * powers
    last = blocks["extra"][:, None, None] * powers[:4, None]
    fractions = np.concatenate([digits.reshape(-1, 4, 15), last], axis=2).astype(np.uint16)
    codes = (fractions + (fractions >> 1) >> 7).astype(np.int8)
    return codes.reshape(-1, 64) - np.int8(1), np.ones((len(blocks), 1), np.int8)


def _iq2_bn(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """Byte j: weights j + 16 i in bits 2 i."""
    return unpack_planes(blocks["qs"], 2).view(np.int8) - np.int8(1), np.ones((len(blocks), 1), np.int8)


def _format(
    name: str, ggml_type: int, fields: list[Any], decode: Decode, formula: str, row_scale: str = "", weights: int = 256
) -> Format:
    """row_scale: the dtype of the scale of a row, a field before those of the block."""
    dtype = np.dtype([*([("d", row_scale)] if row_scale else []), *fields])

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> levels as codes [n, groups, weights of a group], scale d * sc [n, groups]."""
        codes, sc = decode(blocks)
        d = blocks["d"].astype(np.float32)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):  # d may be any bit pattern
            scale = d * sc.astype(np.float32)
        return Levels(codes.reshape(len(blocks), scale.shape[1], -1), scale)

    group = weights // decode(np.zeros(1, dtype))[1].shape[1]
    unit = min(group, 32)

    def of_units(blocks: Blocks) -> Levels:
        """Levels in groups of at most 32 weights."""
        codes, scale, *_ = levels(blocks)
        assert scale is not None
        return Levels(codes.reshape(len(blocks), -1, unit), scale.repeat(group // unit, axis=1))

    return Format(
        name, weights, dtype, levels=levels, ggml_type=None if row_scale else ggml_type, formula=formula,
        device=device_form(of_units, unit), declared_max_level=128,
    )  # fmt: skip


HALF, EXTRA = ("d", "<f2"), ("extra", "<u2")
TABLE = "d * sc * level[q]"
FACTS: tuple[tuple[Any, ...], ...] = (
    (133, "q6_0", [HALF, ("qh", "u1", 8), ("qs", "u1", 16)], _q6_0, "d * (q - 32)", "", 32),
    (134, "iq1_bn", [("ql", "u1", 12), ("extra", "u1")], _iq1_bn, "d * (q - 1)", "<f2", 64),
    (135, "iq2_bn", [("qs", "u1", 16)], _iq2_bn, "d * (q - 1)", "<f4", 64),
    (137, "iq2_k", [HALF, EXTRA, ("scales", "u1", 8), ("qs", "u1", 64)], _iq2_k, TABLE),
    (138, "iq3_k", [HALF, EXTRA, ("scales_h", "<u2"), ("scales_l", "u1", 8), ("qs", "u1", 64), ("qh", "u1", 32)],
     _iq3_k, TABLE),
    (139, "iq4_k", [HALF, EXTRA, ("scales_h", "u1", 4), ("scales_l", "u1", 8), ("qs", "u1", 128)], _iq4_k, TABLE),
    (140, "iq5_k", [HALF, EXTRA, ("scales_h", "u1", 4), ("scales_l", "u1", 8), ("qs", "u1", 128), ("qh", "u1", 32)],
     _iq5_k, TABLE),
    (141, "iq6_k", [HALF, EXTRA, ("scales", "i1", 16), ("qs", "u1", 128), ("qh", "u1", 64)], _iq6_k, TABLE),
    (144, "iq4_ks", [("scales", "u1", 8), ("qs", "u1", 128)], _iq4_ks, TABLE, "<f4"),
    (145, "iq2_ks", [EXTRA, ("scales", "u1", 4), ("qs", "u1", 64)], _iq2_ks, TABLE, "<f2"),
    (146, "iq4_kss", [("qs", "<u2", 64)], _iq4_kss, TABLE, "<f4"),
    (152, "iq5_ks", [("scales", "u1", 8), ("qs", "u1", 128), ("qh", "u1", 32)], _iq5_ks, TABLE, "<f4"),
    (156, "iq3_ks", [EXTRA, ("scales", "u1", 4), ("qs", "u1", 64), ("qh", "u1", 32)], _iq3_ks, TABLE, "<f2"),
    (157, "iq2_kl", [("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 64), ("qh", "u1", 16)], _iq2_kl,
     "d * sc * pair[q]", "<f2"),
    *((number, name, fields, decode, "d * sc * trellis[q]", "<f4") for number, name, fields, decode in TRELLIS),
)  # fmt: skip
TYPES: dict[int, Format] = {
    number: _format(name, number, fields, decode, formula, *more)
    for number, name, fields, decode, formula, *more in FACTS
}
BY_NAME = {fmt.name: fmt for fmt in TYPES.values()}


def named(name: str) -> Format | None:
    """The type of this name; None for any other name."""
    return BY_NAME.get(name.lower())
