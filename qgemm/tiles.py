"""Device tiles: the same bytes as the blocks, reordered so that a GPU lane reads its share in one piece.

A tile holds 64 rows x 64 weights of one format and is contiguous, so that one bulk copy fetches it; the tiles of a
strip of 64 rows lie along K. Inside, a warp owns 16 rows and a lane owns what it feeds to a 16 x 16 step of the
tensor cores: with g = lane / 4, t = lane % 4, rows g and g + 8 and columns 2t, 2t + 8, 2t + 1, 2t + 9 of each of
four steps. Two rules place everything:

- Codes of b bits (a field with slots): byte j of a lane's b words holds column j of the list above; in it, code
  c = 2 * step + (row >= 8) stands at bit b * c, counted through the words. So one mask gives four codes of one row,
  and a shift by b the other row; 4-bit codes fill a word per step, 8-bit codes two. Single bits share one word, with
  c = step + 4 * (row >= 8): one shift brings the fifth bits of both rows above their nibbles.
- A field per block (scale, minimum, sum): [warp][g][block of the tile][row g, row g + 8].

Rows and blocks beyond the matrix are zero. Packing is lossless: unpacking gives the blocks of the file back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import as_bytes, pack_slots, unpack_slots
from .block import Blocks, Format
from .errors import UnsupportedError

ROWS = 64  # rows of a tile
COLUMNS = 64  # weights of a row that a tile holds
WARPS, LANES, STEPS = 4, 32, 4  # warps of 16 rows; lanes of a warp; 16-wide steps along K
CHUNK = 4  # words that a lane reads at once: 16 bytes

Tiles = NDArray[Any]


def tile_dtype(fmt: Format) -> np.dtype[Any]:
    """The dtype of one tile of a format, fields in the order of the block's: codes first, then what is per block.

    Codes of b bits become little-endian words [warp][b / chunk][lane][chunk], chunk = min(b, 4).
    """
    check_tiled(fmt)
    blocks = COLUMNS // fmt.weights
    codes = [(name, "<u4", _words(fmt, name)) for name in fmt.slots]
    names = [name for name in fmt.dtype.names or () if name not in fmt.slots]
    per_block = [(name, fmt.dtype[name], (WARPS, 8, blocks, 2)) for name in names]
    return np.dtype([*codes, *per_block])


def check_tiled(fmt: Format) -> None:
    """UnsupportedError unless the format can be packed into tiles."""
    if not fmt.slots or COLUMNS % fmt.weights:
        raise UnsupportedError(f"{fmt} has no device tile: it names no code slots, or its block exceeds a tile")


def pack(fmt: Format, blocks: Blocks) -> Tiles:
    """Blocks [N, K / weights] -> tiles [ceil(N / 64), ceil(K / 64)]."""
    dtype = tile_dtype(fmt)
    per_tile = COLUMNS // fmt.weights
    strips, along = -(-blocks.shape[0] // ROWS), -(-blocks.shape[1] // per_tile)
    padded = np.zeros((strips * ROWS, along * per_tile), fmt.dtype)
    padded[: blocks.shape[0], : blocks.shape[1]] = blocks
    tiles = np.empty((strips, along), dtype)
    for name in dtype.names or ():
        field = padded[name]
        if name in fmt.slots:
            bits = _bits(fmt, name)
            slots = unpack_slots(as_bytes(field), bits)  # [rows, blocks, slots]
            codes = np.empty_like(slots)
            codes[..., list(fmt.slots[name])] = slots
            tiles[name] = _codes_to_words(codes.reshape(strips, ROWS, along, COLUMNS), bits)
        else:
            #                      strip  warp  r  g  tile  block  ->  strip tile warp g block r
            split = field.reshape(strips, WARPS, 2, 8, along, per_tile)
            tiles[name] = split.transpose(0, 4, 1, 3, 5, 2)
    return tiles


def unpack(fmt: Format, tiles: Tiles, rows: int, columns: int) -> Blocks:
    """Tiles -> blocks [rows, columns / weights]; the inverse of `pack`."""
    per_tile = COLUMNS // fmt.weights
    strips, along = tiles.shape
    padded = np.empty((strips * ROWS, along * per_tile), fmt.dtype)
    for name in tiles.dtype.names or ():
        if name in fmt.slots:
            bits = _bits(fmt, name)
            codes = _words_to_codes(tiles[name], bits).reshape(*padded.shape, fmt.weights)
            packed = pack_slots(codes[..., list(fmt.slots[name])], bits)
            padded[name] = packed.view(fmt.dtype[name].base).reshape(padded[name].shape)
        else:
            padded[name] = tiles[name].transpose(0, 2, 5, 3, 1, 4).reshape(padded.shape)
    return padded[:rows, : fmt.blocks_in(columns)].copy()


def _bits(fmt: Format, name: str) -> int:
    return 8 * fmt.dtype[name].itemsize // fmt.weights


def _words(fmt: Format, name: str) -> tuple[int, ...]:
    bits = _bits(fmt, name)
    chunk = min(bits, CHUNK)
    return WARPS, bits // chunk, LANES, chunk


def _codes_to_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [strip, 64, tile, 64] -> words [strip, tile, warp, bits / chunk, lane, chunk]."""
    strips, _, along, _ = codes.shape
    #                     strip  warp  r  g  tile  step  h  t  e : row 16 warp + 8 r + g, column 16 step + 8 h + 2 t + e
    split = codes.reshape(strips, WARPS, 2, 8, along, STEPS, 2, 4, 2)
    #                    strip tile warp g t | byte j = (e, h) | code c = (step, r), of single bits (r, step)
    code = (2, 5) if bits == 1 else (5, 2)
    ordered = split.transpose(0, 4, 1, 3, 7, 8, 6, *code).reshape(strips, along, WARPS, LANES, 4, 2 * STEPS)
    in_bytes = pack_slots(ordered, bits)  # [..., lane, byte j, word]
    words = np.ascontiguousarray(in_bytes.swapaxes(-1, -2)).view("<u4")  # [..., lane, word, 1]
    chunk = min(bits, CHUNK)
    return words.reshape(strips, along, WARPS, LANES, bits // chunk, chunk).swapaxes(3, 4)


def _words_to_codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """The inverse of `_codes_to_words`."""
    strips, along = words.shape[:2]
    in_order = np.ascontiguousarray(words.swapaxes(3, 4)).reshape(strips, along, WARPS, LANES, bits, 1)
    in_bytes = in_order.view(np.uint8).swapaxes(-1, -2)  # [..., lane, byte j, word]
    ordered = unpack_slots(np.ascontiguousarray(in_bytes), bits)
    #                       strip   tile   warp  g  t  e  h  step   r
    split = ordered.reshape(strips, along, WARPS, 8, 4, 2, 2, *((2, STEPS) if bits == 1 else (STEPS, 2)))
    r, step = (7, 8) if bits == 1 else (8, 7)
    #                    strip warp r  g  tile step h  t  e
    return split.transpose(0, 2, r, 3, 1, step, 6, 4, 5).reshape(strips, ROWS, along, COLUMNS)
