"""Memory that a GPU needs while weights are packed there: their tiles, and two staging buffers of a fixed size.

CuPy is NumPy with a count of the allocated bytes, and the kernel is the rule of the tiles in NumPy.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from functools import partial

import cupy_like
import numpy as np
import pytest
from helpers import bytes_as_blocks

import qgemm
from qgemm import cuda
from qgemm.cuda import libraries, upload
from qgemm.cuda.layout import tile as tiles

ROWS, BLOCKS = 700, 9
NAMES = ("q4_0", "q4_k", "q6_k", "f16")
each_format = pytest.mark.parametrize("name", NAMES)


class Counted:
    """The bytes of arrays that exist, and the most that existed at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def empty(self, shape, dtype=float):
        array = cupy_like.ndarray(shape, dtype)
        self.change(array.nbytes)
        weakref.finalize(array._host if array._host.base is None else array._host.base, self.change, -array.nbytes)
        return array

    def change(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    monkeypatch.setattr(libraries, "LIBRARIES", {})
    cupy_like.install(monkeypatch)
    count, library = Counted(), libraries.default_library()
    counting = dataclasses.replace(library, new=lambda shape, dtype, device: partial(count.empty, shape, dtype))
    monkeypatch.setitem(libraries.LIBRARIES, cupy_like.ndarray, counting)

    class Pack:
        @staticmethod
        def load(fmt):
            def kernel(grid, threads, arguments, stream):
                source, target, row_absmax, rows, blocks_per_row, _ = arguments
                size = int(rows * blocks_per_row) * fmt.block_bytes
                blocks = np.frombuffer(ctypes.string_at(source, size), fmt.dtype).reshape(rows, blocks_per_row)
                for pointer, values in (target, tiles.pack(fmt, blocks)), (row_absmax, tiles.row_absmax(fmt, blocks)):
                    ctypes.memmove(pointer, values.tobytes(), values.nbytes)
                assert (source % upload.CHUNK, stream) == (0, 7)

            return kernel

    monkeypatch.setattr(upload, "PACK", Pack)
    return count


def device_bytes_of(fmt, blocks) -> bytes:
    """The bytes that a GPU holds for a matrix."""
    if fmt.plain:
        return blocks.tobytes()
    bounds = tiles.row_absmax(fmt, blocks)
    return tiles.pack(fmt, blocks).tobytes() + bounds.tobytes() + bytes(-len(bounds) % tiles.ROWS * 4)


@each_format
def test_blocks_are_packed_through_two_stages_of_a_fixed_size(counted, monkeypatch, name):
    """More chunks than stages, and a last one that is not whole; no array but the stages is allocated."""
    fmt = qgemm.FORMATS[name]
    blocks = bytes_as_blocks(fmt, (ROWS, BLOCKS), np.random.default_rng(0))
    monkeypatch.setattr(upload, "STAGING_BYTES", staging := 128 * BLOCKS * fmt.block_bytes)
    expected = device_bytes_of(fmt, blocks)
    memory = cupy_like.ndarray(len(expected), np.uint8)
    upload.upload_into(fmt, blocks, memory, libraries.default_library(), 0)
    assert memory.get().tobytes() == expected
    assert 0 < counted.most <= 2 * (staging + 16)
    assert counted.now == 0


@each_format
def test_experts_are_packed_one_by_one(counted, name):
    """From the host, and from bytes that are on the GPU already, of a size that aligns no second expert."""
    fmt, shape = qgemm.FORMATS[name], (3, 67, BLOCKS * qgemm.FORMATS[name].weights)
    blocks = bytes_as_blocks(fmt, (3, 67, BLOCKS), np.random.default_rng(1))
    expected = b"".join(device_bytes_of(fmt, expert) for expert in blocks)
    memory = cupy_like.ndarray(len(expected), np.uint8)
    upload.upload_into(fmt, blocks, memory, libraries.default_library(), 0)
    assert memory.get().tobytes() == expected
    assert counted.most <= 2 * (blocks[0].nbytes + 16)
    if fmt.plain:
        return  # a GPU reads the file's numbers as they are
    raw = cupy_like.asarray(blocks.view(np.uint8).reshape(3, 67, -1))
    memory.fill(1)
    upload.pack_into(fmt, raw, shape, memory, libraries.default_library(), 0)
    assert memory.get().tobytes() == expected


def test_a_matrix_on_the_gpu_is_packed_into_other_memory(counted):
    fmt = qgemm.FORMATS["q4_k"]
    blocks = bytes_as_blocks(fmt, (ROWS, BLOCKS), np.random.default_rng(2))
    expected = device_bytes_of(fmt, blocks)
    raw, memory = cupy_like.asarray(blocks.view(np.uint8).reshape(ROWS, -1)), cupy_like.ndarray(len(expected), np.uint8)
    upload.pack_into(fmt, raw, (ROWS, BLOCKS * fmt.weights), memory, libraries.default_library(), 0)
    assert memory.get().tobytes() == expected
    assert counted.most == 0


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "f16"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("axes", [(67,), (3, 67)], ids=str)
def test_bytes_on_the_gpu_become_weights_there(counted, monkeypatch, name, axes, flat):
    """By Tensor.from_bytes: into new memory, but for numbers, which stay."""
    fmt = qgemm.FORMATS[name]
    monkeypatch.setattr(cuda, "require", lambda who: None)
    blocks = bytes_as_blocks(fmt, (*axes, BLOCKS), np.random.default_rng(3))
    raw, shape = cupy_like.asarray(blocks.view(np.uint8).reshape(*axes, -1)), (*axes, BLOCKS * fmt.weights)
    w = qgemm.Tensor.from_bytes(raw.reshape(-1) if flat else raw, name, shape, "a")
    assert type(w) is (qgemm.DeviceTensor if len(axes) == 1 else qgemm.DeviceExperts)
    assert (w.format, w.shape, w.name) == (fmt, shape, "a")
    expected = b"".join(device_bytes_of(fmt, part) for part in blocks.reshape(-1, *blocks.shape[-2:]))
    assert ctypes.string_at(w.pointer, len(expected)) == expected
    assert (w.pointer == raw.data.ptr) is fmt.plain
