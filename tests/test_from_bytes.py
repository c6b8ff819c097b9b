"""Tensor.from_bytes: weights over the bytes of a .gguf file, in arrays of several libraries."""

from __future__ import annotations

import array
import re

import cupy_like
import numpy as np
import pytest
import torch_like
from helpers import bytes_as_blocks

import qgemm
from qgemm import cuda
from qgemm.formats import GGML_TYPES

FORMATS = [qgemm.FORMATS[name] for name in ("q4_0", "q4_k", "q6_k", "iq2_xs", "f16", "bf16", "f32", "u4_g128")]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def bytes_of(fmt, *axes):
    """Bytes [*axes, bytes of a row] of random blocks, and the shape of their weights."""
    blocks = bytes_as_blocks(fmt, (*axes, 3), np.random.default_rng(0))
    return blocks.copy().view(np.uint8).reshape(*axes, -1), (*axes, 3 * fmt.weights)


@each_format
@pytest.mark.parametrize("axes", [(5,), (2, 5), (2, 3, 4), ()], ids=str)
def test_an_array_of_bytes_is_multiplied_in_place(fmt, axes):
    raw, shape = bytes_of(fmt, *axes)
    tensor = qgemm.Tensor.from_bytes(raw, fmt, shape, "a")
    assert (tensor.format, tensor.shape, tensor.name) == (fmt, shape, "a")
    assert tensor.blocks.ctypes.data == raw.ctypes.data
    assert tensor.blocks.tobytes() == raw.tobytes()
    assert raw.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tensor.blocks[...] = tensor.blocks
    flat = qgemm.Tensor.from_bytes(raw.reshape(-1), fmt.name.upper(), list(shape))
    assert flat.blocks.shape == tensor.blocks.shape
    assert flat.blocks.ctypes.data == raw.ctypes.data


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, lambda raw: array.array("B", raw)])
def test_a_buffer_is_an_array_of_bytes(convert):
    raw, shape = bytes_of(FORMATS[0], 5)
    tensor = qgemm.Tensor.from_bytes(convert(raw.tobytes()), "q4_0", shape)
    assert tensor.blocks.tobytes() == raw.tobytes()


def test_torch_shares_its_memory(monkeypatch):
    torch_like.install(monkeypatch)
    monkeypatch.setitem(torch_like.DTYPES, "uint8", torch_like.dtype("uint8"))
    raw, shape = bytes_of(FORMATS[1], 4)
    tensor = qgemm.Tensor.from_bytes(torch_like.Tensor(raw), "q4_k", shape)
    assert tensor.blocks.ctypes.data == raw.ctypes.data


def test_rows_apart_are_not_copied_and_bytes_apart_are():
    """Parts of a joined matrix, as q, k and v with padding, against every second byte."""
    raw, shape = bytes_of(FORMATS[0], 5)
    padded = np.zeros((9, 2 * raw.shape[1]), np.uint8)
    part = padded[2:7, : raw.shape[1]]
    part[...] = raw
    tensor = qgemm.Tensor.from_bytes(part, "q4_0", shape)
    assert np.shares_memory(tensor.blocks, padded)
    assert tensor.dequantize().tobytes() == qgemm.Tensor.from_bytes(raw, "q4_0", shape).dequantize().tobytes()
    doubled = np.repeat(raw, 2, axis=1)[:, ::2]
    assert qgemm.Tensor.from_bytes(doubled, "q4_0", shape).blocks.tobytes() == raw.tobytes()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 3, 32)], ids=str)
def test_weights_without_numbers(shape):
    raw = np.empty((*shape[:-1], shape[-1] // 32 * 18), np.uint8)
    tensor = qgemm.Tensor.from_bytes(raw, "q4_0", shape)
    assert (tensor.shape, tensor.nbytes) == (shape, 0)


def test_wrong_bytes_are_refused():
    raw, shape = bytes_of(FORMATS[0], 5)
    fitting = re.escape("weights (5, 96) of Q4_0 are bytes (5, 54) or (270,)")
    for wrong in (raw[:4], raw.T, raw[:, :53], raw[None], raw.reshape(-1)[:-1]):
        with pytest.raises(qgemm.ShapeError, match=f"bytes: {fitting}, got {re.escape(str(wrong.shape))}"):
            qgemm.Tensor.from_bytes(wrong, "q4_0", shape)
    with pytest.raises(qgemm.ShapeError, match=f"tensor blk: {fitting}"):
        qgemm.Tensor.from_bytes(raw[:4], "q4_0", shape, "blk")
    with pytest.raises(qgemm.ShapeError, match="row length 33 is not a multiple of 32"):
        qgemm.Tensor.from_bytes(raw, "q4_0", (5, 33))
    with pytest.raises(qgemm.ShapeError, match="at least one axis"):
        qgemm.Tensor.from_bytes(raw, "q4_0", ())
    for kind in (np.int8, np.float32):
        with pytest.raises(TypeError, match=f"bytes of packed weights are of uint8, got {np.dtype(kind)}"):
            qgemm.Tensor.from_bytes(raw.astype(kind), "q4_0", shape)
    with pytest.raises(qgemm.UnsupportedError, match="no format 'q4_00'"):
        qgemm.Tensor.from_bytes(raw, "q4_00", shape)


def test_types_without_tiles_are_refused_on_a_gpu(monkeypatch):
    cupy_like.install(monkeypatch)
    monkeypatch.setattr(cuda, "require", lambda who: None)
    fmt = next(fmt for fmt in GGML_TYPES.values() if not fmt.tiled and not fmt.plain)
    raw, shape = bytes_of(fmt, 4)
    with pytest.raises(qgemm.UnsupportedError, match=r"no device tile|no decoder"):
        qgemm.Tensor.from_bytes(cupy_like.asarray(raw), fmt, shape)
    with pytest.raises(qgemm.ShapeError, match="only a matrix"):
        qgemm.Tensor.from_bytes(cupy_like.zeros(18, np.uint8), "q4_0", (32,))
