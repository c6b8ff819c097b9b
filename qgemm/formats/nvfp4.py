"""nvfp4: 4 groups of 16 weights, w = d / 2 * v, v being twice the e2m1 number of the code, as in mxfp4.

offset  bytes  field
     0      4  d   byte g: scale of group g, a float of bits 3 to 6, the exponent, bias 7, and 0 to 2, the mantissa;
                   bit 7 is ignored, and 0x7f is 0
     4     32  qs  byte 8 g + j: the code of weight 16 g + j in the low nibble, of weight 16 g + j + 8 in the high

Codes lie in a device tile as those of mxfp4 do.
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import Bytes, Floats, unpack_nibbles
from qgemm.codec.scales import absmax

from .mxfp4 import CODE_EXPONENT, CODEBOOK, MAGNITUDES, VALUES, from_tile, to_tile

DTYPE = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
GROUP = 16
MAX_SCALE = 0x7E  # the code of 448; ggml decodes 0x7f, NaN in e4m3, as 0
SLOTS = {"qs": tuple(16 * g + 8 * h + j for g in range(4) for j in range(8) for h in range(2))}
LEVELS = MAGNITUDES.astype(np.float32)
BIAS = 127 - 7  # between the exponents of a float32 and of a scale


def encode(x: Floats) -> Blocks:
    """Values [n, 64] -> blocks [n]: d = absmax / 6, at most 448, the nearest v of each value, ties to the lower code.

    Errors are rounded to float32 before they are compared, as in C.
    """
    groups = x.reshape(-1, GROUP)
    d = scales(absmax(groups) / np.float32(6))
    levels = SCALES[d][:, None] * LEVELS  # [n, 8]
    size = np.abs(groups)
    codes, least = np.zeros(groups.shape, np.uint8), size
    for code in range(1, len(LEVELS)):
        error = np.abs(levels[:, code, None] - size)
        better = error < least
        codes, least = np.where(better, np.uint8(code), codes), np.where(better, error, least)
    codes[(groups < 0) & (codes > 0)] += np.uint8(8)
    blocks = np.empty(len(x), DTYPE)
    blocks["d"] = d.reshape(-1, 4)
    halves = codes.reshape(-1, 2, GROUP // 2)
    blocks["qs"] = (halves[:, 0] | halves[:, 1] << np.uint8(4)).reshape(-1, 32)
    return blocks


def scales(values: Floats) -> Bytes:
    """Scales [n] from 0 on -> their bytes: to nearest, halves up; 448 for those that become 256 or more, as in ggml."""
    bits = np.minimum(values, np.float32(448)).view(np.int32)
    rounded = (bits >> 19) + 1 >> 1  # exponent and three bits of mantissa; a carry moves into the exponent
    normal = np.where(rounded - (BIAS << 3) >= 15 << 3, MAX_SCALE, rounded - (BIAS << 3))
    with np.errstate(invalid="ignore"):
        subnormal = np.minimum(
            (np.where(values < 1, values, 0) * np.float32(512) + np.float32(0.5)).astype(np.int32), 7
        )
    codes = np.where((bits >> 23) - BIAS <= 0, subnormal, np.where((bits >> 23) - BIAS >= 15, MAX_SCALE, normal))
    return np.where(values > 0, codes, 0).astype(np.uint8)


def _scales() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent, np.ldexp(8.0 + mantissa, exponent - 11), np.ldexp(mantissa.astype(np.float64), -10))
    values[MAX_SCALE + 1] = 0
    return values.astype(np.float32)


SCALES = _scales()  # half of the number of a byte, because e2m1 numbers are halves of v


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> signed v as codes [n, 4, 16], scale d / 2 [n, 4]."""
    return Levels(VALUES.take(unpack_nibbles(blocks["qs"].reshape(-1, 8))).reshape(-1, 4, 16), SCALES[blocks["d"]])


FORMAT = Format(
    "nvfp4", 64, DTYPE, encode, levels, ggml_type=40, formula="d / 2 * codebook[q]", codebook=CODEBOOK,
    tile=TileLayout(slots=SLOTS, to_tile=to_tile, from_tile=from_tile, code_exponent=CODE_EXPONENT),
    encoding=Encoding(ordinary={"d": (0x08, 0x28)}),
)  # fmt: skip
