"""Device tiles: the same bytes as the blocks, reordered so that a GPU lane reads its share contiguously.

A tile holds 64 rows of one format and is contiguous; the tiles of a row_block of 64 rows lie along K. It is 64 weights
wide, or as wide as a block where that is more (256 for the K-quants). First come the codes, in k_blocks of 64 columns,
each of them contiguous so that one bulk copy fetches it, then the fields per block.

In a k_block a warp owns 16 rows, and a lane owns its operand of each 16 x 16 step of the tensor cores: rows g and g + 8
and columns 2t, 2t + 8, 2t + 1, 2t + 9 of each of four steps, with g = lane / 4 and t = lane % 4. These rules place
everything:

- Codes of b bits (a field with slots): byte j of a lane's b words holds column j of the list above. Its codes for rows
  g and g + 8 stand four bits apart (8-bit codes eight), with p = max(1, 4 / b) steps between them: code
  c = 2p * (step / p) + p * (row >= 8) + step % p stands at bit b * c, counted through the words. So one mask gives
  four codes of one row, and a shift by four the other row; 4-bit codes fill a word per step, 8-bit codes two. Some
  formats transform these words (`TileLayout.to_tile`): mxfp4 with its float codes, signed bytes, codes of five to seven
  bits, iq4_nl (iq4_values.cuh).
- Codes of K bits of a codebook are looked up several at a time. The first index joins the codes of row g in columns 2t
  and 2t + 1, the second those of row g + 8, then follow columns 2t + 8 and 2t + 9 of both rows; with K = 2 an index
  joins both rows: columns 2t, then columns 2t + 1. A word has as many indices as fit, from bit 0 on. For K = 3 and 5
  one index is left over: bits 30 and 31 of word b are its bits 2b and 2b + 1.
- A field per block (scale, minimum, sum): [warp][g][block of the tile][row g, row g + 8]. A field of several bytes (the
  scales of a K-quant) is cut into 16-bit words: [warp][g][block][word][row g, row g + 8].
- layout/grid.py has the tiles of points of a grid, layout/ternary.py those of digits to the base 3.

The tiles of a matrix are followed by bounds of the magnitude of the weights of each row, by which the prefill kernel
scales them into the range of half. Rows and blocks beyond the matrix are zero. Packing is lossless: unpacking returns
the blocks of the file, digits to the base 3 in their canonical form. `pack`, `unpack` and `row_absmax` are the
reference of kernels/pack/pack.cu and kernels/pack/unpack.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import LaneWords, as_bytes, pack_bit_planes, pack_slots, unpack_bit_planes, unpack_slots
from qgemm.errors import UnsupportedError

from . import grid, ternary

ROWS = 64  # rows of a tile
K_BLOCK = 64  # columns whose codes lie together
WARPS, LANES, STEPS = 4, 32, 4  # warps of 16 rows; lanes of a warp; 16-wide steps of a k_block
LOAD_WORDS = 4  # words of the widest load of a lane: 16 bytes
PANEL_BYTES = 256  # bytes of a row of blocks that a CTA packs at a time, if that is at least a tile
PACK_THREADS = 128
MIN_LARGEST_CODE = 128  # at least, so that rows of all formats of up to eight bits have the same exponents
BANKS = 128  # bytes of a row of shared memory, one word from every bank
MAX_TABLE = 64 << 10  # bytes of a table of levels

Tiles = NDArray[Any]


def columns(fmt: Format) -> int:
    """Weights of a row that a tile of a format holds: a k_block, or a block if that is more."""
    return max(K_BLOCK, fmt.weights)


def tiles_shape(fmt: Format, n: int, k: int) -> tuple[int, int, int]:
    """[row_blocks, tiles along K, bytes of a tile] of a matrix [N, K]."""
    return -(-n // ROWS), -(-k // columns(fmt)), tile_dtype(fmt).itemsize


def k_blocks(fmt: Format) -> int:
    """The k_blocks, of 64 columns each, of a tile of a format."""
    return columns(fmt) // K_BLOCK


def scales_once(fmt: Format) -> bool:
    """Whether the lanes of a quad decode scales for each other: where decoding costs more than a few instructions."""
    return fmt.tile.grid is not None or any(
        fmt.dtype[name].base.kind == "u"
        for name in fmt.dtype.names or ()
        if name not in fmt.code_fields and name not in fmt.tile.number_bytes
    )


def scale_factors(fmt: Format) -> int:
    """1: scales, minimums, zeros are float16; 2: a super-block's float16 times integers; 3: bfloat16; 0: else."""
    fields = [fmt.dtype[name] for name in fmt.dtype.names or () if name not in (*fmt.code_fields, fmt.zero_field)]
    if not fmt.needs_table and len(set(fields)) == 1 and fields[0] in (np.float16, np.uint16):
        return 1 if fields[0] == np.float16 else 3
    return 2 if fmt.weights > fmt.group and np.float16 in fields else 0


