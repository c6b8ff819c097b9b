"""Device tiles: lossless both ways, no byte more than the blocks, and every code where the layout rules put it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import bytes_as_blocks
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import CODEBOOKS, EVERY_INTEGER, EVERY_TILED, FORMATS, GRIDS, codebooks, over_formats, raw_blocks

import qgemm
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import unpack_bit_planes
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.tensor import check_tiled


@over_formats(EVERY_TILED)
@given(data=st.data())
def test_unpack_gives_the_blocks_back(fmt, data):
    shape = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 7))
    raw = raw_blocks(data.draw, fmt, shape)
    packed = tiles.pack(fmt, raw)
    assert packed.shape == (-(-shape[0] // 64), -(-shape[1] * fmt.weights // tiles.columns(fmt)))
    assert tiles.unpack(fmt, packed, shape[0], shape[1] * fmt.weights).tobytes() == raw.tobytes()


@over_formats([fmt for fmt in FORMATS if not fmt.plain])
def test_tensors_of_what_has_tiles_are_taken(fmt):
    """A format whose fields tiles can hold goes to a GPU; any other is refused there, by its name."""
    tensor = qgemm.Tensor(fmt, (1, fmt.weights), np.zeros((1, 1), fmt.dtype))
    if fmt in EVERY_TILED:
        check_tiled(tensor.format, repr(tensor))
    else:
        with pytest.raises(qgemm.UnsupportedError, match=f"{fmt} has no device tile"):
            check_tiled(tensor.format, repr(tensor))


@over_formats(EVERY_TILED)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bulk_copies_are_aligned(fmt, groups):
    """No padding inside a tile, and every part that one copy brings starts on 16 bytes and is a multiple of them."""
    dtype = tiles.tile_dtype(fmt)
    k_block = dtype["k_blocks"].base
    assert dtype.itemsize == tiles.ROWS * tiles.columns(fmt) // fmt.weights * fmt.block_bytes
    for struct in (k_block, dtype):
        for field, offset in struct.fields.values():
            assert offset % 16 == 0
            assert field.itemsize * groups // tiles.WARPS % 16 == 0


def one_tile(fmt, seed):
    """A tile's blocks [64, columns / weights], of random bytes."""
    count = tiles.columns(fmt) // fmt.weights
    return bytes_as_blocks(fmt, (64, count), np.random.default_rng(seed))


