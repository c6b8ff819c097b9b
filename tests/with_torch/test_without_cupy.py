"""Weights on a GPU by torch alone, without a GPU: host tensors claim to lie on one, CuPy cannot be imported."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from contextlib import nullcontext
from functools import partial

import driver_like
import numpy as np
import pytest
from helpers import bytes_as_blocks
from torch_layers import torch

import qgemm
from qgemm import cuda
from qgemm.cuda import libraries, upload
from qgemm.cuda.call import products
from qgemm.cuda.call.arrays import Call
from qgemm.cuda.driver import workspace
from qgemm.cuda.kernels import transforms
from qgemm.cuda.layout import tile as tiles
from qgemm.torch import storage

FORMATS = [qgemm.FORMATS[name] for name in ("q4_0", "q6_k", "f16", "bf16")]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
STREAM = 7


class Kernel:
    """PACK and UNPACK by their rule in NumPy."""

    def __init__(self, packs: bool) -> None:
        self.packs = packs

    def load(self, fmt):
        def kernel(grid, threads, arguments, stream):
            source, target, *bounds, rows, count, along = arguments
            assert stream == STREAM
            shape = -(-int(rows) // tiles.ROWS), int(along)
            if self.packs:
                raw = ctypes.string_at(source, int(rows * count) * fmt.block_bytes)
                blocks = np.frombuffer(raw, fmt.dtype).reshape(int(rows), int(count))
                written = [(target, tiles.pack(fmt, blocks)), (bounds[0], tiles.row_absmax(fmt, blocks))]
            else:
                raw = ctypes.string_at(source, int(np.prod(shape)) * tiles.tile_dtype(fmt).itemsize)
                packed = np.frombuffer(raw, tiles.tile_dtype(fmt)).reshape(shape)
                written = [(target, tiles.unpack(fmt, packed, int(rows), int(count) * fmt.weights))]
            for pointer, values in written:
                ctypes.memmove(pointer, values.tobytes(), values.nbytes)

        return kernel


@pytest.fixture
def driver(monkeypatch):
    """CUDA's driver over host memory, and torch's functions but for devices and streams."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.Tensor, "__dlpack_device__", lambda tensor: (2, 0))
    monkeypatch.setattr(cuda, "require", lambda who: None)
    library = dataclasses.replace(
        libraries._torch(torch), device=lambda x: 0, stream={0: STREAM}.get, current_device=None,
        device_context=nullcontext, new=lambda shape, dtype, device: partial(torch.empty, shape, dtype=dtype),
        pinned=lambda size: np.empty(size, np.uint8),
    )  # fmt: skip
    monkeypatch.setattr(libraries, "LIBRARIES", dict.fromkeys((torch.Tensor, torch.nn.Parameter), library))
    for module in (upload, transforms):
        monkeypatch.setattr(module, "PACK", Kernel(True))
        monkeypatch.setattr(module, "UNPACK", Kernel(False))
    return driver_like.install(monkeypatch)


def random_weights(fmt, *axes):
    """Weights of random bytes, three blocks a row."""
    return qgemm.Tensor(fmt, (*axes, 3 * fmt.weights), bytes_as_blocks(fmt, (*axes, 3), np.random.default_rng(0)))


@each_format
@pytest.mark.parametrize("axes", [(67,), (3, 67)], ids=str)
def test_weights_lie_in_memory_of_torch(driver, fmt, axes):
    """By to_device and by from_bytes, and back to the host as they were."""
    w = random_weights(fmt, *axes)
    raw = torch.from_numpy(w.blocks.copy().view(np.uint8).reshape(*axes, -1))
    for packed in (w.to_device(), qgemm.Tensor.from_bytes(raw, fmt, w.shape)):
        assert isinstance(packed.data, torch.Tensor)
        assert packed.pointer == packed.data.data_ptr()
        assert packed.to_host().blocks.tobytes() == w.blocks.tobytes()
    assert driver.current == 0


