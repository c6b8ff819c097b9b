"""Tiles of codes that are digits to the base 3 (qgemm/codec/layouts/ternary.py): 64 columns of a row in 13 bytes.

A lane's 32 codes of a k_block are 16 pairs, pair i of register i % 4 of step i / 4: rows g (even i) and g + 8, columns
2t and 2t + 1, eight further from register 2 on. The two codes of a pair have the same digit of two bytes.

    qs  u32 of a lane  bytes 0 and 2: pairs 0 to 4; bytes 1 and 3: pairs 5 to 9
    qt  u16 of a lane  bytes 0 and 1: pairs 10 to 14
    qh  u16 of a quad  bytes 0 and 1: digit t is pair 15 of lane t
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.codec.layouts.ternary import to_bytes, to_digits
from qgemm.codec.packing import Bytes

WARPS, G, T = 4, 8, 4  # warps of 16 rows, quads of lanes, lanes of a quad
DIGITS = 5  # in a byte of a lane
OWN = 15  # pairs of a lane in bytes of its own
LANE_FIELDS = [("qs", "<u4", (WARPS, G * T)), ("qt", "<u2", (WARPS, G * T)), ("qh", "<u2", (WARPS, G))]


def pack(fmt: Format, blocks: Blocks, tiles: NDArray[Any]) -> None:
    """Blocks [row_blocks * 64, tiles along K] -> the k_blocks of tiles [row_blocks, tiles along K]."""
    assert fmt.tile.digits is not None
    row_blocks, along = tiles.shape
    codes = fmt.tile.digits.unpack(blocks.reshape(-1))
    #                     row_block   warp   r  g  tile  k_block step h t e
    split = codes.reshape(row_blocks, WARPS, 2, G, along, -1, 4, 2, T, 2)
    #                       row_block tile k_block warp g t | step h r | e
    pairs = split.transpose(0, 4, 5, 1, 3, 8, 6, 7, 2, 9).reshape(row_blocks, along, -1, WARPS, G, T, OWN + 1, 2)
    own = to_bytes(pairs[..., :OWN, :].reshape(*pairs.shape[:-2], -1, DIGITS, 2))  # [..., t, byte of three, e]
    k_blocks, shape = tiles["k_blocks"], (row_blocks, along, -1, WARPS, G * T)
    k_blocks["qs"] = _words(own[..., :2, :].swapaxes(-1, -2), "<u4").reshape(shape)
    k_blocks["qt"] = _words(own[..., 2, :], "<u2").reshape(shape)
    k_blocks["qh"] = _words(to_bytes(pairs[..., OWN, :]), "<u2").reshape(row_blocks, along, -1, WARPS, G)


def unpack(fmt: Format, tiles: NDArray[Any], blocks: Blocks) -> None:
    """The inverse of `pack`; writes the codes of blocks and no other field."""
    assert fmt.tile.digits is not None
    (row_blocks, along), k_blocks = tiles.shape, tiles["k_blocks"]
    shape = row_blocks, along, -1, WARPS, G, T
    first = _bytes(k_blocks["qs"], 4).reshape(*shape, 2, 2).swapaxes(-1, -2)
    own = np.concatenate([first, _bytes(k_blocks["qt"], 2).reshape(*shape, 1, 2)], axis=-2)
    shared = to_digits(_bytes(k_blocks["qh"], 2).reshape(row_blocks, along, -1, WARPS, G, 2), T)  # [..., g, t, e]
    digits = to_digits(own, DIGITS).reshape(*own.shape[:-2], OWN, 2)
    pairs = np.concatenate([digits, shared[..., None, :]], axis=-2).reshape(*own.shape[:-2], 4, 2, 2, 2)
    #                       row_block warp r g tile k_block step h t e
    codes = pairs.transpose(0, 3, 8, 4, 1, 2, 6, 7, 5, 9).reshape(-1, fmt.weights)
    flat = blocks.reshape(-1)
    fmt.tile.digits.pack(codes, flat)
    blocks[...] = flat.reshape(blocks.shape)


def _words(numbers: Bytes, dtype: str) -> NDArray[Any]:
    """Bytes [..., bytes of a word] -> words [...]."""
    words = np.ascontiguousarray(numbers).reshape(*numbers.shape[:5], -1)
    return words.view(dtype)


def _bytes(words: NDArray[Any], size: int) -> Bytes:
    """Words [...] -> bytes [..., size]."""
    return np.ascontiguousarray(words)[..., None].view(np.uint8).reshape(*words.shape, size)
