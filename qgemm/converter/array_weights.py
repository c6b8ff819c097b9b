"""Plain arrays of a checkpoint as Weights: of safetensors, .npy and .npz."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from qgemm.codec.format import Format
from qgemm.files.npy import NpyArray
from qgemm.files.safetensors import Entry, SafetensorsFile
from qgemm.formats import GGML_TYPES
from qgemm.tensor import Tensor

from .weight import Weight, original_shape, stored_shape, weight_from_tensor

Read = Callable[[int, int], NDArray[Any]]  # (start, stop) -> elements start to stop, in C order

WIDER = {"BOOL": "I8", "U8": "I16", "U16": "I32", "U32": "I64"}  # GGUF has no unsigned types: the next wider signed one


class Whole(NamedTuple):
    """A tensor in memory, with the interface of the file that it was read from."""

    path: str
    array: NDArray[Any]

    def read(self, entry: Entry, start: int, stop: int) -> NDArray[Any]:
        """Elements start to stop, as SafetensorsFile.read gives them."""
        return self.array[start:stop]


class Computed(NamedTuple):
    """A tensor that is computed as it is read, with the interface of a file."""

    path: str
    compute: Read

    def read(self, entry: Entry, start: int, stop: int) -> NDArray[Any]:
        """Elements start to stop, as SafetensorsFile.read gives them."""
        return self.compute(start, stop)


class Stored(NamedTuple):
    """A tensor of a safetensors file: the file and the tensor's header entry."""

    file: SafetensorsFile | Whole | Computed
    entry: Entry

    def columns(self, start: int, stop: int) -> NDArray[Any]:
        """Columns start to stop of a matrix, [rows, stop - start]."""
        rows, width = self.entry.shape
        if not isinstance(self.file, SafetensorsFile):
            return self.file.read(self.entry, 0, rows * width).reshape(rows, width)[:, start:stop]
        size = self.entry.dtype.itemsize
        raw = self.file.file.read_rows(self.entry.offset + start * size, width * size, rows, (stop - start) * size)
        return raw.reshape(-1).view(self.entry.dtype).reshape(rows, stop - start)

    def whole(self) -> Stored:
        """This tensor in memory, for callers that read its columns many times."""
        return Stored(Whole(self.file.path, self.file.read(self.entry, 0, prod(self.entry.shape))), self.entry)


def weight_from_stored(name: str, stored: Stored) -> Weight:
    """A Weight of a stored tensor."""
    return weight_from_array(name, stored.entry.type, stored.entry.shape, partial(stored.file.read, stored.entry))


def weight_from_npy(array: NpyArray) -> Weight:
    """A Weight of an array of a .npy or .npz file."""
    return weight_from_array(*array)


def weight_from_array(name: str, kind: str, shape: tuple[int, ...], read: Read) -> Weight:
    """A Weight of an array whose dtype safetensors calls `kind`; a number becomes a vector of one."""
    original, shape = original_shape(shape), stored_shape(shape or (1,))
    stored = WIDER.get(kind, kind)
    if stored not in GGMLQuantizationType.__members__:
        return Weight(name, shape, kind, prod(shape) * 8, 1, original=original)
    fmt = GGML_TYPES[GGMLQuantizationType[stored]]
    cast = partial(_cast, read, fmt)
    tensor = Tensor(fmt, shape, lambda: cast(0, prod(shape)).reshape(shape), name, cast)
    return weight_from_tensor(tensor, original)


def _cast(read: Read, fmt: Format, start: int, stop: int) -> NDArray[Any]:
    array = read(start, stop)
    return array if array.dtype == fmt.dtype else array.astype(fmt.dtype)