@cache
def tile_dtype(fmt: Format) -> np.dtype[Any]:
    """The dtype of one tile of a format: its k_blocks of codes, then its fields per block, in the order of the block.

    Codes of b bits become little-endian words [warp][b / chunk][lane][chunk], chunk = gcd(b, 4).
    """
    check_tiled(fmt)
    if fmt.tile.grid is not None:
        codes = np.dtype(grid.lane_fields(fmt.tile.grid))
        return np.dtype([("k_blocks", codes, (k_blocks(fmt),)), *grid.block_fields(fmt.tile.grid)])
    blocks = columns(fmt) // fmt.weights
    lanes: list[Any] = [(name, "<u4", _words(fmt, name)) for name in fmt.tile.slots]
    k_block = np.dtype(lanes if fmt.tile.digits is None else ternary.LANE_FIELDS)
    names = [name for name in fmt.dtype.names or () if name not in fmt.code_fields]
    units = ((name, *_units(fmt, name)) for name in names)
    per_block = [(name, unit, (WARPS, 8, blocks, *count, 2)) for name, unit, count in units]
    return np.dtype([("k_blocks", k_block, (k_blocks(fmt),)), *per_block])


def panel_tiles(fmt: Format) -> int:
    """Tiles that a CTA packs at a time."""
    return max(1, PANEL_BYTES * fmt.weights // (columns(fmt) * fmt.block_bytes))


def bits_of_codes(fmt: Format, name: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(base [4 * k_block + t], offset [4 * step + j]): the places of a field's codes in a row of a tile's blocks.

    Lane t's j-th code of a step of a k_block begins at bit base + offset, in the first of its planes. ValueError if the
    slots are too irregular for such a sum, or if it carries into another byte: the kernels that pack rely on both.
    """
    bits, field_offset = _bits(fmt, name), fmt.dtype.fields[name][1]  # type: ignore[index]
    block, weight = np.divmod(np.arange(columns(fmt)), fmt.weights)
    apart = bits // planes_of(fmt, name)
    begins = 8 * (block * fmt.block_bytes + field_offset) + apart * np.argsort(fmt.tile.slots[name])[weight]
    #                            k_block step h t e, j = (e, h)
    by_lane = begins.reshape(-1, STEPS, 2, 4, 2).transpose(0, 3, 1, 4, 2).reshape(4 * k_blocks(fmt), 4 * STEPS)
    base = by_lane.min(axis=1) - by_lane.min()
    offset = by_lane[0] - base[0]
    if (base[:, None] + offset != by_lane).any() or (base[:, None] % 8 + offset % 8 > 7).any():
        raise ValueError(f"{fmt}: the slots of {name} are not the same for every lane and k_block but for a shift")
    return base, offset


def planes_of(fmt: Format, name: str) -> int:
    """The number of bit planes of a field's codes in a block; 1 if the bits of a code lie together."""
    return _bits(fmt, name) if fmt.tile.bit_planes else 1


def check_tiled(fmt: Format) -> None:
    """UnsupportedError unless the format can be packed into tiles."""
    if not fmt.tiled:
        raise UnsupportedError(f"{fmt} has no device tile: it names no code slots")


def pack(fmt: Format, blocks: Blocks) -> Tiles:
    """Blocks [N, K / weights] -> tiles [ceil(N / 64), ceil(K / columns)]."""
    dtype = tile_dtype(fmt)
    per_tile = columns(fmt) // fmt.weights
    row_blocks, along = -(-blocks.shape[0] // ROWS), -(-blocks.shape[1] // per_tile)
    padded = np.zeros((row_blocks * ROWS, along * per_tile), fmt.dtype)
    padded[: blocks.shape[0], : blocks.shape[1]] = blocks
    tiles, codebook = np.empty((row_blocks, along), dtype), table(fmt)
    if fmt.tile.grid is not None:
        grid.pack(fmt, padded, tiles)
        return tiles
    coded: LaneWords = {}
    for name in fmt.dtype.names or ():
        field = padded[name]
        if name in fmt.tile.slots:
            bits, codes = _bits(fmt, name), _codes(fmt, name, field).reshape(row_blocks, ROWS, -1, K_BLOCK)
            to_words = _codes_to_words if codebook is None else partial(_codes_to_indices, pairs=codebook.pairs)
            coded[name] = to_words(codes, bits)
        elif name not in fmt.code_fields:
            unit, count = _units(fmt, name)
            #                                                row_block  warp  r  g  tile   block     word
            split = np.ascontiguousarray(field).view(unit).reshape(row_blocks, WARPS, 2, 8, along, per_tile, *count)
            tiles[name] = np.moveaxis(split, (4, 2), (1, -1))  # row_block tile warp g block word r
    if fmt.tile.digits is not None:
        ternary.pack(fmt, padded, tiles)
    coded = {name: coded[name] for name in fmt.tile.slots}  # the field of the lowest bits first
    for name, words in (coded if fmt.tile.to_tile is None else fmt.tile.to_tile(coded)).items():
        tiles["k_blocks"][name] = words.reshape(tiles["k_blocks"][name].shape)
    return tiles


def unpack(fmt: Format, tiles: Tiles, rows: int, columns: int) -> Blocks:
    """Tiles -> blocks [rows, columns / weights]; the inverse of `pack`."""
    row_blocks, along = tiles.shape
    per_tile = k_blocks(fmt) * K_BLOCK // fmt.weights
    if fmt.tile.grid is not None:
        return grid.unpack(fmt, tiles)[:rows, : fmt.blocks_in(columns)].copy()
    padded = np.empty((row_blocks * ROWS, along * per_tile), fmt.dtype)
    coded = {
        name: words.reshape(row_blocks, -1, *words.shape[3:])
        for name in fmt.tile.slots
        for words in [tiles["k_blocks"][name]]
    }
    coded, codebook = coded if fmt.tile.from_tile is None else fmt.tile.from_tile(coded), table(fmt)
    for name in fmt.dtype.names or ():
        if name in fmt.tile.slots:
            bits, words = _bits(fmt, name), coded[name]
            codes = _words_to_codes(words, bits) if codebook is None else _indices_to_codes(words, bits, codebook.pairs)
            padded[name] = _field(fmt, name, codes.reshape(-1, fmt.weights)).reshape(padded[name].shape)
        elif name not in fmt.code_fields:
            split = np.ascontiguousarray(np.moveaxis(tiles[name], (1, -1), (4, 2)))
            flat = split.reshape(*padded.shape, -1).view(fmt.dtype[name].base)
            padded[name] = flat.reshape(padded[name].shape)
    if fmt.tile.digits is not None:
        ternary.unpack(fmt, tiles, padded)
    return padded[:rows, : fmt.blocks_in(columns)].copy()


def row_absmax(fmt: Format, blocks: Blocks) -> NDArray[np.float32]:
    """Bounds of the magnitude of every finite weight in each row of blocks [N, K / weights] of a tiled format, [N].

    They also bound the products of super-block scales and levels where the integers of all groups are 0. A block whose
    bound is beyond float32 is left out: weights above 2^119, which no trained matrix has.
    """
    flat = blocks.reshape(-1)
    _, scale, minimum, _ = fmt.decode_levels(flat).zeros_as_minimums()  # as kernels decode them
    pairs = [(scale, minimum)]
    if scale_factors(fmt) == 2:
        d: Any = flat["d"] if fmt.scattered_scale is None else fmt.scattered_scale(flat)
        pairs.append((d, flat["dmin"] if "dmin" in (fmt.dtype.names or ()) else None if minimum is None else d))
    absmax = np.zeros(len(blocks), np.float32)
    for scale, minimum in pairs:
        assert scale is not None
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be any bit pattern
            bound = largest_code(fmt) * np.abs(scale.astype(np.float32))
            if minimum is not None:
                bound = bound + np.abs(minimum.astype(np.float32))
        by_row = np.where(np.isfinite(bound), bound, np.float32(0)).reshape(len(blocks), -1)
        absmax = np.maximum(absmax, by_row.max(axis=1, initial=0))
    return absmax


def largest_code(fmt: Format) -> np.float32:
    """A bound of the magnitudes that scales are multiplied by."""
    return np.float32(fmt.max_level if fmt.needs_table else max(MIN_LARGEST_CODE, fmt.max_level))


class Table(NamedTuple):
    """The table of a codebook's levels in shared memory, an entry for every index of two codes or, with K = 2, of four.

    bits: bits in an index. entry: bytes of an entry, two for a level. copies: an entry has this many side by side, so
    that a warp's lanes read from different banks; 16 lanes at a time if an entry has 8 bytes. With K = 5, where 32
    copies would not fit, two lanes share a copy.
    """

    bits: int
    entry: int
    copies: int

    @property
    def pairs(self) -> int:
        """Pairs of levels in an entry; each fills a register."""
        return self.entry // 4

    @property
    def nbytes(self) -> int:
        """Bytes of the table in shared memory."""
        return self.entry * self.copies << self.bits


def table(fmt: Format) -> Table | None:
    """The table of a format's levels; None if its codes are numbers themselves."""
    if fmt.codebook is None or not fmt.needs_table:
        return None
    bits = 2 * int(len(fmt.codebook) - 1).bit_length()
    bits, entry = (2 * bits, 8) if bits == 4 else (bits, 4)
    return Table(bits, entry, min(BANKS // entry, (MAX_TABLE // entry) >> bits))


def table_bytes(fmt: Format) -> int:
    """Shared memory of the table of a format's levels in a kernel; 0 without a table."""
    pairs = Table(8, 4, BANKS // 4) if fmt.tile.pair_lookup else table(fmt)
    shared = pairs if fmt.tile.grid is None else grid.table(fmt.tile.grid)
    return 0 if shared is None else shared.nbytes


def level_exponent(fmt: Format) -> int:
    """e such that the levels of a codebook, times 2^-e, are in the range of half; 0 if the levels already are."""
    exponent = int(np.frexp(largest_code(fmt))[1])
    return 0 if -3 < exponent <= 15 else exponent - 15 if exponent > 15 else max(exponent, -126)


def code_exponent(fmt: Format) -> int | None:
    """e such that levels times 2^-e lie in tiles or a codebook's table as halves; None where codes are integers."""
    return level_exponent(fmt) if fmt.needs_table else fmt.tile.code_exponent


def _bits(fmt: Format, name: str) -> int:
    return 8 * fmt.dtype[name].itemsize // fmt.weights


def _codes(fmt: Format, name: str, field: NDArray[Any]) -> NDArray[np.uint8]:
    """Field [...] of blocks -> codes [n, weights], their bits in this field."""
    bits = _bits(fmt, name)
    if fmt.tile.bit_planes:
        return unpack_bit_planes(field.reshape(-1, bits))
    slots = unpack_slots(as_bytes(field), bits).reshape(-1, fmt.weights)
    codes = np.empty_like(slots)
    codes[:, list(fmt.tile.slots[name])] = slots
    return codes


def _field(fmt: Format, name: str, codes: NDArray[np.uint8]) -> NDArray[Any]:
    """The inverse of `_codes`."""
    bits = _bits(fmt, name)
    if fmt.tile.bit_planes:
        return pack_bit_planes(codes, bits)
    return pack_slots(codes[:, list(fmt.tile.slots[name])], bits).view(fmt.dtype[name].base)


def _units(fmt: Format, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """What alternates between two rows in a field per block: the field, or 16-bit words of it and their number."""
    field = fmt.dtype[name]
    return (np.dtype("<u2"), (field.itemsize // 2,)) if field.shape else (field, ())


def _words(fmt: Format, name: str) -> tuple[int, ...]:
    bits = _bits(fmt, name)
    chunk = gcd(bits, LOAD_WORDS)
    return WARPS, bits // chunk, LANES, chunk


def _between(bits: int) -> int:
    """p, the steps whose codes stand between those of rows g and g + 8."""
    return max(1, 4 // bits)


def _codes_to_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [row_block, 64, k_block, 64] -> words [row_block, k_block, warp, bits / chunk, lane, chunk]."""
    row_blocks, _, along, _ = codes.shape
    p = _between(bits)
    #                     row_block  warp  r  g  k_block  step / p, step % p  h  t  e : row 16 warp + 8 r + g,
    split = codes.reshape(row_blocks, WARPS, 2, 8, along, STEPS // p, p, 2, 4, 2)  # column 16 step + 8 h + 2 t + e
    #                       row_block k_block warp g t | byte j = (e, h) | code c = (step / p, r, step % p)
    ordered = split.transpose(0, 4, 1, 3, 8, 9, 7, 5, 2, 6).reshape(row_blocks, along, WARPS, LANES, 4, 2 * STEPS)
    in_bytes = pack_slots(ordered, bits)  # [..., lane, byte j, word]
    words = np.ascontiguousarray(in_bytes.swapaxes(-1, -2)).view("<u4")  # [..., lane, word, 1]
    chunk = min(bits, LOAD_WORDS)
    return words.reshape(row_blocks, along, WARPS, LANES, bits // chunk, chunk).swapaxes(3, 4)


def _words_to_codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """The inverse of `_codes_to_words`."""
    row_blocks, along = words.shape[:2]
    in_order = np.ascontiguousarray(words.swapaxes(3, 4)).reshape(row_blocks, along, WARPS, LANES, bits, 1)
    in_bytes = in_order.view(np.uint8).swapaxes(-1, -2)  # [..., lane, byte j, word]
    p = _between(bits)
    codes = unpack_slots(np.ascontiguousarray(in_bytes), bits)
    #                      row_block  k_block   warp  g  t  e  h  step / p  r  step % p
    ordered = codes.reshape(row_blocks, along, WARPS, 8, 4, 2, 2, STEPS // p, 2, p)
    #                      row_block warp r  g  k_block step  h  t  e
    return ordered.transpose(0, 2, 8, 3, 1, 7, 9, 6, 4, 5).reshape(row_blocks, ROWS, along, K_BLOCK)


def _codes_to_indices(codes: NDArray[np.uint8], bits: int, pairs: int) -> NDArray[np.uint32]:
    """Codes of a codebook [row_block, 64, k_block, 64] -> words [row_block, k_block, warp, bits / chunk, lane, chunk].

    pairs: the registers whose codes are in an index.
    """
    row_blocks, _, along, _ = codes.shape
    #                     row_block  warp  r  g  k_block  step   h  t  e : row 16 warp + 8 r + g,
    split = codes.reshape(row_blocks, WARPS, 2, 8, along, STEPS, 2, 4, 2)  # column 16 step + 8 h + 2 t + e
    #                         row_block k_block warp g t | pair = (step, h, r) | e
    two = split.transpose(0, 4, 1, 3, 7, 5, 6, 2, 8).reshape(
        row_blocks, along, WARPS, LANES, 4 * STEPS // pairs, pairs, 2
    )
    ordered = two.swapaxes(-1, -2).reshape(*two.shape[:-2], 2 * pairs).astype(np.uint32)
    shifts = np.arange(0, 2 * pairs * bits, bits, dtype=np.uint32)
    indices = np.bitwise_or.reduce(ordered << shifts, axis=-1)
    words = np.zeros((*indices.shape[:-1], bits), np.uint32)
    for index, word, first_bit, shift, count in _index_bits(bits, pairs):
        words[..., word] |= (indices[..., index] >> np.uint32(shift) & np.uint32(2**count - 1)) << np.uint32(first_bit)
    chunk = gcd(bits, LOAD_WORDS)
    return words.reshape(row_blocks, along, WARPS, LANES, bits // chunk, chunk).swapaxes(3, 4)


def _indices_to_codes(words: NDArray[np.uint32], bits: int, pairs: int) -> NDArray[np.uint8]:
    """The inverse of `_codes_to_indices`."""
    row_blocks, along = words.shape[:2]
    in_order = words.swapaxes(3, 4).reshape(row_blocks, along, WARPS, LANES, bits)
    indices = np.zeros((*in_order.shape[:-1], 4 * STEPS // pairs), np.uint32)
    for index, word, first_bit, shift, count in _index_bits(bits, pairs):
        part = in_order[..., word] >> np.uint32(first_bit) & np.uint32(2**count - 1)
        indices[..., index] |= part << np.uint32(shift)
    shifts = np.arange(0, 2 * pairs * bits, bits, dtype=np.uint32)
    ordered = (indices[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    two = (
        ordered.reshape(*indices.shape, 2, pairs)
        .swapaxes(-1, -2)
        .reshape(row_blocks, along, WARPS, 8, 4, STEPS, 2, 2, 2)
    )
    #                    row_block warp r  g  k_block step  h  t  e
    return two.transpose(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(row_blocks, ROWS, along, K_BLOCK)


def _index_bits(bits: int, pairs: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The places of a lane's indices of codes: (index, word, bit of the word, bit of the index, number of bits)."""
    size = 2 * bits * pairs
    per_word = 32 // size
    for index in range(4 * STEPS // pairs):
        if index < per_word * bits:
            yield index, index // per_word, size * (index % per_word), 0, size
        else:
            yield from ((index, word, 30, 2 * word, 2) for word in range(bits))
