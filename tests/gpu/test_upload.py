"""Tiles made on the GPU, and weights decoded from them: the bytes and bits of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import bytes_as_blocks
from hypothesis import given
from hypothesis import strategies as st
from strategies import FORMATS, TILED, gpu_settings, over_formats, raw_blocks

import qgemm
from qgemm.cuda import upload as transfer
from qgemm.cuda.layout import tile as tiles
from qgemm.cuda.tensor import half_exponent


def assert_bounds(on_device, bounds):
    """row_absmax of all rows, then zeros up to the last row of a row_block, lie directly after the tiles."""
    assert on_device.row_absmax.get().tobytes() == bounds.tobytes() + bytes(-len(bounds) % 64 * 4)
    assert on_device.row_absmax.data.ptr == on_device.pointer + on_device.nbytes
    assert on_device.exponent == half_exponent(bounds.max())


@over_formats(TILED)
@gpu_settings
@given(data=st.data())
def test_pack_equals_numpy_byte_for_byte(fmt, data):
    """Random bytes, ragged rows and columns, several pieces a row_block; and back."""
    n, count = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 40))
    raw = raw_blocks(data.draw, fmt, (n, count))
    on_device = qgemm.Tensor(fmt, (n, count * fmt.weights), raw).to_device()
    assert on_device.data.get().tobytes() == tiles.pack(fmt, raw).tobytes()
    assert_bounds(on_device, tiles.row_absmax(fmt, raw))
    assert on_device.to_host().blocks.tobytes() == raw.tobytes()


@over_formats(TILED)
def test_packing_in_chunks_equals_packing_at_once(fmt, monkeypatch):
    """More chunks than stages, the last of them ragged; the memory of the stages holds bytes of earlier work."""
    rng = np.random.default_rng(17)
    raw = bytes_as_blocks(fmt, (500, 9), rng)
    monkeypatch.setattr(transfer, "STAGING_BYTES", 100 * 9 * fmt.block_bytes)
    for _ in range(3):
        on_device = qgemm.Tensor(fmt, (500, 9 * fmt.weights), raw).to_device()
        assert on_device.data.get().tobytes() == tiles.pack(fmt, raw).tobytes()
        assert_bounds(on_device, tiles.row_absmax(fmt, raw))
        assert on_device.to_host().blocks.tobytes() == raw.tobytes()


@over_formats(TILED)
def test_shards_are_packed_as_their_blocks(fmt, monkeypatch):
    """Columns of a matrix lie apart: they are gathered chunk by chunk."""
    rng = np.random.default_rng(23)
    raw = bytes_as_blocks(fmt, (500, 9), rng)
    monkeypatch.setattr(transfer, "STAGING_BYTES", 100 * 5 * fmt.block_bytes)
    w = qgemm.Tensor(fmt, (500, 9 * fmt.weights), raw)
    for axis in (0, 1):
        for shard in (w.shard(rank, 2, axis) for rank in range(2)):
            on_device = shard.to_device()
            assert on_device.data.get().tobytes() == tiles.pack(fmt, shard.blocks).tobytes()
            assert_bounds(on_device, tiles.row_absmax(fmt, shard.blocks))
            assert on_device.to_host().blocks.tobytes() == shard.blocks.tobytes()


def test_what_is_packed_need_not_be_contiguous():
    raw = np.frombuffer(np.random.default_rng(19).bytes(70 * 8 * 17), qgemm.FORMATS["mxfp4"].dtype).reshape(70, 8)
    view = raw[::2, 1::2]
    w = qgemm.Tensor("mxfp4", (35, 128), view).to_device()
    assert w.to_host().blocks.tobytes() == view.tobytes()


@over_formats([fmt for fmt in FORMATS if fmt.plain or fmt.tiled])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@gpu_settings
@given(data=st.data())
def test_decode_equals_numpy_bit_for_bit(fmt, dtype, data):
    """Raw bytes: every scale, NaN, infinity and subnormals included."""
    n, k = data.draw(st.integers(1, 140)), fmt.weights * data.draw(st.integers(1, 9))
    tensor = qgemm.Tensor(fmt, (n, k), raw_blocks(data.draw, fmt, (n, k // fmt.weights)))
    got = tensor.to_device().dequantize(dtype).get()
    want = tensor.dequantize(dtype)
    assert got.dtype == want.dtype
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(got.astype(np.float32)))
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])
