"""kbit2 to kbit5: 32 weights share an absmax, w = absmax * codebook[q] with q in 0..2^bits - 1.

    offset  bytes     field
         0  1 or 2    absmax  E4M4, in kbit2_f16 to kbit5_f16 float16
         .  4 * bits  planes  plane b, bit j: bit b of the q of weight j (little-endian)

The codebook, float32 [2^bits], belongs to the tensor; the default is normal-float (codebook.py).
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import ArrayLike

from qgemm.codec import scales
from qgemm.codec.codebook import MIN_ABSMAX, checked, nearest, normal_float
from qgemm.codec.e4m4 import LIMIT, decode_e4m4, nearest_e4m4
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import IN_ORDER, Floats, pack_bit_planes, to_float16, unpack_bit_planes
from qgemm.codec.scales import StoredScale
from qgemm.errors import UnsupportedError

WEIGHTS = 32


ABSMAX = {
    #                      dtype  suffix  encode        decode                           limit
    "e4m4":    StoredScale("u1",  "",     nearest_e4m4, decode_e4m4,                     LIMIT),
    "float16": StoredScale("<f2", "_f16", to_float16,   lambda half: half.astype("<f4"), np.inf),
}  # fmt: skip
# Exact: what other libraries quantized.
FLOAT32 = StoredScale("<f4", "_f32", lambda absmax: absmax, lambda absmax: absmax, np.inf)


def kbit(bits: int, absmax: str = "e4m4", codebook: ArrayLike | None = None) -> Format:
    """The format of `bits` bits with this kind of absmax and this codebook.

    UnsupportedError for another kind of absmax, CodebookError for a codebook that is not 2^bits finite numbers.
    """
    if absmax not in ABSMAX:
        raise UnsupportedError(f"KBIT{bits}: absmax is {' or '.join(map(repr, ABSMAX))}, got {absmax!r}")
    return _built(bits, absmax, ABSMAX[absmax], codebook)


def kbit_float32(bits: int, codebook: ArrayLike) -> Format:
    """The format of `bits` bits with this codebook and a float32 absmax, kbit4_f32 of bitsandbytes' tensors.

    FORMATS does not list it, and a GPU does not quantize to it. CodebookError for a codebook that is not 2^bits finite
    numbers.
    """
    return _built(bits, "float32", FLOAT32, codebook)


def named(name: str) -> Format | None:
    """The format with a float32 absmax of this name, with the default codebook; None if it is not one of these."""
    match = re.fullmatch(r"kbit([2-5])_f32", name.lower())
    return None if match is None else kbit_float32(int(match[1]), normal_float(int(match[1])))


def _built(bits: int, own: str, kind: StoredScale, codebook: ArrayLike | None) -> Format:
    name = f"kbit{bits}{kind.suffix}"
    book = checked(normal_float(bits) if codebook is None else codebook, bits, name.upper())
    dtype = np.dtype([("absmax", kind.dtype), ("planes", "<u4", bits)])

    def encode(x: Floats) -> Blocks:
        """Values [n, 32] -> blocks [n]: absmax, q of the level nearest to x / absmax, from the unrounded absmax."""
        largest = scales.absmax(x)
        blocks = np.empty(len(x), dtype)
        blocks["absmax"] = kind.encode(largest)
        scaled = np.divide(x, np.maximum(largest, MIN_ABSMAX)[:, None], dtype=np.float32)
        blocks["planes"] = pack_bit_planes(nearest(scaled, book), bits)
        return blocks

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> codebook[q] as codes [n, 1, 32], scale [n, 1]."""
        return Levels(book.take(unpack_bit_planes(blocks["planes"]))[:, None], kind.decode(blocks["absmax"])[:, None])

    def pack(levels: Levels) -> Blocks:
        """Codes q [n, 1, 32] uint8, absmax as scale [n, 1] -> blocks [n]."""
        assert levels.scale is not None
        blocks = np.empty(len(levels.codes), dtype)
        blocks["absmax"] = kind.encode(levels.scale[:, 0])
        blocks["planes"] = pack_bit_planes(levels.codes[:, 0], bits)
        return blocks

    def variant(codebook: ArrayLike | None, absmax: str | None) -> Format:
        if kind is FLOAT32 and absmax is None:
            return kbit_float32(bits, book if codebook is None else codebook)
        return kbit(bits, own if absmax is None else absmax, book if codebook is None else codebook)

    small, exact = kind.dtype == "u1", kind is FLOAT32
    return Format(
        name, WEIGHTS, dtype, encode, levels, formula="absmax * codebook[q]", codebook=book, variant=variant,
        stored_in_parts=not exact, pack=pack if exact else None, family="codebook" if exact else "",
        tile=TileLayout(slots={"planes": IN_ORDER}, bit_planes=True, number_bytes=("absmax",) if small else ()),
        encoding=Encoding(limit=kind.limit, ordinary={"absmax": (0x20, 0x40)} if small else {}),
    )  # fmt: skip


KBIT2, KBIT3, KBIT4, KBIT5 = (kbit(bits) for bits in (2, 3, 4, 5))
KBIT2_F16, KBIT3_F16, KBIT4_F16, KBIT5_F16 = (kbit(bits, "float16") for bits in (2, 3, 4, 5))
