"""Tensor: a matrix on the host, packed in the blocks of one format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.float_types import DType
from qgemm.codec.format import Blocks, Format
from qgemm.codec.packing import Floats

from .arguments import Array
from .arrays import on_cuda
from .backend import backend
from .errors import ShapeError
from .formats import format_named
from .packed import Packed
from .sharding import ROWS, shares


class Tensor(Packed):
    """Weights [..., N, K] packed along K; immutable. x @ tensor.T is `qgemm.matmul(x, tensor)`.

    Comes from `qgemm.open(path)[name]` (blocks are then a view of the mapped file), `qgemm.quantize` or `from_bytes`.
    Indexing the leading axes gives Tensors that share the blocks: rows of an embedding, experts of a layer.
    """

    def __init__(
        self,
        format: Format | str,
        shape: tuple[int, ...],
        blocks: Blocks | Callable[[], Blocks],
        name: str = "",
        read: Callable[[int, int], Blocks] | None = None,
    ) -> None:
        """A tensor of a format and a shape in weights, from blocks [..., N, K / weights per block].

        `blocks` may be a function that is called at each access: the file reader checks its file there. `read` serves
        the method `read`; without it `blocks` is sliced.
        """
        self.format = format_named(format)
        self.shape = shape
        self.name = name
        self._blocks = blocks
        self.plans: dict[Any, Any] = {}  # launches of earlier calls, filled by a backend
        self.interleaved: NDArray[np.uint8] | None = None  # the copy of packed_for_cpu
        self.packs = False  # whether the first product on the CPU makes `interleaved`, as of a layer's weights
        self._read = read
        self._block_shape = (*shape[:-1], self.format.blocks_in(shape[-1], name and f"tensor {name}")) if shape else ()
        if not callable(blocks) and (blocks.shape != self._block_shape or blocks.dtype != self.format.dtype):
            raise ValueError(
                f"{self.format} of shape {shape} needs blocks {self._block_shape} of {self.format.dtype}, "
                f"got {blocks.shape} of {blocks.dtype}"
            )

    @classmethod
    def from_bytes(
        cls, bytes: Array | bytes | memoryview, format: Format | str, shape: Sequence[int], name: str = ""
    ) -> Any:
        """Weights [..., N, K] from their bytes in the layout of a .gguf file: rows of blocks, one after the other.

        bytes: uint8 [..., N, bytes of a row] or [all bytes], of NumPy, CuPy, torch or another library with DLPack, or
        any buffer of the host, such as `bytes`. format: a Format or the name of one, in any case. shape: in weights.

        On the host the result is a Tensor over the same memory, which must not change from then on; bytes are copied
        only where those of a row lie apart. From a CUDA array [N, K] becomes a DeviceTensor, [E, N, K] DeviceExperts,
        on the device of `bytes`, in memory of its library and on its current stream: tiles are new memory, so that
        `bytes` can be freed; matrices of plain formats (f32, f16, bf16) stay where they are.

        TypeError unless `bytes` are of uint8. ShapeError unless their number fits the shape and K is whole blocks.
        UnsupportedError for an unknown format, and on a GPU for a format without tiles.
        """
        fmt, shape = format_named(format), tuple(map(int, shape))
        who = f"tensor {name}" if name else "bytes"
        if not shape:
            raise ShapeError(f"{who}: weights have at least one axis, got shape ()")
        fitting = *shape[:-1], fmt.blocks_in(shape[-1], name and who) * fmt.block_bytes
        raw: Any = bytes if hasattr(bytes, "dtype") else np.frombuffer(bytes, np.uint8)
        if str(raw.dtype).removeprefix("torch.") != "uint8":
            raise TypeError(f"{who}: the bytes of packed weights are of uint8, got {raw.dtype}")
        if tuple(raw.shape) not in (fitting, (prod(fitting),)):
            size = prod(fitting)
            expected = f"weights {shape} of {fmt} are bytes {fitting} or ({size},)"
            raise ShapeError(f"{who}: {expected}, got {tuple(raw.shape)}")
        rows = raw if tuple(raw.shape) == fitting else raw.reshape(fitting)
        return backend("cuda" if on_cuda(raw) else "cpu").from_bytes(rows, fmt, shape, name)

    @property
    def blocks(self) -> Blocks:
        """The packed blocks [..., N, K / weights per block], a read-only structured view without a copy.

        The parts of a kbit tensor lie apart in a file: its blocks are put together at each access.
        """
        return self._blocks() if callable(self._blocks) else self._blocks

    @property
    def in_memory(self) -> bool:
        """Whether `blocks` is the same array at each access."""
        return not callable(self._blocks)

    def read(self, start: int, stop: int) -> Blocks:
        """Blocks start to stop of all, counted in C order, [stop - start].

        Blocks of a file are read into new memory, so that a caller can go through more than fits in memory: pages of a
        mapping, once read, count as memory of the process.
        """
        return self._read(start, stop) if self._read is not None else self.blocks.reshape(-1)[start:stop]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed blocks."""
        return prod(self._block_shape) * self.format.block_bytes

    @property
    def codebook(self) -> Floats | None:
        """The value of each code, float32 [codes], read-only; None where codes are numbers themselves."""
        return self.format.codebook

    def dequantize(self, dtype: DType = np.float32) -> NDArray[Any]:
        """The weights as a new array [..., N, K]: exact in float32, otherwise rounded once from it.

        dtype is float16, float32, float64 or "bfloat16" (which needs ml_dtypes). UnsupportedError if this format
        has no decoder.
        """
        values: NDArray[Any] = backend("cpu").dequantize(self, dtype)
        return values

    def rows(self, index: Any, dtype: DType = np.float32) -> NDArray[Any]:
        """Rows of a matrix by their index, decoded: a new array [*index.shape, K] of a dtype as of `dequantize`.

        index: integers, an array of NumPy or a value that converts to one. IndexError for an integer that is no row, as
        negative ones are, TypeError for other numbers, ShapeError unless this is a matrix. This is an embedding:
        nothing else of the matrix is read.
        """
        if self.ndim != 2:
            raise ShapeError(f"{self!r}: rows by an index are those of a matrix")
        numbers = np.asarray(index)
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"an index of rows is of integers, got {numbers.dtype}")
        flat = numbers.reshape(-1).astype(np.int64, copy=False)
        if flat.size and not 0 <= flat.min() <= flat.max() < len(self):
            raise IndexError(f"indices are {flat.min()} to {flat.max()}, {self!r} has rows 0 to {len(self) - 1}")
        values: NDArray[Any] = backend("cpu").rows(self, flat.reshape(numbers.shape), dtype)
        return values

    def to_device(self) -> Any:
        """Pack into device tiles on the current CUDA device; once per tensor, then multiply many times.

        A matrix gives a DeviceTensor, experts [E, N, K] give DeviceExperts, of the format in which a GPU holds these
        weights (`format.on_device`): the same but for types that only other programs write. UnsupportedError where
        CuPy or a GPU is missing, for a format without tiles, and for other shapes.
        """
        cuda, tensor = backend("cuda"), self.in_device_form()
        cuda.check_upload(tensor.format, self.shape, repr(self))  # before blocks are read, or put together of parts
        return cuda.upload(tensor, tensor.blocks)

    def packed_for_cpu(self) -> Tensor:
        """This matrix with a copy of its weights in the order of the CPU's vectors; once, then multiply many times.

        Products read the copy instead of the blocks, and layers of qgemm.torch make one by themselves. The copy,
        `interleaved`, takes memory beside the blocks: 1 to 1.3 times `nbytes`, nine bits a weight for types with a grid
        (iq1 to iq3). Without a use for a copy it is the Tensor itself: experts, floats, one scale for 64 weights or
        more, no compiled code.
        """
        packed: Tensor = backend("cpu").upload(self, self.blocks)
        return packed

    def with_interleaved(self, copy: NDArray[np.uint8]) -> Tensor:
        """These weights with an interleaved copy, made by the CPU's backend."""
        packed = Tensor(self.format, self.shape, self._blocks, self.name, self._read)
        packed.interleaved = copy
        return packed

    def in_device_form(self) -> Tensor:
        """These weights in the format in which a GPU holds them; blocks are converted at each access."""
        form = self.format.device
        if form is None:
            return self
        convert = form.convert

        def blocks() -> Blocks:
            return convert(self.blocks.reshape(-1)).reshape(*self.shape[:-1], -1)

        return Tensor(form.format, self.shape, blocks, self.name)

    def shares(self, world: int, axis: int, multiple: int | None = None) -> list[slice]:
        """The parts of an axis of [..., N, K], in weights, that the ranks of a group of `world` hold.

        axis: that of rows (-2: N, outputs of a product), cut in multiples of 64; of columns (-1: K, summed over by a
        product), in whole blocks; of experts (0 of three). multiple: the least piece instead, as the size of a head;
        along K, of whole blocks. Shares may be uneven. ShapeError if there are fewer pieces than ranks, with the number
        that would do.
        """
        axis = range(self.ndim)[axis]
        unit = self.format.weights if axis == self.ndim - 1 else ROWS if axis == self.ndim - 2 else 1
        step = unit if multiple is None else multiple
        if axis == self.ndim - 1 and step % unit:
            raise ShapeError(f"{self!r}: columns cut in multiples of {step} would cut blocks of {unit}")
        return shares(self.shape[axis], step, world, f"{self!r}: axis {axis}")

    def shard(self, rank: int, world: int, axis: int, multiple: int | None = None) -> Tensor:
        """The share of an axis that rank `rank` of `world` holds, cut as `shares` says: a view of these blocks.

        multiple: as of `shares`. Nothing is copied: of a mapped file each rank reads its own part. Columns, whose rows
        lie apart, are gathered once when they are packed for a device or multiplied.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: ranks are 0 to world - 1")
        axis = range(self.ndim)[axis]
        part = self.shares(world, axis, multiple)[rank]
        shape = (*self.shape[:axis], part.stop - part.start, *self.shape[axis + 1 :])
        if axis == self.ndim - 1:
            part = slice(part.start // self.format.weights, part.stop // self.format.weights)
        return Tensor(self.format, shape, self.blocks[(slice(None),) * axis + (part,)], self.name)

    def __getitem__(self, index: Any) -> Tensor:
        blocks = self.blocks
        leading = index if isinstance(index, tuple) else (index,)
        if len(leading) >= self.ndim or any(i is None or i is Ellipsis for i in leading):
            raise IndexError(f"{self}: only the {self.ndim - 1} leading axes can be indexed, rows stay whole")
        picked = blocks[leading]
        return Tensor(self.format, (*picked.shape[:-1], self.shape[-1]), picked, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied like any value; one of an open file as path, offset, and the file's size and time.

        What comes out opens the file again at first use, and raises GGUFError if that is not the same file.
        """
        return type(self), (self.format, self.shape, self._blocks, self.name, self._read)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<Tensor{name} {self.format} {' x '.join(map(str, self.shape))}>"
