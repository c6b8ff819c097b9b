"""Activations on a device: x as contiguous rows that kernels read, and as blocks of codes for "a8" products."""

from __future__ import annotations

from typing import Any

import numpy as np

from qgemm.arguments import PreparedActivations
from qgemm.arrays import current_stream
from qgemm.codec.activations import FORMAT
from qgemm.codec.format import Blocks

from .kernels.activations import dequantize_launch, quantize_launch, round_launch
from .layout import tile as tiles
from .layout.activations import BLOCKS, DTYPE, ORDER
from .problem import C_TYPES, c_type


class DeviceActivations(PreparedActivations):
    """Activations [..., K] as blocks of codes on a GPU; made by `quantize_activations`.

    data: a CuPy array of bytes [tiles along K, rows, bytes of DTYPE]. like: an array of the library that asked, for
    the product's kind. dtype: float16 if that can hold the activations, as it held those they come from; else float32.
    """

    def __init__(self, shape: tuple[int, ...], data: Any, like: Any, dtype: np.dtype[Any]) -> None:
        self.shape, self.data, self.like = shape, data, like
        self.dtype = np.dtype(np.float16 if dtype == np.float16 else np.float32)

    def blocks(self) -> Blocks:
        """The blocks [rows, K / 32] on the host, byte for byte as the CPU quantizes: qgemm/codec/activations.py."""
        along, rows = self.data.shape[:2]
        tiles = self.data.get().reshape(-1).view(DTYPE).reshape(along, rows).T
        blocks = np.empty((rows, along, BLOCKS), FORMAT.dtype)
        codes = np.empty((*blocks.shape, FORMAT.weights), np.int8)
        codes[..., ORDER] = tiles["qs"]
        blocks["qs"], blocks["d"], blocks["s"] = codes, tiles["ds"][..., 0], tiles["ds"][..., 1]
        return blocks.reshape(rows, -1)[:, : FORMAT.blocks_in(self.shape[-1])]


def rows_of(x: Any, k: int) -> Any:
    """x [..., K] as contiguous rows [M, K] of a type that the kernels read; float64 becomes float32."""
    import cupy

    if x.dtype.name not in C_TYPES:
        x = x.astype(np.float32)
    return cupy.ascontiguousarray(x).reshape(x.size // k if k else 0, k)


def aligned(x: Any) -> Any:
    """x, copied if it is a view into an array that starts where kernels cannot read 16 bytes at a time."""
    return x.copy() if x.data.ptr % 16 else x


def quantized(x: Any, source: Any, data: Any = None) -> DeviceActivations:
    """CuPy array [..., K] -> its blocks, in `data` or in a new array; `source` gave x, and gets its kind of y."""
    import cupy

    k = x.shape[-1]
    FORMAT.blocks_in(k, "activations")
    x = aligned(rows_of(x, k))
    if data is None:
        data = cupy.empty((-(-k // tiles.K_BLOCK), len(x), DTYPE.itemsize), np.uint8)
    if data.size:
        launch = quantize_launch(x.data.device_id, c_type(x.dtype), k, len(x))
        launch(current_stream(), x.data.ptr, data.data.ptr)
    return DeviceActivations((*source.shape[:-1], k), data, source, x.dtype)


def rounded(x: Any) -> Any:
    """Rows of x [M, K] as their blocks decode: `dequantized` of `quantized`, in one pass."""
    import cupy

    rows, k = x.shape
    FORMAT.blocks_in(k, "activations")
    values = cupy.empty(x.shape, np.float16 if x.dtype == np.float16 else np.float32)
    if values.size:
        x = aligned(x)
        launch = round_launch(x.data.device_id, c_type(x.dtype), c_type(values.dtype), k, rows)
        launch(current_stream(), x.data.ptr, values.data.ptr)
    return values


def dequantized(x: DeviceActivations) -> Any:
    """d * q of the blocks, [rows, K] of x.dtype."""
    import cupy

    k, rows = x.shape[-1], x.data.shape[1]
    values = cupy.empty((rows, k), x.dtype)
    if values.size:
        launch = dequantize_launch(x.data.device.id, c_type(x.dtype), k, rows)
        launch(current_stream(), x.data.data.ptr, values.data.ptr)
    return values
