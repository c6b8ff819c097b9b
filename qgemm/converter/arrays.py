"""Plain arrays of a checkpoint as Weights: of safetensors, .npy and .npz."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.npy import NpyArray
from qgemm.files.paths import shown, shown_path
from qgemm.files.safetensors import Entry, SafetensorsFile
from qgemm.formats import GGML_TYPES
from qgemm.tensor import Tensor

from .weight import Weight, of_tensor

Read = Callable[[int, int], NDArray[Any]]  # elements start to stop, in C order

EIGHT_BITS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # safetensors' name: that of ml_dtypes
SCALES = ("_scale", "_scale_inv", ".scale", "_scales")  # what a tensor is called that scales another of 8 bits
WIDER = {"BOOL": "I8", "U8": "I16", "U16": "I32", "U32": "I64"}  # GGUF has no unsigned types: one that holds them all


def of_safetensors(file: SafetensorsFile) -> dict[str, Weight]:
    """The tensors of a file, by name."""
    found = {}
    for name, entry in file.tensors.items():
        if entry.type in EIGHT_BITS:
            for suffix in SCALES:
                if name + suffix in file.tensors or name.removesuffix(".weight") + suffix in file.tensors:
                    raise CheckpointError(
                        f"{shown_path(file.path)}: tensor {shown(name)}: FP8 with scales of its own is not read"
                    )
            found[name] = _eight_bits(name, entry, partial(file.read, entry))
        else:
            found[name] = of_array(name, entry.type, entry.shape, partial(file.read, entry))
    return found


def of_npy(array: NpyArray) -> Weight:
    """A Weight of an array of a .npy or .npz file."""
    return of_array(*array)


def of_array(name: str, kind: str, shape: tuple[int, ...], read: Read) -> Weight:
    """A Weight of an array whose dtype safetensors calls `kind`; a number becomes a vector of one."""
    shape = shape or (1,)
    stored = WIDER.get(kind, kind)
    if stored not in GGMLQuantizationType.__members__:
        return Weight(name, shape, kind, prod(shape) * 8, 1)
    fmt = GGML_TYPES[GGMLQuantizationType[stored]]
    cast = partial(_cast, read, fmt)
    tensor = Tensor(fmt, shape, lambda: cast(0, prod(shape)).reshape(shape), name, cast)
    return of_tensor(tensor)


def _cast(read: Read, fmt: Format, start: int, stop: int) -> NDArray[Any]:
    found = read(start, stop)
    return found if found.dtype == fmt.dtype else found.astype(fmt.dtype)


def _eight_bits(name: str, entry: Entry, read: Read) -> Weight:
    """Float8: there is no such type in GGUF, but float16 holds all its numbers."""
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointError(f"tensor {shown(name)}: {entry.type} needs the package ml_dtypes") from None
    dtype = np.dtype(getattr(ml_dtypes, EIGHT_BITS[entry.type]))

    def values(start: int, stop: int) -> Floats:
        found: Floats = read(start, stop).view(dtype).astype(np.float32)
        return found

    return Weight(name, entry.shape or (1,), entry.type, entry.nbytes, 1, values=values)
