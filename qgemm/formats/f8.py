"""f8_e4m3 and f8_e5m2: numbers of eight bits, of which 32 to 256 of a row share a float32 scale, w = d * number.

    name      f8_e4m3 | f8_e5m2 _ g32 | g64 | g128 | g256

    offset  bytes    field
         0      4    d   float32 scale
         4  weights  qs  a number each

    e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN
    e5m2: 1 sign, 5 exponent (bias 15), 2 mantissa bits: the high byte of a float16

The matrices of FP8 checkpoints: a scale of the tensor, of a row or of 128 x 128 weights is repeated in each block, for
1/8 bit a weight at 256. Made when they are asked for: FORMATS finds each by its name, and lists none. Kernels take
e4m3's codes of NaN, which no encoder makes, for 480 and -480.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from qgemm.codec import e4m3
from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats, reciprocal
from qgemm.codec.scales import absmax
from qgemm.errors import UnsupportedError

GROUPS = (32, 64, 128, 256)
CODE_EXPONENT = {"e4m3": 8, "e5m2": 0}  # a code's bits as those of a half, of e4m3 shifted, times 2^this are the number
LARGEST = {"e4m3": 480.0, "e5m2": 57344.0}  # of a finite number in kernels
LEAST = np.float32(2.0**-125)  # of a scale: the reciprocal of a smaller one overflows
NAME = re.compile(r"f8_(e4m3|e5m2)_g(32|64|128|256)")


NUMBERS: dict[str, Floats] = {
    "e4m3": e4m3.NUMBERS,
    "e5m2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}


def f8_format(kind: str, group: int) -> Format:
    """The format of "e4m3" or "e5m2" with groups of 32, 64, 128 or 256, the same one at each call; UnsupportedError."""
    if kind not in NUMBERS or group not in GROUPS:
        raise UnsupportedError(f"a float8 format is of {', '.join(NUMBERS)}, groups of {GROUPS}; got {kind}, {group}")
    return _made(kind, group)


def named(name: str) -> Format | None:
    """The format of this name, None if it is not one of these."""
    found = NAME.fullmatch(name.lower())
    return None if found is None else _made(found[1], int(found[2]))


@cache
def _made(kind: str, group: int) -> Format:
    numbers = NUMBERS[kind]
    dtype = np.dtype([("d", "<f4"), ("qs", "u1", group)])

    def levels(blocks: Blocks) -> Levels:
        """Blocks [n] -> the numbers as codes [n, 1, weights], scale [n, 1]."""
        return Levels(numbers[blocks["qs"]][:, None], blocks["d"][:, None])

    finite = np.sort(numbers[np.isfinite(numbers) & ~np.signbit(numbers)])
    most = finite[-1]
    edges = (finite[:-1] + finite[1:]) / np.float32(2)  # exact; halves go to the even code

    def encode(x: Floats) -> Blocks:
        """Values [n, weights] -> blocks [n]: d = absmax / the largest number, the number nearest to x / d."""
        d = absmax(x) / most
        d = np.where(d < LEAST, np.float32(0), d)
        size = np.minimum(np.abs(np.nan_to_num(x * reciprocal(d)[:, None])), most)
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
        slots={"qs": tuple(range(group))}, code_exponent=CODE_EXPONENT[kind], largest=LARGEST[kind],
    )  # fmt: skip
