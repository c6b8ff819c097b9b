"""f8_e4m3 and f8_e5m2: 32 to 256 numbers of eight bits share a float32 scale, w = d * number.

    name      f8_e4m3 | f8_e5m2 _ g32 | g64 | g128 | g256

    offset  bytes    field
         0      4    d   float32 scale
         4  weights  qs  byte j: the number of weight j

    e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN
    e5m2: 1 sign, 5 exponent (bias 15), 2 mantissa bits: the high byte of a float16

FP8 checkpoints use these formats: each block repeats the scale of the tensor, of a row or of 128 x 128 weights, which
costs 1/8 bit a weight at 256. Formats are built at first use: FORMATS finds them by name, and lists none. Kernels
decode e4m3's codes of NaN, which no encoder writes, as 480 and -480.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from qgemm.codec import e4m3
from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import Floats, reciprocal
from qgemm.codec.scales import absmax
from qgemm.errors import UnsupportedError

GROUP_SIZES = (32, 64, 128, 256)
CODE_EXPONENT = {"e4m3": 8, "e5m2": 0}  # the number is 2^this times the half with the code's bits (e4m3: shifted)
MAX_LEVEL = {"e4m3": 480.0, "e5m2": 57344.0}  # the largest number in kernels
MIN_SCALE = np.float32(2.0**-125)  # the reciprocal of a smaller scale overflows
NAME = re.compile(r"f8_(e4m3|e5m2)_g(32|64|128|256)")


NUMBERS: dict[str, Floats] = {
    "e4m3": e4m3.NUMBERS,
    "e5m2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}


def f8_format(kind: str, group: int) -> Format:
    """The format of "e4m3" or "e5m2" with groups of 32, 64, 128 or 256, the same one at each call; UnsupportedError."""
    if kind not in NUMBERS or group not in GROUP_SIZES:
        raise UnsupportedError(
            f"a float8 format is of {', '.join(NUMBERS)}, groups of {GROUP_SIZES}; got {kind}, {group}"
        )
    return _built(kind, group)


def named(name: str) -> Format | None:
    """The format of this name; None for any other name."""
    match = NAME.fullmatch(name.lower())
    return None if match is None else _built(match[1], int(match[2]))


@cache
def _built(kind: str, group: int) -> Format:
    numbers = NUMBERS[kind]
    dtype = np.dtype([("d", "<f4"), ("qs", "u1", group)])

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> the numbers as codes [n, 1, weights], scale [n, 1]."""
        return Levels(numbers[blocks["qs"]][:, None], blocks["d"][:, None])

    finite = np.sort(numbers[np.isfinite(numbers) & ~np.signbit(numbers)])
    max_level = finite[-1]
    edges = (finite[:-1] + finite[1:]) / np.float32(2)  # exact; halves go to the even code

    def encode(x: Floats) -> Blocks:
        """Values [n, weights] -> blocks [n]: d = absmax / the largest number, the number nearest to x / d."""
        d = absmax(x) / max_level
        d = np.where(d < MIN_SCALE, np.float32(0), d)
        size = np.minimum(np.abs(np.nan_to_num(x * reciprocal(d)[:, None])), max_level)
        codes = np.searchsorted(edges, size)  # the lower of two that are equally near
        codes += (size == edges[np.minimum(codes, len(edges) - 1)]) & (codes % 2 == 1)
        return pack(Levels(codes.astype(np.uint8) | np.signbit(x).astype(np.uint8) << np.uint8(7), d))

    def pack(levels: Levels) -> Blocks:
        """Bytes [n, weights] or [n, 1, weights] as codes, scale [n] or [n, 1] -> blocks [n]."""
        assert levels.scale is not None
        blocks = np.empty(levels.codes.size // group, dtype)
        blocks["d"] = levels.scale.reshape(-1)
        blocks["qs"] = levels.codes.reshape(-1, group)
        return blocks

    return Format(
        f"f8_{kind}_g{group}", group, dtype, encode, levels, formula="d * number", pack=pack, family="f8",
        declared_max_level=MAX_LEVEL[kind],
        tile=TileLayout(slots={"qs": tuple(range(group))}, code_exponent=CODE_EXPONENT[kind]),
    )  # fmt: skip
