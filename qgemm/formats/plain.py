"""f32, f16, bf16: one number per weight, no scale. bf16 is the upper half of a float32.

offset  bytes  format
     0      4  f32   float32
     0      2  f16   float16
     0      2  bf16  uint16, the bits of a bfloat16
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats, from_float16, to_float16


def encode_bf16(x: Floats) -> Blocks:
    """Values [n, 1] float32 -> bits [n] uint16, to nearest even; NaN stays NaN and becomes quiet."""
    bits = np.ascontiguousarray(x[:, 0]).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x[:, 0]), bits >> 16 | 0x40, rounded).astype(np.uint16)


def levels(blocks: Blocks) -> Levels:
    """Numbers [n] -> the same numbers, [n, 1, 1] float32."""
    return Levels(blocks.astype(np.float32, copy=False)[:, None, None])


def levels_f16(blocks: Blocks) -> Levels:
    """Numbers [n] -> the same, [n, 1, 1] float32."""
    return Levels(from_float16(blocks)[:, None, None])


def levels_bf16(blocks: Blocks) -> Levels:
    """Bits [n] -> the numbers they stand for, [n, 1, 1] float32."""
    return Levels((blocks.astype(np.uint32) << 16).view(np.float32)[:, None, None])


F32 = Format("f32", 1, np.dtype("<f4"), lambda x: x[:, 0], levels, ggml_type=0)
F16 = Format("f16", 1, np.dtype("<f2"), lambda x: to_float16(x[:, 0]), levels_f16, ggml_type=1)
BF16 = Format("bf16", 1, np.dtype("<u2"), encode_bf16, levels_bf16, ggml_type=30)
