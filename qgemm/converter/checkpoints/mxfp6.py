"""Matrices of six-bit numbers (e2m3) that share an exponent by 32, of compressed-tensors (mxfp6-pack-quantized).

    weight_packed  uint8  [N, 3 K / 4]   bits 6 i to 6 i + 5 of three bytes: the code of weight i of four
    weight_scale   uint8  [N, K / 32]    e, the power of two 2^(e - 127) that 32 weights share

Bit 5 of a code is the sign. The number of the others is an integer of up to 60 divided by 8, so that blocks of signed
bytes with a float32 scale hold the weights, all but a negative zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qgemm.codec.packing import Bytes, Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats.i8_levels import i8_format
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from ..array_weights import Stored
from ..weight import Weight
from .fp4 import PARTS, byte_part
from .fp8 import BIAS, NAN

FORM = "mxfp6-pack-quantized"
GROUP = 32
BYTES = GROUP * 6 // 8  # bytes of the codes of a group
EIGHTHS = np.array([*range(8), *(((8 + m) << e) for e in range(3) for m in range(8))], np.int8)
LEVELS = np.concatenate([EIGHTHS, -EIGHTHS])  # code -> eight times its number
NUMBERS = np.copysign(LEVELS / np.float32(8), np.repeat([1, -1], 32)).astype(np.float32)


def matrix(module: str, stored: Mapping[str, Stored]) -> Weight:
    """The matrix of one module."""
    codes, scales = (byte_part(module, stored, part, "U8") for part in PARTS[:2])
    (n, width), name = codes.entry.shape, f"{module}.weight"
    k = width * 8 // 6
    prefix = f"{shown_path(codes.file.path)}: tensor {shown(name)}"
    if width % BYTES or scales.entry.shape != (n, k // GROUP):
        shape = list(scales.entry.shape)
        raise CheckpointError(f"{prefix}: {shape} scales are not those of {[n, width]} bytes of codes")

    def read(start: int, stop: int) -> tuple[Bytes, Bytes]:
        """Codes [groups, 32] and exponents [groups, 1]."""
        exponents = scales.file.read(scales.entry, start, stop).reshape(-1, 1)
        if (exponents == NAN).any():
            raise CheckpointError(f"{prefix}: a scale is {NAN}, which is no number")
        packed = codes.file.read(codes.entry, start * BYTES, stop * BYTES).reshape(-1, GROUP // 4, 3).astype(np.uint32)
        word = packed[..., 0] | packed[..., 1] << np.uint32(8) | packed[..., 2] << np.uint32(16)
        quads = word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & np.uint32(63)
        return quads.astype(np.uint8).reshape(-1, GROUP), exponents

    def values(start: int, stop: int) -> Floats:
        quads, exponents = read(start // GROUP, stop // GROUP)
        with np.errstate(over="ignore"):  # the greatest exponents
            weights: Floats = np.ldexp(NUMBERS[quads], exponents.astype(np.int32) - BIAS)
        return weights.reshape(-1)

    def native() -> Packed:
        quads, exponents = read(0, n * k // GROUP)
        fmt = i8_format(GROUP)
        blocks = np.empty(len(quads), fmt.dtype)
        blocks["qs"] = LEVELS[quads]
        blocks["d"] = np.ldexp(np.float32(1), exponents[:, 0].astype(np.int32) - BIAS - 3)
        return Tensor(fmt, (n, k), blocks.reshape(n, -1), name)

    nbytes = codes.entry.nbytes + scales.entry.nbytes
    return Weight(
        name, (n, k), "MXFP6", nbytes, GROUP, values=values, quantized=True, irregular=True, native=native
    )  # fmt: skip
