"""Device tiles: lossless both ways, no byte more than the blocks, and every code where the layout rules put it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FORMATS, TILED, each, raw_blocks

import qgemm
from qgemm import tiles


@each(TILED)
@given(data=st.data())
def test_unpack_gives_the_blocks_back(fmt, data):
    shape = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 7))
    raw = raw_blocks(data.draw, fmt, shape)
    packed = tiles.pack(fmt, raw)
    assert packed.shape == (-(-shape[0] // 64), -(-shape[1] // 2))
    assert tiles.unpack(fmt, packed, shape[0], shape[1] * fmt.weights).tobytes() == raw.tobytes()


@each(TILED)
def test_a_tile_is_as_large_as_its_blocks(fmt):
    """No padding inside a tile, and every field starts on 16 bytes, as bulk copies want."""
    dtype = tiles.tile_dtype(fmt)
    assert dtype.itemsize == tiles.ROWS * tiles.COLUMNS // fmt.weights * fmt.block_bytes
    assert all(offset % 16 == 0 for _, offset, *_ in dtype.fields.values())


@each(TILED)
def test_codes_lie_where_the_rules_say(fmt):
    """Straight from the module's text: byte j of lane (g, t) is column (2t, 2t + 8, 2t + 1, 2t + 9)[j] of a step."""
    rng = np.random.default_rng(1)
    raw = np.frombuffer(rng.bytes(64 * 2 * fmt.block_bytes), fmt.dtype).reshape(64, 2)
    tile = tiles.pack(fmt, raw)[0, 0]
    for name, order in fmt.slots.items():
        bits = 8 * fmt.dtype[name].itemsize // fmt.weights
        stream = np.unpackbits(np.ascontiguousarray(raw[name]).view(np.uint8), axis=-1, bitorder="little")
        slots = stream.reshape(64, 2, 32, bits) @ (1 << np.arange(bits))
        codes = np.empty((64, 64), np.int64)
        for block in range(2):
            for slot, weight in enumerate(order):
                codes[:, 32 * block + weight] = slots[:, block, slot]
        words = tile[name].transpose(0, 2, 1, 3).reshape(4, 32, bits)  # [warp][lane][word]
        for warp, lane, step, r, j in np.ndindex(4, 32, 4, 2, 4):
            g, t = divmod(lane, 4)
            bit = bits * (step + 4 * r if bits == 1 else 2 * step + r)
            byte = int(words[warp, lane, bit // 8]) >> 8 * j & 0xFF
            column = 16 * step + (2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)[j]
            assert byte >> bit % 8 & (1 << bits) - 1 == codes[16 * warp + 8 * r + g, column]


@each(TILED)
def test_fields_per_block_lie_where_the_rules_say(fmt):
    rng = np.random.default_rng(2)
    raw = np.frombuffer(rng.bytes(64 * 2 * fmt.block_bytes), fmt.dtype).reshape(64, 2)
    tile = tiles.pack(fmt, raw)[0, 0]
    for name in set(fmt.dtype.names) - set(fmt.slots):
        for warp, g, block, r in np.ndindex(4, 8, 2, 2):
            assert tile[name][warp, g, block, r].tobytes() == raw[name][16 * warp + 8 * r + g, block].tobytes()


@each([fmt for fmt in FORMATS if fmt.plain])
def test_plain_formats_have_no_tile(fmt):
    with pytest.raises(qgemm.UnsupportedError, match=f"{fmt} has no device tile"):
        tiles.tile_dtype(fmt)
