"""Blocks of several rows that lie interleaved in a file -> blocks of the plain type, with the same weights.

A file of llama.cpp's old Q4_0_4_4 and kin, or of ik_llama.cpp's types _R4, _R8 and _R16, stores the blocks of 4, 8 or
16 rows together, so that a CPU loads the same columns of all of them at once. Nearly all of it is a permutation of
bits, which a string describes by axes, as in einsum:

    "bLlki|hn > bhLi|ln"    from | to: the axes of the bytes, then those of the bits of a byte, the lowest bit last

    b       groups of 32 weights: 8 in a block of 256; as two axes H q (2 x 4) or c e (4 x 2)
    l h L i the weight of a group, 16 l + 8 h + 4 L + i
    k       the row: 4, 8 or 16; it comes first in the result
    n m     bits of numbers: 4, 2
    p s x   2, 4 and 8 of anything
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Bytes, Floats, pack_sixes, unpack_slots
from qgemm.formats import FORMATS, iq1_s, q3_k
from qgemm.formats.i8_levels import i8_format

SIZES = {"b": 8, "H": 2, "q": 4, "c": 4, "e": 2, "l": 2, "h": 2, "L": 2, "i": 4, "n": 4, "m": 2, "p": 2, "s": 4, "x": 8}


def permuted(raw: Bytes, order: str, rows: int) -> Bytes:
    """Bytes [groups of rows, blocks, size of rows blocks] -> those of each row [groups * rows, blocks, size]."""
    sizes = {**SIZES, "k": rows}
    source, target = (part.strip().replace("|", "") for part in order.split(">"))
    bitwise = "|" in order
    values = np.unpackbits(raw, axis=-1, bitorder="little") if bitwise else raw
    leading = values.shape[:2]
    values = values.reshape(*leading, *(sizes[axis] for axis in source))
    axes = [0, 2 + source.index("k"), 1, *(2 + source.index(axis) for axis in target)]
    flat = values.transpose(axes).reshape(leading[0] * rows, leading[1], -1)
    return np.packbits(flat, axis=-1, bitorder="little") if bitwise else np.ascontiguousarray(flat)


class Interleaved(NamedTuple):
    """A block of `rows` rows: its fields in order, each with the bytes of one row and the order of its parts."""

    rows: int
    fields: dict[str, tuple[int, str]]
    finish: Callable[[dict[str, Bytes]], dict[str, Any]] | None = None  # from these fields to those of the plain type

    @property
    def size(self) -> int:
        """Bytes of one row's share of a block."""
        return sum(size for size, _ in self.fields.values())

    def split(self, raw: Bytes) -> dict[str, Bytes]:
        """Bytes [groups of rows, blocks * size of a block] -> fields of each row's blocks [rows, blocks, size]."""
        raw = raw.reshape(len(raw), -1, self.rows * self.size)
        fields, start = {}, 0
        for name, (size, order) in self.fields.items():
            end = start + self.rows * size
            fields[name] = permuted(raw[:, :, start:end], order, self.rows)
            start = end
        return fields if self.finish is None else self.finish(fields)

    def blocks(self, fmt: Format, raw: Bytes) -> Blocks:
        """Interleaved blocks -> blocks [rows, blocks] of a format; its field d is left out where it belongs to rows."""
        fields = self.split(raw)
        shape = next(iter(fields.values())).shape[:2]
        blocks = np.empty(shape, fmt.dtype)
        for name, value in fields.items():
            blocks[name] = value.view(fmt.dtype[name].base).reshape(blocks[name].shape)
        return blocks


# ---------------------------------------------------------------- parts that several types share

D = {"d": (2, "kp > p")}
D_DMIN = {"d": (2, "kp > p"), "dmin": (2, "kp > p")}
NIBBLES_BY_16 = "bLlki|hn > bhLi|ln"  # byte j of a group holds weights j and j + 16
NIBBLES_BY_32 = "ceLlki|hn > clhLi|en"  # byte j of two groups holds weights j and j + 32
TWO_BITS = "Hqlki|hLm > HlhLi|qm"
SHIFTS = {"extra": (2, "lk|b > bl|")}
HIGH_SCALES, LOW_SCALES = (4, "elk|cm > cel|m"), (8, "qlk|Hn > Hql|n")