@each_format
def test_a_weight_of_a_layer_has_its_bytes(driver, fmt):
    """The parameter over a DeviceTensor's memory is its tiles, followed by bounds."""
    w = random_weights(fmt, 67)
    packed = w.to_device()
    weight = storage.device_bytes(packed)
    assert (weight.data_ptr(), weight.dtype, weight.dim()) == (packed.pointer, torch.uint8, 1)
    assert weight.numel() == storage.device_size(fmt, w.shape)
    if not fmt.plain:
        bounds = weight[packed.data.numel() :].view(torch.float32).numpy()
        np.testing.assert_array_equal(bounds[:67], tiles.row_absmax(fmt, w.blocks))
        assert not bounds[67:].any()


@each_format
def test_rows_of_tiles_have_the_bytes_of_a_file(driver, fmt):
    """Slices of a parameter of tiles, as transformers takes them from its own layers, from any row on."""
    w = random_weights(fmt, 150)
    raw = torch.from_numpy(w.blocks.copy().view(np.uint8).reshape(150, -1))
    weight = torch.nn.Parameter(storage.device_bytes(w.to_device()), requires_grad=False)
    storage.keep(weight, w.to_device(), storage.spelled(fmt))
    assert type(weight).__name__ == "PackedParameter"
    for rows in (slice(0, 150), slice(0, 64), slice(3, 70), slice(130, 900), slice(5, 5), slice(None, None, 7)):
        assert torch.equal(weight[rows], raw[rows])
    assert weight[0].dim() == 0


def test_numbers_of_any_library_lie_on_the_device(driver):
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    array = cuda.BACKEND.array(values)
    assert torch.equal(array, torch.from_numpy(values))
    assert cuda.BACKEND.array(np.float32(0.5)).shape == ()


def test_bfloat16_needs_no_package_of_numpy(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x, library = torch.zeros(2, 64), libraries.library_for(torch.Tensor)
    call = Call(x, library, 0, STREAM, [0] * 3, [0] * 3, [1] * 3, True)
    for dtype in ("bfloat16", torch.bfloat16):
        y = products.target(call, None, (2, 8), dtype)
        assert (y.values.dtype, y.dtype, tuple(y.values.shape)) == (torch.bfloat16, "bfloat16", (2, 8))
    assert products.target(call, None, (2, 8), None).values.dtype is torch.float32


def test_a_workspace_is_zeroed_on_a_stream_of_its_own(driver):
    space = workspace._new(1, 1000)
    assert ctypes.string_at(space.pointer, 1000) == bytes(1000)
    assert driver.current == 1
    steps = ["cuThreadExchangeStreamCaptureMode", "cuStreamDestroy_v2"]
    assert [name for name in driver.calls if name in steps] == steps


def test_memory_that_libraries_keep_is_given_back_once(driver, monkeypatch):
    """The driver has no memory left at first."""
    statuses, emptied, allocate = [2, 0], [], driver.cuMemAlloc_v2
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    driver.cuMemAlloc_v2 = lambda *arguments: statuses.pop(0) or allocate(*arguments)
    assert cuda.devices.allocate(100) % 256 == 0
    assert emptied == [True]
    statuses[:] = [2, 2]
    with pytest.raises(RuntimeError, match="100 bytes cannot be allocated: CUDA driver error 2"):
        cuda.devices.allocate(100)


def test_scalars_and_addresses_of_a_kernel(driver):
    """As the driver finds them: 8 bytes of an address or a size, 4 of a factor."""
    seen = []

    def launched(function, *arguments):
        (*_, stream, table, extra), sizes = arguments, (8, 8, 4)
        values = [ctypes.string_at(address, size) for address, size in zip(table, sizes, strict=True)]
        seen.append((function.value, [size.value for size in arguments[:7]], stream.value, values, extra))
        return 0

    driver.cuLaunchKernel = launched
    function = cuda.devices.Function(b"cubin", "name", 1)
    assert (driver.current, driver.loaded) == (1, [(1, b"cubin", b"name")])
    function((3, 4), (32,), (1 << 40, np.int64(5), np.float32(0.5)), 9)
    values = [(1 << 40).to_bytes(8, "little"), (5).to_bytes(8, "little"), np.float32(0.5).tobytes()]
    assert seen == [(function.ptr, [3, 4, 1, 32, 1, 1, 0], 9, values, None)]
