"""Activations on a device as blocks of codes, for several products of any kind but "a16"."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from qgemm.arguments import Activation, PreparedActivations
from qgemm.arrays import as_cupy, current_stream, like, stream_of
from qgemm.codec.format import Blocks
from qgemm.codec.group_activations import FORMAT as GROUPED
from qgemm.codec.group_activations import GROUPS
from qgemm.codec.q8_1_f32 import FORMAT

from .kernels.activations import quantize_groups_launch, quantize_launch
from .layout import group_activations
from .layout.q8_1_k_blocks import BLOCKS, DTYPE, ORDER, nbytes
from .libraries import Library, cupy_library, library_of
from .problem import C_TYPES

ALIGNMENT = 16  # bytes of x that kernels read at a time


class DeviceActivations(PreparedActivations):
    """Activations [..., K] as blocks of codes on a GPU; made by `quantize_activations`.

    data: bytes, an array of the library of `like`, the array that was given: y becomes one too. Of "a8" they are tiles
    [tiles along K, rows, bytes of DTYPE], of groups those of layout/group_activations.py. library: how it is read
    without DLPack, None if it is not. activation: that which multiplies them.
    dtype: float16 if that can hold the activations, as it held those they come from; else float32.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        data: Any,
        like: Any,
        dtype: str,
        library: Library | None,
        activation: Activation = "a8",
    ) -> None:
        self.shape, self.data, self.like, self.library, self.activation = shape, data, like, library, activation
        self.dtype = np.dtype(np.float16 if dtype == "float16" else np.float32)
        self.pointer: int = (library or cupy_library()).pointer(data)

    def blocks(self) -> Blocks:
        """The blocks [rows, K / 32] on the host, byte for byte as the CPU quantizes."""
        rows, data = prod(self.shape[:-1]), (self.library or cupy_library()).host(self.data)
        if self.activation in GROUPS:
            return group_activations.blocks_of(data, rows, self.shape[-1], GROUPS[self.activation])
        tiles = data.view(DTYPE).reshape(-1, rows).T
        blocks = np.empty((*tiles.shape, BLOCKS), FORMAT.dtype)
        codes = np.empty((*blocks.shape, FORMAT.weights), np.int8)
        codes[..., ORDER] = tiles["qs"]
        blocks["qs"], blocks["d"], blocks["s"] = codes, tiles["ds"][..., 0], tiles["ds"][..., 1]
        return blocks.reshape(rows, -1)[:, : FORMAT.blocks_in(self.shape[-1])]


def quantized(x: Any, activation: Activation = "a8") -> DeviceActivations:
    """An array [..., K] on a CUDA device -> its blocks."""
    library = library_of(x)
    if library is not None and _as_it_is(x, library):
        values, kind, device = _readable(x, library), library.name(x.dtype), library.device(x)
        data = _blocks(library.pointer(values), kind, x.shape, library, device, library.stream(device), activation)
        return DeviceActivations(tuple(x.shape), data, x, kind, library, activation)
    with stream_of(x):
        found, by = as_cupy(x), cupy_library()
        kind = found.dtype.name if found.dtype.name in C_TYPES else "float32"
        values = _readable(found if found.dtype.name == kind else by.cast(found, kind), by)
        data = _blocks(values.data.ptr, kind, found.shape, by, values.data.device_id, current_stream(), activation)
        return DeviceActivations(found.shape, data if library is None else like(x, data), x, kind, library, activation)


def _readable(x: Any, library: Library) -> Any:
    """x, copied where kernels cannot read it: 16 bytes at a time, in C order."""
    return x if library.contiguous(x) and library.pointer(x) % ALIGNMENT == 0 else library.copy(x)


def _as_it_is(x: Any, library: Library) -> bool:
    """Whether kernels can be launched on x from here: its type is theirs, its device is the thread's."""
    current = library.current_device
    here = current is None or current() == library.device(x)
    return here and len(x.shape) > 0 and library.name(x.dtype) in C_TYPES


def _blocks(
    x: int, kind: str, shape: tuple[int, ...], library: Library, device: int, stream: int, activation: Activation
) -> Any:
    """Contiguous values at an address, as blocks in a new array of bytes."""
    m, k, group = prod(shape[:-1]), shape[-1], GROUPS.get(activation, 0)
    (GROUPED if group else FORMAT).blocks_in(k, "activations")
    data = library.scratch(group_activations.nbytes(m, k, group) if group else nbytes(m, k), device)()
    if m and k:
        kernel = C_TYPES[kind]
        made = (
            quantize_groups_launch(device, kernel, k, m, activation) if group else quantize_launch(device, kernel, k, m)
        )
        made(stream, x, library.pointer(data))
    return data