def _k_scales(fields: dict[str, Bytes]) -> dict[str, Any]:
    """Scales and minimums of q4_k and q5_k: low nibbles of both, then their high bits."""
    low, high = fields.pop("low"), fields.pop("high")
    pairs = high.reshape(-1, 4)
    low, bits = low.reshape(-1, 8), unpack_slots(pairs, 4)
    scales = low & np.uint8(15) | (bits & np.uint8(3)) << np.uint8(4)
    minimums = low >> np.uint8(4) | bits >> np.uint8(2) << np.uint8(4)
    return {**fields, "scales": pack_sixes(scales, minimums).reshape(*high.shape[:2], 12)}


def _q3_k(fields: dict[str, Bytes]) -> dict[str, Any]:
    high, low = (unpack_slots(fields.pop(name), bits) for name, bits in (("scales_h", 2), ("scales_l", 4)))
    sc = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    none = np.zeros(sc.size // 16, "<f2"), np.zeros((sc.size // 16, 256), np.uint8)
    packed = q3_k.pack(none[0], sc.reshape(-1, 16), none[1])["scales"]
    return {**fields, "scales": packed.reshape(*sc.shape[:2], 12)}


def _signs(packed: Bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Bytes of iq2_xxs_r4 and iq3_xxs_r4: signs xor their neighbours, and a bit of sc -> seven signs, sc [..., 8]."""
    parts = packed.reshape(*packed.shape[:2], 8, 4)
    places = np.arange(4, dtype=np.uint32)
    crossed = parts & np.uint8(254)
    signs = ((crossed ^ crossed >> np.uint8(1)) & np.uint8(127)).astype(np.uint32)
    sc = ((parts & np.uint8(1)).astype(np.uint32) << places).sum(axis=-1, dtype=np.uint32)
    return (signs << 7 * places).sum(axis=-1, dtype=np.uint32), sc


def _iq2_xxs(fields: dict[str, Bytes]) -> dict[str, Any]:
    signs, sc = _signs(fields.pop("sas"))
    points = fields["qs"].reshape(*signs.shape, 4).view("<u4")[..., 0]
    return {**fields, "qs": np.stack([points, signs | sc << np.uint32(28)], axis=-1)}


def _iq3_xxs(fields: dict[str, Bytes]) -> dict[str, Any]:
    signs, sc = _signs(fields.pop("sas"))
    return {**fields, "rest": signs | sc << np.uint32(28)}


def _iq2_xs(fields: dict[str, Bytes]) -> dict[str, Any]:
    words = fields["qs"].view("<u2")
    crossed = words >> np.uint16(9)
    signs = (crossed ^ crossed << np.uint16(1)) & np.uint16(127)
    return {**fields, "qs": words & np.uint16(511) | signs << np.uint16(9)}


def _centred(mask: int) -> Callable[[dict[str, Bytes]], dict[str, Any]]:
    """Codes that were stored with some bits inverted."""
    return lambda fields: {**fields, "qs": fields["qs"] ^ np.uint8(mask)}


def _q4_0(rows: int, order: str, mask: int = 0) -> Interleaved:
    return Interleaved(rows, {**D, "qs": (16, order)}, _centred(mask) if mask else None)


BY_4, BY_8 = "hLki > hLi", "hkLi > hLi"  # four or eight bytes of a row at a time

# The number of the type: the plain type, its block of several rows.
TYPES: dict[int, tuple[str, Interleaved]] = {
    31: ("q4_0", _q4_0(4, BY_4, 0x88)),
    32: ("q4_0", _q4_0(4, BY_8, 0x88)),
    33: ("q4_0", _q4_0(8, BY_8, 0x88)),
    36: ("iq4_nl", _q4_0(4, BY_4)),
    37: ("iq4_nl", _q4_0(4, BY_8)),
    38: ("iq4_nl", _q4_0(8, BY_8)),
    202: ("q4_0", _q4_0(8, BY_4)),
    206: ("q5_0", Interleaved(4, {**D, "qh": (4, "ki|hLl > lh|Li"), "qs": (16, "Llki|hn > hLi|ln")})),
    208: ("q8_0", Interleaved(8, {**D, "qs": (32, "lhLki > lhLi")})),
    210: ("q2_k", Interleaved(4, {**D_DMIN, "scales": (16, "blk > bl"), "qs": (64, TWO_BITS)})),
    211: ("q3_k", Interleaved(4, {**D, "scales_h": HIGH_SCALES, "scales_l": LOW_SCALES,
                                  "hmask": (32, "Hqki|lhL > lhLi|Hq"), "qs": (64, TWO_BITS)}, _q3_k)),
    212: ("q4_k", Interleaved(4, {**D_DMIN, "high": (4, "qk|Hn > Hq|n"), "low": (8, "bk > b"),
                                  "qs": (128, NIBBLES_BY_32)}, _k_scales)),
    213: ("q5_k", Interleaved(4, {**D_DMIN, "high": (4, "qk|Hn > Hq|n"), "low": (8, "bk > b"),
                                  "qh": (32, "ceki|lLh > lhLi|ce"), "qs": (128, NIBBLES_BY_32)}, _k_scales)),
    214: ("q6_k", Interleaved(4, {**D, "scales": (16, "blk > bl"), "qh": (64, "Hqlki|Lhm > HlhLi|qm"),
                                  "ql": (128, "HepLlki|hn > HplhLi|en")})),
    216: ("iq2_xxs", Interleaved(4, {**D, "sas": (32, "bki > bi"), "qs": (32, "bki > bi")}, _iq2_xxs)),
    217: ("iq2_xs", Interleaved(4, {**D, "qs": (64, "bkip > bip"), "scales": (8, "bk > b")}, _iq2_xs)),
    218: ("iq3_xxs", Interleaved(4, {**D, "sas": (32, "bki > bi"), "qs": (64, "bkx > bx")}, _iq3_xxs)),
    220: ("iq4_nl", Interleaved(4, {**D, "qs": (16, "Llki|hn > hLi|ln")})),
    221: ("iq3_s", Interleaved(4, {**D, "qs": (64, "bipk > bpi"), "qh": (8, "bk > b"),
                                   "signs": (32, "bki|sp > bs|pi"), "scales": (4, "epk|Hn > He|pn")})),
    222: ("iq2_s", Interleaved(4, {**D, "qs": (32, "bki > bi"), "qh": (8, "bk > b"), "signs": (32, "bki > bi"),
                                   "scales": (8, "bk > b")})),
    223: ("iq4_xs", Interleaved(8, {**D, "scales_h": (2, "ek|cm > ce|m"), "scales_l": (4, "qk|Hn > Hq|n"),
                                    "qs": (128, "blhki|Ln > bhLi|ln")})),
    233: ("q6_0", Interleaved(4, {**D, "qh": (8, "lki|hLm > Li|hlm"), "qs": (16, "Llki|hn > hLi|ln")})),
    335: ("iq2_bn", Interleaved(4, {"qs": (16, "elki|hLm > hLi|elm")})),
    337: ("iq2_k", Interleaved(4, {**D, **SHIFTS, "scales": LOW_SCALES, "qs": (64, TWO_BITS)})),
    338: ("iq3_k", Interleaved(4, {**D, **SHIFTS, "scales_h": (2, "lk|b > bl|"), "scales_l": LOW_SCALES,
                                   "qs": (64, TWO_BITS), "qh": (32, "Hqki|lhL > lhLi|Hq")})),
    339: ("iq4_k", Interleaved(4, {**D, **SHIFTS, "scales_h": HIGH_SCALES, "scales_l": LOW_SCALES,
                                   "qs": (128, NIBBLES_BY_16)})),
    340: ("iq5_k", Interleaved(4, {**D, **SHIFTS, "scales_h": HIGH_SCALES, "scales_l": LOW_SCALES,
                                   "qs": (128, NIBBLES_BY_32), "qh": (32, "ceki|Llh > lhLi|ce")})),
    344: ("iq4_ks", Interleaved(4, {"scales": (8, "bk > b"), "qs": (128, NIBBLES_BY_16)})),
    352: ("iq5_ks", Interleaved(4, {"scales": (8, "bk > b"), "qs": (128, NIBBLES_BY_32),
                                    "qh": (32, "ceki|Llh > lhLi|ce")})),
    353: ("mxfp4", Interleaved(8, {"e": (1, "k > "), "qs": (16, BY_4)})),
}  # fmt: skip


# ---------------------------------------------------------------- types whose weights only bytes express

Q8_K_R8 = Interleaved(8, {**D, "qs": (256, "blhLki > blhLi")})
Q8_K_R16 = Interleaved(16, {**D, "qs": (256, "blhLki > blhLi")}, _centred(0x80))
Q8_KV_R8 = Interleaved(8, {"qs": (32, "lhLki > lhLi")})
IQ1_S_R4 = Interleaved(4, {"qs": (4, "ik > i"), "qh": (2, "kp > p")})
IQ1_M_R4 = Interleaved(4, {"qs": (4, "ik > i"), "qh": (2, "pk > p"), "scales": (1, "k > ")})


def bytes_of_levels(levels: NDArray[Any], scale: Floats, group: int) -> Blocks:
    """Levels [rows, K], scales [rows, K / group] -> blocks of i8_g16 or i8_g32 [rows, K / group]."""
    fmt = i8_format(group)
    assert fmt.pack is not None
    return fmt.pack(Levels(levels.reshape(-1, 1, group), scale.reshape(-1, 1))).reshape(scale.shape)


def q8_k(layout: Interleaved, raw: Bytes) -> Blocks:
    """Blocks of 256 bytes with a float16 scale, as i8_g32."""
    fields = layout.split(raw)
    d = fields["d"].view("<f2")[..., 0].astype(np.float32)
    return bytes_of_levels(fields["qs"].view(np.int8), d.repeat(8, axis=1), 32)


def q8_kv(raw: Bytes, d: Floats) -> Blocks:
    """Rows of bytes with a scale each, as i8_g32."""
    levels = Q8_KV_R8.split(raw)["qs"].view(np.int8)
    return bytes_of_levels(levels, np.broadcast_to(d[:, None], levels.shape[:2]), 32)


def ternary(index: NDArray[Any], minus: NDArray[Any]) -> NDArray[np.int8]:
    """Points [...] of the grid of iq1_s, whether delta is -1/8 -> 8 * (level + delta) [..., 8]."""
    sign = np.where(minus, np.int8(-1), np.int8(1))
    levels: NDArray[np.int8] = iq1_s.points()[index] + sign[..., None]
    return levels


def iq1_s_r4(raw: Bytes, d: Floats) -> Blocks:
    """qh: the high three bits of point i from bit 3 i on, sc in bits 12 to 14, in bit 15 whether delta is -1/8."""
    fields = IQ1_S_R4.split(raw)
    qh = fields["qh"].view("<u2")
    high = qh >> np.arange(0, 12, 3, dtype=np.uint16) & np.uint16(7)
    levels = ternary(fields["qs"] | high << np.uint16(8), np.broadcast_to(qh >> np.uint16(15), high.shape))
    sc = (qh[..., 0] >> np.uint16(12) & np.uint16(7)).astype(np.float32)
    return bytes_of_levels(levels, d[:, None] * (2 * sc + 1) / np.float32(8), 32)


def iq1_m_r4(raw: Bytes, d: Floats) -> Blocks:
    """Nibble p of byte i of qh: the high three bits of point 2 i + p, and whether its delta is -1/8."""
    fields = IQ1_M_R4.split(raw)
    nibbles = unpack_slots(fields["qh"], 4)
    index = fields["qs"] | (nibbles & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    sc = unpack_slots(fields["scales"], 4).astype(np.float32)
    levels = ternary(index, nibbles >> np.uint8(3))
    return bytes_of_levels(levels, (d[:, None, None] * sc).reshape(len(d), -1) / np.float32(8), 16)


def bf16_r16(raw: Bytes) -> Blocks:
    """Two numbers of each of 16 rows at a time -> numbers [rows, K]."""
    words = raw.view("<u2").reshape(len(raw), -1, 16, 2)
    return np.ascontiguousarray(words.swapaxes(1, 2)).reshape(16 * len(raw), -1)


def plain(number: int) -> Format:
    """The plain type of an interleaved one."""
    return FORMATS[TYPES[number][0]]
