"""Activations on a device as blocks of codes, for several products of any kind but "a16"."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from qgemm.arguments import Activation, PreparedActivations
from qgemm.arrays import check_floats
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import FORMAT as GROUPED
from qgemm.codec.group_activations import GROUP_COLUMNS
from qgemm.codec.q8_1_f32 import FORMAT

from .kernels.activations import quantize_groups_launch, quantize_launch
from .layout import group_activations
from .layout.q8_1_k_blocks import BLOCKS, DTYPE, ORDER, nbytes
from .libraries import Library, library_of, on_device_of
from .problem import C_TYPES

ALIGNMENT = 16  # bytes: kernels read x in pieces of this size


class DeviceActivations(PreparedActivations):
    """Activations [..., K] as blocks of codes on a GPU; made by `quantize_activations`.

    data: bytes, an array of `library`: for "a8" tiles [tiles along K, rows, bytes of DTYPE], for groups as in
    layout/group_activations.py. like: the caller's array, y becomes one of its library. activation: the one that
    multiplies them.
    dtype: float16 if the caller's array had that type, which then holds the activations too; else float32.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        data: Any,
        like: Any,
        dtype: str,
        library: Library,
        activation: Activation = "a8",
    ) -> None:
        self.shape, self.data, self.like, self.library, self.activation = shape, data, like, library, activation
        self.dtype = np.dtype(np.float16 if dtype == "float16" else np.float32)
        self.pointer: int = library.pointer(data)

    def blocks(self) -> Blocks:
        """The blocks [rows, K / 32] on the host, byte for byte as the CPU quantizes."""
        rows, data = prod(self.shape[:-1]), self.library.host(self.data)
        if self.activation in GROUP_COLUMNS:
            return group_activations.blocks_of(data, rows, self.shape[-1], GROUP_COLUMNS[self.activation])
        tiles = data.view(DTYPE).reshape(-1, rows).T
        blocks = np.empty((*tiles.shape, BLOCKS), FORMAT.dtype)
        codes = np.empty((*blocks.shape, FORMAT.weights), np.int8)
        codes[..., ORDER] = tiles["qs"]
        blocks["qs"], blocks["d"], blocks["s"] = codes, tiles["ds"][..., 0], tiles["ds"][..., 1]
        return blocks.reshape(rows, -1)[:, : FORMAT.blocks_in(self.shape[-1])]


def quantized(x: Any, activation: Activation = "a8") -> DeviceActivations:
    """An array [..., K] on a CUDA device -> its blocks."""
    library = library_of(x)
    if library is not None and _in_place(x, library):
        data = _blocks(x, library, activation)
        return DeviceActivations(tuple(x.shape), data, x, library.name(x.dtype), library, activation)
    with on_device_of(x) as (array, reader, _):
        check_floats(reader.name(array.dtype), array.shape)
        array = array if reader.name(array.dtype) in C_TYPES else reader.cast(array, "float32")
        data = _blocks(array, reader, activation)
        return DeviceActivations(tuple(array.shape), data, x, reader.name(array.dtype), reader, activation)


def _in_place(x: Any, library: Library) -> bool:
    """Whether kernels read x here, without a cast: its type is one of theirs, its device the thread's."""
    current = library.current_device
    here = current is None or current() == library.device(x)
    return here and len(x.shape) > 0 and library.name(x.dtype) in C_TYPES


def _blocks(x: Any, library: Library, activation: Activation) -> Any:
    """Values as blocks in a new array of bytes; x is copied where it is not aligned or not in C order."""
    m, k, group = prod(x.shape[:-1]), x.shape[-1], GROUP_COLUMNS.get(activation, 0)
    (GROUPED if group else FORMAT).blocks_in(k, "activations")
    if not library.contiguous(x) or library.pointer(x) % ALIGNMENT:
        x = library.copy(x)
    device, kind = library.device(x), C_TYPES[library.name(x.dtype)]
    data = library.scratch(group_activations.nbytes(m, k, group) if group else nbytes(m, k), device)()
    if m and k:
        quantize = quantize_groups_launch(device, kind, k, m, activation) if group else None
        launch = quantize or quantize_launch(device, kind, k, m)
        launch(library.stream(device), library.pointer(x), library.pointer(data))
    return data
