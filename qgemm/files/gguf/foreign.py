"""Types of other programs whose bytes in a file are not the blocks of a format: rows with a scale, interleaved rows.

`TYPES` has them by number. Their tensors have the format of the same weights, with blocks that are put together when
they are read. Types of ik_llama.cpp that are plain blocks are formats with a number (formats/ik.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.codec.packing import Bytes, Floats
from qgemm.formats import FORMATS, ik
from qgemm.formats.i8_levels import i8_format
from qgemm.parallel import for_slices

from . import interleaved
from .interleaved import Interleaved

Convert = Callable[
    [Bytes, Bytes], Blocks
]  # heads [groups, rows * head], blocks [groups, bytes] -> blocks [rows, count]
IK, OLD = "ik_llama.cpp", "llama.cpp before 2025"


class Foreign(NamedTuple):
    """A type of another program: its name there, the program, the format of its weights, and its layout in a file.

    rows: rows that lie together. head: bytes of a row before its blocks; those of all rows that lie together come
    first. weights, size: weights of a block, and its bytes in each row.
    """

    name: str
    program: str
    format: Format
    weights: int
    size: int
    convert: Convert
    rows: int = 1
    head: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.program}"

    def broken_shape_rule(self, shape: tuple[int, ...]) -> str:
        """The rule that a shape (..., N, K) breaks."""
        if shape[-1] % self.weights:
            return f"row length {shape[-1]} is not a multiple of {self.weights} ({self.name})"
        if self.rows > 1 and (len(shape) < 2 or shape[-2] % self.rows):
            return f"shape {shape} has no multiple of {self.rows} rows, which {self.name} interleaves"
        return ""

    def group_bytes(self, k: int) -> int:
        """Bytes of rows of k weights that lie together."""
        return self.rows * (self.head + k // self.weights * self.size)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape in the file."""
        return prod(shape[:-1]) // self.rows * self.group_bytes(shape[-1])

    def blocks(self, raw: Bytes, k: int) -> Blocks:
        """Bytes [groups of rows, `group_bytes`] -> blocks of the format [rows, k / weights per block]; all cores."""
        blocks = np.empty((len(raw) * self.rows, k // self.format.weights), self.format.dtype)
        head = self.rows * self.head

        def work(part: slice) -> None:
            rows = slice(part.start * self.rows, part.stop * self.rows)
            blocks[rows] = self.convert(raw[part, :head], raw[part, head:])

        for_slices(len(raw), max(1, CHUNK // (self.rows * k)), work)
        return blocks


def _scales(heads: Bytes, dtype: str, rows: int) -> NDArray[np.generic]:
    """Heads [groups, rows * size] that begin with a scale -> scales [groups * rows]."""
    size = heads.shape[1] // rows
    each_row = np.ascontiguousarray(heads).reshape(-1, size)[:, : np.dtype(dtype).itemsize]
    return np.ascontiguousarray(each_row).view(dtype)[:, 0]


def _row_scale(fmt: Format) -> Foreign:
    """A type with a scale before the blocks of a row; the format's blocks have it as their first field."""
    d = fmt.dtype["d"]

    def convert(heads: Bytes, raw: Bytes) -> Blocks:
        size = fmt.block_bytes - d.itemsize
        blocks = np.empty((len(raw), raw.shape[1] // size), fmt.dtype)
        blocks["d"] = _scales(heads, d.str, 1)[:, None]
        bytes_of_blocks = blocks.view(np.uint8).reshape(*blocks.shape, -1)
        bytes_of_blocks[..., d.itemsize :] = raw.reshape(*blocks.shape, size)
        return blocks

    return Foreign(fmt.name.upper(), IK, fmt, fmt.weights, fmt.block_bytes - d.itemsize, convert, head=d.itemsize)


def _interleaved(number: int) -> Foreign:
    name, layout = interleaved.TYPES[number]
    fmt = FORMATS[name]
    scaled_rows = "d" in (fmt.dtype.names or ()) and layout.finish is None and "d" not in layout.fields
    head = fmt.dtype["d"].itemsize if scaled_rows else 0

    def convert(heads: Bytes, raw: Bytes) -> Blocks:
        blocks = layout.blocks(fmt, raw)
        if head:
            blocks["d"] = _scales(heads, fmt.dtype["d"].str, layout.rows)[:, None]
        return blocks

    title = OLD_NAMES.get(number, f"{name}_r{layout.rows}".upper())
    program = OLD if number in OLD_NAMES else IK
    return Foreign(title, program, fmt, fmt.weights, layout.size, convert, layout.rows, head)


OLD_NAMES = {
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


def _levels(
    name: str, group: int, weights: int, layout: Interleaved, convert: Callable[[Bytes, Floats], Blocks], scale: str
) -> Foreign:
    """A type of levels that only bytes express, with a scale of each row."""

    def with_scales(heads: Bytes, raw: Bytes) -> Blocks:
        return convert(raw, _scales(heads, scale, layout.rows).astype(np.float32))

    head = np.dtype(scale).itemsize
    return Foreign(name, IK, i8_format(group), weights, layout.size, with_scales, layout.rows, head)


def _q8_k(name: str, layout: Interleaved) -> Foreign:
    convert = partial(interleaved.q8_k, layout)
    return Foreign(name, IK, i8_format(32), 256, layout.size, lambda _, raw: convert(raw), layout.rows)


def _numbers(heads: Bytes, raw: Bytes) -> Blocks:
    return interleaved.bf16_r16(raw)


TYPES: dict[int, Foreign] = {
    **{number: _row_scale(fmt) for number, fmt in ik.TYPES.items() if fmt.ggml_type is None},
    **{number: _interleaved(number) for number in interleaved.TYPES},
    219: _levels("IQ1_S_R4", 32, 32, interleaved.IQ1_S_R4, interleaved.iq1_s_r4, "<f2"),
    229: _levels("IQ1_M_R4", 16, 32, interleaved.IQ1_M_R4, interleaved.iq1_m_r4, "<f2"),
    230: Foreign("BF16_R16", IK, FORMATS["bf16"], 2, 4, _numbers, 16),
    397: _q8_k("Q8_K_R16", interleaved.Q8_K_R16),
    398: _levels("Q8_KV_R8", 32, 32, interleaved.Q8_KV_R8, interleaved.q8_kv, "<f4"),
    399: _q8_k("Q8_K_R8", interleaved.Q8_K_R8),
}


class Rival(NamedTuple):
    """Blocks of another size under the number of a type: their name, the program that writes them, and their size.

    tail: bytes after the last block of a tensor.
    """

    name: str
    program: str
    weights: int
    size: int
    tail: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.program}"

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape."""
        return prod(shape) // self.weights * self.size + self.tail


RIVALS: dict[int, tuple[Rival, ...]] = {
    36: (Rival("I2_S", "BitNet and ik_llama.cpp", 4, 1, 32),),
    42: (Rival("STQ1_0", "Tencent's Hy-MT", 256, 42), Rival("Q2_0", "PrismML's llama.cpp", 128, 34)),
}
