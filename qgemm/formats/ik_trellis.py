"""The trellis types of ik_llama.cpp, iq1_kt to iq4_kt: levels are sums of bytes of pseudorandom numbers.

An index, plus an offset, is the start x of a sequence: each weight multiplies x by FACTOR, modulo 2^32, and its level
is the sum of the four bytes of x & 0x3f3f3f3f, minus 126. Levels are near a normal distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks
from qgemm.codec.packing import unpack_planes, unpack_slots

from . import iq4_nl

FACTOR, OFFSET = np.uint32(0xCBAC1FED), np.uint32(4096)
SECOND = np.uint32(32768)  # added as well in groups of iq4_kt whose scale has bit 0
GROUPS = 8  # a super-block has 8 groups of 32 weights


def trellis(index: NDArray[Any], weights: int) -> NDArray[np.int8]:
    """Indices [...] of sequences -> levels [..., weights]."""
    x = index.astype(np.uint32) + OFFSET
    levels = np.empty((*x.shape, weights), np.int8)
    for i in range(weights):
        x = x * FACTOR
        numbers = x & np.uint32(0x3F3F3F3F)
        pairs = (numbers & np.uint32(0x00FF00FF)) + (numbers >> np.uint32(8) & np.uint32(0x00FF00FF))
        levels[..., i] = ((pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))).astype(np.int16) - np.int16(126)
    return levels


def iq1_kt(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """sh: sc's code in the low nibble, bits 4 to 7 the thirteenth bits of the four indices of a group.

    Byte j of ql: the low bits of index j; nibble i of byte j of qh: the next four bits of index 16 i + j.
    """
    index = blocks["ql"].astype(np.uint16)
    index |= np.concatenate([blocks["qh"] & np.uint8(15), blocks["qh"] >> np.uint8(4)], axis=1).astype(np.uint16) << 8
    highest = unpack_slots(blocks["sh"] >> np.uint8(4), 1).reshape(-1, GROUPS, 8)[:, :, :4]
    index |= highest.reshape(-1, 32).astype(np.uint16) << 12
    return trellis(index, 8).reshape(-1, 256), iq4_nl.VALUES[blocks["sh"] & np.uint8(15)]


def _of_halves(nibbles: NDArray[Any]) -> NDArray[Any]:
    """Bytes [n, 4] whose nibble i belongs to group 4 i + j -> [n, 8]."""
    return np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=1)


def iq2_kt(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """ql: an index of each eight weights."""
    return trellis(blocks["ql"], 8).reshape(-1, 256), iq4_nl.VALUES[_of_halves(blocks["scales"])]


def iq3_kt(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """ql: an index of each eight magnitudes; bit g of byte j of qh: the sign of weight j of group g."""
    size = np.abs(trellis(blocks["ql"], 8)).reshape(-1, 256)
    negative = unpack_planes(blocks["qh"], 1)
    return np.where(negative > 0, -size, size), _of_halves(blocks["scales"])


def iq4_kt(blocks: Blocks) -> tuple[NDArray[Any], NDArray[Any]]:
    """sh: bit 0 whether SECOND is added, bits 1 to 7 sc + 64, then the highest three bits of the indices of a group.

    Byte j of ql: the low bits of index j; nibble i of byte j of qh: the next four bits of index 32 i + j.
    """
    sh = blocks["sh"]
    index = blocks["ql"].astype(np.uint32)
    index |= np.concatenate([blocks["qh"] & np.uint8(15), blocks["qh"] >> np.uint8(4)], axis=1).astype(np.uint32) << 8
    highest = sh[:, :, None] >> np.arange(8, 32, 3, dtype=np.uint32) & np.uint32(7)
    index = index.reshape(-1, GROUPS, 8) | highest << np.uint32(12)
    index = index + (sh & np.uint32(1))[:, :, None] * SECOND
    return trellis(index, 4).reshape(-1, 256), (sh & np.uint32(255)).astype(np.int16) // 2 - 64


# number, name, fields after the scale of the row, decoder
TRELLIS: tuple[tuple[int, str, list[Any], Any], ...] = (
    (153, "iq2_kt", [("scales", "u1", 4), ("ql", "<u2", 32)], iq2_kt),
    (154, "iq3_kt", [("scales", "u1", 4), ("ql", "<u2", 32), ("qh", "u1", 32)], iq3_kt),
    (155, "iq4_kt", [("sh", "<u4", 8), ("ql", "u1", 64), ("qh", "u1", 32)], iq4_kt),
    (158, "iq1_kt", [("sh", "u1", 8), ("ql", "u1", 32), ("qh", "u1", 16)], iq1_kt),
)