@over_formats([fmt for fmt in EVERY_INTEGER if fmt.tile.slots])
def test_codes_lie_where_the_rules_say(fmt):
    """Straight from the module's text: byte j of lane (g, t) is column (2t, 2t + 8, 2t + 1, 2t + 9)[j] of a step.

    Formats with to_tile are tested without it.
    """
    raw = one_tile(fmt, 1)
    k_blocks = tiles.pack(dataclasses.replace(fmt, tile=dataclasses.replace(fmt.tile, to_tile=None)), raw)["k_blocks"][
        0, 0
    ]
    for name, order in fmt.tile.slots.items():
        bits = 8 * fmt.dtype[name].itemsize // fmt.weights
        stream = np.unpackbits(np.ascontiguousarray(raw[name]).view(np.uint8), axis=-1, bitorder="little")
        slots = stream.reshape(*raw.shape, fmt.weights, bits) @ (1 << np.arange(bits))
        codes = np.empty_like(slots)
        codes[..., order] = slots
        codes = codes.reshape(64, len(k_blocks), 64)
        words = k_blocks[name].transpose(0, 1, 3, 2, 4).reshape(-1, 4, 32, bits)  # [k_block][warp][lane][word]
        p = max(1, 4 // bits)
        for k_block, warp, lane, step, r, j in np.ndindex(len(k_blocks), 4, 32, 4, 2, 4):
            g, t = divmod(lane, 4)
            bit = bits * (2 * p * (step // p) + p * r + step % p)
            byte = int(words[k_block, warp, lane, bit // 8]) >> 8 * j & 0xFF
            column = 16 * step + (2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)[j]
            assert byte >> bit % 8 & (1 << bits) - 1 == codes[16 * warp + 8 * r + g, k_block, column]


def test_words_of_mxfp4_are_halves():
    """As its docstring says: of a k_block's words, shifted and masked, every half is v / 2^15."""
    fmt = qgemm.FORMATS["mxfp4"]
    raw = one_tile(fmt, 4)
    w = tiles.pack(fmt, raw)["k_blocks"]["qs"][0, 0, 0, :, 0]  # [warp, lane, step]
    registers = np.stack([w << 9, w << 6, w << 2 ^ w >> 3, w ^ w >> 3], axis=-1) & np.uint32(0x8E008E00)
    halves = registers.view(np.float16).reshape(4, 8, 4, 4, 2, 2, 2)  # [warp, g, t, step, h, r, e]
    v = fmt.decode_levels(raw.reshape(-1)).codes.reshape(4, 2, 8, 4, 2, 4, 2)  # [warp, r, g, step, h, t, e]
    np.testing.assert_array_equal(halves.transpose(0, 5, 1, 3, 4, 2, 6), v / 2**15)


@over_formats([fmt for fmt in EVERY_TILED if fmt.tile.digits is not None])
def test_digits_lie_where_the_rules_say(fmt):
    """Byte and digit of every pair of codes, as the docstring of qgemm/cuda/layout/ternary.py says."""
    raw = one_tile(fmt, 7)
    k_blocks, codes = tiles.pack(fmt, raw)["k_blocks"][0, 0], fmt.tile.digits.unpack(raw.reshape(-1)).reshape(64, 4, 64)
    for k_block, warp, lane, step, far, r in np.ndindex(4, 4, 32, 4, 2, 2):
        (g, t), pair = divmod(lane, 4), 4 * step + 2 * far + r
        words = k_blocks[k_block]
        own = int(words["qs"][warp, lane]) | int(words["qt"][warp, lane]) << 32
        for e in range(2):
            digit = pair % 5 if pair < 15 else t
            byte = own >> 8 * ((0, 1, 4)[pair // 5] + (1 if pair // 5 == 2 else 2) * e) if pair < 15 else None
            byte = int(words["qh"][warp, g]) >> 8 * e if byte is None else byte
            decoded = ((byte & 255) * 3**digit & 255) * 3 >> 8
            assert decoded == codes[16 * warp + 8 * r + g, k_block, 16 * step + 8 * far + 2 * t + e]


@over_formats([fmt for fmt in EVERY_TILED if fmt.tile.digits is not None])
def test_bytes_that_are_no_number_decode_alike(fmt):
    """A tile gives the canonical ones back, of the same weights; an encoder writes no others."""
    raw = np.frombuffer(np.random.default_rng(8).bytes(130 * 2 * fmt.block_bytes), fmt.dtype).reshape(130, 2)
    back = tiles.unpack(fmt, tiles.pack(fmt, raw), 130, 2 * fmt.weights)
    assert back.tobytes() == fmt.tile.digits.canonical(raw).tobytes() != raw.tobytes()
    np.testing.assert_array_equal(fmt.dequantize(back), fmt.dequantize(raw))
    encoded = fmt.quantize(np.random.default_rng(9).standard_normal((4, fmt.weights)))
    assert fmt.tile.digits.canonical(encoded).tobytes() == encoded.tobytes()


@over_formats([fmt for fmt in EVERY_TILED if fmt.tile.to_tile is overlapping.to_tile])
def test_words_of_five_and_six_bits_overlap(fmt):
    """As the docstring of qgemm/codec/layouts/overlapping.py says: two codes in every byte, with the rest of a step."""
    raw = one_tile(fmt, 5)
    k_blocks = tiles.pack(fmt, raw)["k_blocks"][0, 0]  # fields [k_block][warp, 1, lane, word]
    low, rest = (k_blocks[name][:, :, 0] for name in fmt.tile.slots)
    bits = 4 + rest.shape[-1]
    codes = fmt.decode_levels(raw.reshape(-1)).codes.reshape(64, -1, 64)
    for k_block, warp, lane, step, j in np.ndindex(*low.shape, 4):
        g, t = divmod(lane, 4)
        w, f = int(low[k_block, warp, lane, step]), int(rest[k_block, warp, lane, step * (bits - 4) // 4])
        by = (2 * bits - 8) * step % 8
        f = (f >> by | f << 32 - by) & 0xFFFFFFFF
        actual = [(w ^ f) >> 8 * j & 2**bits - 1, (w >> 8 * j & 0xFF) >> 8 - bits]
        column = 16 * step + (2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)[j]
        assert actual == [codes[16 * warp + 8 * r + g, k_block, column] for r in range(2)]


@over_formats(CODEBOOKS)
def test_indices_lie_where_the_rules_say(fmt):
    """Codes that count levels: row, column and bit of each bit of a lane's words."""
    raw = one_tile(fmt, 3)
    codes = unpack_bit_planes(raw["planes"].reshape(64 * 2, -1)).reshape(64, 64)
    words = tiles.pack(fmt, raw)["k_blocks"]["planes"][0, 0, 0].transpose(0, 2, 1, 3).reshape(4, 32, -1)
    bits = len(fmt.codebook).bit_length() - 1
    rows_of_index = 2 if bits == 2 else 1
    size = 2 * bits * rows_of_index
    for warp, lane, step, far, r, e, b in np.ndindex(4, 32, 4, 2, 2, 2, bits):
        g, t = divmod(lane, 4)
        index, first = divmod(4 * step + 2 * far + r, rows_of_index)
        bit = bits * (rows_of_index * e + first) + b
        word, first_bit = divmod(index, 32 // size)
        word, first_bit = (word, size * first_bit + bit) if word < bits else (bit // 2, 30 + bit % 2)
        code = codes[16 * warp + 8 * r + g, 16 * step + 8 * far + 2 * t + e]
        assert words[warp, lane, word] >> first_bit & 1 == code >> b & 1


@over_formats(CODEBOOKS)
def test_tables_fit_and_their_copies_share_no_bank(fmt):
    """A row of copies is one word from every bank, or from every second where a table would be too large."""
    table = tiles.table(fmt)
    assert table.nbytes % 128 == 0
    assert table.nbytes <= tiles.MAX_TABLE
    assert table.entry * table.copies in (128, 64)
    assert 2**table.bits == len(fmt.codebook) ** (2 * table.pairs)


@over_formats(CODEBOOKS)
@given(data=st.data())
def test_levels_are_brought_into_the_range_of_half(fmt, data):
    """Any codebook: its largest level is finite and not lost."""
    own = fmt.variant(data.draw(codebooks(fmt)), None)
    largest = tiles.largest_code(own) * 2.0 ** -tiles.level_exponent(own)
    assert largest < 2**15
    assert largest >= 2.0**-24 or largest == 0
    assert -126 <= tiles.level_exponent(own) <= 127
    assert tiles.level_exponent(fmt) == 0


@over_formats(GRIDS)
def test_numbers_of_a_grid_lie_where_the_rules_say(fmt):
    """Straight from the text of qgemm/codec/layouts/grid.py: the index and the signs of every point of a tile."""
    raw, grid = one_tile(fmt, 6), fmt.tile.grid
    codes = fmt.decode_levels(raw.reshape(-1)).codes.reshape(64, 4, 4, 16 // grid.weights, grid.weights)
    k_blocks, owners = tiles.pack(fmt, raw)["k_blocks"][0, 0], 16 // grid.weights
    points, high = grid.points(), {"qh": grid.high - ("qt" in k_blocks.dtype.names), "qt": 1}
    for k_block, warp, g, owner, step, r in np.ndindex(4, 4, 8, owners, 4, 2):
        words, n = k_blocks[k_block], 2 * step + r
        index, shift = int(words["qs"][warp, owners * g + owner]) >> 8 * n & 255, 8
        for name in (name for name in high if name in words.dtype.names):
            index |= (int(words[name][warp, owners * g + owner]) >> high[name] * n & (1 << high[name]) - 1) << shift
            shift += high[name]
        expected = points[index].astype(int)
        for weight in range(grid.weights if grid.signs else 0):
            quarter, q, e = owner * grid.weights // 4 + weight // 4, weight % 4 // 2, weight % 2
            expected[weight] *= 1 - 2 * sign(words, warp, g, quarter, 16 * e + 8 * q + n)
        assert_array_equal(codes[16 * warp + 8 * r + g, k_block, step, owner], expected)


def sign(words, warp, g, quarter, bit):
    """A sign of a quad's quarter, the eighth of seven by the parity of the others."""
    if "signs" in words.dtype.names:
        return int(words["signs"][warp, 4 * g + quarter]) >> bit & 1
    half = 2 * g + quarter // 2
    second = int(words["s2"][warp, half]) | int(words["s1"][warp, half]) << 16
    if quarter % 2 == 0 or bit < 24:
        return (second if quarter % 2 else int(words["s4"][warp, half])) >> bit & 1
    others = [sign(words, warp, g, quarter - 1, bit % 8 + 8 * i) for i in range(4)]
    return sum(others + [second >> bit % 8 + 8 * i & 1 for i in range(3)]) % 2


@over_formats([fmt for fmt in EVERY_TILED if fmt.tile.slots])
def test_fields_per_block_lie_where_the_rules_say(fmt):
    raw = one_tile(fmt, 2)
    tile = tiles.pack(fmt, raw)[0, 0]
    for name in set(fmt.dtype.names) - set(fmt.code_fields):
        for warp, g, block, r in np.ndindex(4, 8, raw.shape[1], 2):
            got = tile[name][warp, g, block, ..., r]  # 16-bit words of a field of several bytes
            assert got.tobytes() == raw[name][16 * warp + 8 * r + g, block].tobytes()


def test_slots_without_order_are_refused():
    """Packing on the GPU shifts one lane's places to get another's."""
    fmt = qgemm.FORMATS["q8_0"]
    swapped = (1, 0, *range(2, 32))
    with pytest.raises(ValueError, match="Q8_0: the slots of qs"):
        tiles.bits_of_codes(dataclasses.replace(fmt, tile=dataclasses.replace(fmt.tile, slots={"qs": swapped})), "qs")


@over_formats([fmt for fmt in FORMATS if not fmt.tiled])
def test_formats_without_slots_have_no_tile(fmt):
    with pytest.raises(qgemm.UnsupportedError, match=f"{fmt} has no device tile"):
        tiles.tile_dtype(fmt)


@over_formats([fmt for fmt in EVERY_TILED if "d" in fmt.scale_fields])
def test_bounds_ignore_every_nan(fmt):
    """A scale of raw bytes may be a signalling NaN, of which arithmetic complains."""
    blocks = np.zeros((1, 3), fmt.dtype)
    blocks["d"] = np.array([0x3C00, 0x7E00, 0xFC46], np.uint16).view(np.float16)
    if "scales" in blocks.dtype.names:
        blocks["scales"] = 1
    assert tiles.row_absmax(fmt, blocks) == tiles.row_absmax(fmt, blocks[:, :1])
    assert 128 <= tiles.row_absmax(fmt, blocks)[0] < np.inf


@over_formats(EVERY_TILED)
@given(data=st.data())
def test_bounds_hold_for_every_finite_weight(fmt, data):
    """A minimum larger than all that its scale makes included, but not a weight whose bound is beyond float32."""
    raw = raw_blocks(data.draw, fmt, (data.draw(st.integers(1, 5)), 2))
    weights = np.abs(fmt.dequantize(raw))
    largest = np.where(weights < 2.0**119, weights, 0).max(axis=1)
    assert (largest <= tiles.row_absmax(fmt, raw)).all()
