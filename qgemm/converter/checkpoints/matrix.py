"""A matrix of codes in groups, from any quantization method: read as values, as codes, or as a Tensor.

    W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]),  g the group of column k

The product is computed in float32; rounded once to the checkpoint's own type it equals its library's result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import CHUNK, Blocks, Format, Levels
from qgemm.codec.packing import Bytes, Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path
from qgemm.formats.groups import group_format
from qgemm.formats.i8_levels import FAMILY as FLOAT_SCALES
from qgemm.formats.i8_levels import i8_format
from qgemm.locks import cached_property
from qgemm.packed import Packed
from qgemm.parallel import for_slices
from qgemm.tensor import Tensor
from qgemm.views import Reordered

from ..array_weights import Stored
from ..weight import GROUP, Codes, Groups, Weight

FLOATS = ("F16", "BF16", "F32")
BLOCKS = (256, 128, 64, 32)  # group sizes of formats with one group per block
ROW = 256  # block size of formats with one group per row
UNPACKED = 1 << 20  # elements of scales or zeros read at a time


class Rows(NamedTuple):
    """Rows of W: codes [n, K], scales [n, G] and zeros [n, G], integers or floats."""

    codes: Bytes
    scales: Floats
    zeros: NDArray[Any]


class Zeros(NamedTuple):
    """The least and greatest zero of a matrix, and whether all zeros are integers."""

    low: float
    high: float
    integer: bool = True


class GroupedMatrix(ABC):
    """One matrix [N, K]: a subclass checks its parts against each other and reads rows of it.

    bits: of a code. group: columns per scale. step: the fewest rows that can be read. label: its type, for tables.
    """

    name: str
    parts: Mapping[str, Stored]
    label: str
    method: str
    bits: int
    n: int
    k: int
    group: int
    step = 1
    order: NDArray[np.int32] | None = None  # the group of each column, None if k // group

    @abstractmethod
    def rows(self, start: int, stop: int) -> Rows:
        """Rows start to stop, multiples of `step`, in the order of W's columns."""

    @abstractmethod
    def zero_range(self) -> Zeros:
        """The range of the zeros."""

    @property
    @abstractmethod
    def scales(self) -> Stored:
        """The tensor that holds the scales."""

    @property
    def where(self) -> str:
        """The file, for messages."""
        return shown_path(next(iter(self.parts.values())).file.path)

    def refusal(self, rule: str) -> CheckpointError:
        """The error for this matrix."""
        return CheckpointError(f"{self.where}: {self.method} tensor {shown(self.name)}: {rule}")

    @cached_property
    def group_of(self) -> NDArray[np.int32]:
        """The group of each column, [K]."""
        return np.arange(self.k, dtype=np.int32) // np.int32(self.group) if self.order is None else self.order

    @cached_property
    def zeros(self) -> Zeros:
        """The range of the zeros, computed once."""
        return self.zero_range()

    # ------------------------------------------------------------ for the converter

    def values(self, start: int, stop: int) -> Floats:
        """Weights of whole rows, in float32."""
        rows = self.rows(start // self.k, stop // self.k)
        codes = rows.codes.astype(np.float32)
        codes -= rows.zeros.astype(np.float32)[:, self.group_of]
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be anything
            codes *= rows.scales[:, self.group_of]
        return codes.reshape(-1)

    def groups(self, start: int, stop: int) -> Groups:
        """Weights start to stop as groups of 32."""
        rows = self.rows(start // self.k, stop // self.k)
        group_of_32 = self.group_of[::GROUP]
        codes = rows.codes.reshape(-1, GROUP).astype(np.int16)
        return Groups(codes, rows.zeros[:, group_of_32].ravel().astype(np.int16), rows.scales[:, group_of_32].ravel())

    @cached_property
    def in_runs_of_32(self) -> bool:
        """Whether every 32 adjacent weights of a row share a group."""
        if self.k % GROUP:
            return False
        runs = self.group_of.reshape(-1, GROUP)
        return bool((runs == runs[:, :1]).all())

    def weight(self) -> Weight:
        """The matrix as a Weight."""
        highest, zeros = 2**self.bits - 1, self.zeros
        regular = self.in_runs_of_32 and zeros.integer
        codes = None
        if regular:
            shared = self.group if self.order is None else GROUP
            whole = self.group == self.k
            codes = Codes(0, highest, -int(zeros.high), highest - int(zeros.low), False, self.groups, shared, whole)
        return Weight(
            f"{self.name}.weight",
            (self.n, self.k),
            self.label,
            sum(stored.entry.nbytes for stored in self.parts.values()),
            self.step * self.k,
            values=self.values,
            codes=codes,
            quantized=True,
            irregular=not regular,
            native=self.native,
        )

    # ------------------------------------------------------------ as a Tensor

    def native(self) -> Packed:
        """The matrix in a group format, exactly; CheckpointError where none holds it."""
        columns = self.columns()
        fmt, read = self.format(), self.in_memory()
        blocks = np.empty((self.n, self.k // fmt.weights), fmt.dtype)

        def work(part: slice) -> None:
            first, last = part.start * self.step, min(part.stop * self.step, self.n)
            blocks[first:last] = read.blocks(fmt, first, last, columns)

        for_slices(-(-self.n // self.step), max(1, CHUNK // (self.k * self.step)), work)
        tensor = Tensor(fmt, (self.n, self.k), blocks, f"{self.name}.weight")
        return tensor if columns is None else Reordered(tensor, columns)

    def in_memory(self) -> GroupedMatrix:
        """This matrix, its parts in memory if rows would read them repeatedly."""
        return self

    def blocks(self, fmt: Format, first: int, last: int, columns: NDArray[np.int32] | None = None) -> Blocks:
        """Rows first to last, multiples of `step`, in a group format that has all their codes: [rows, K / weights].

        columns: an order of the columns in which groups are contiguous.
        """
        rows = self.rows(first, last)
        group_of = self.group_of if columns is None else np.arange(self.k) // self.group
        codes = rows.codes if columns is None else rows.codes[:, columns]
        scales, zeros = (values[:, group_of[:: fmt.weights]].reshape(-1, 1) for values in (rows.scales, rows.zeros))
        assert fmt.pack is not None
        if fmt.family == FLOAT_SCALES:  # bytes, with the zero subtracted
            codes, zeros = codes.reshape(-1, fmt.weights) - zeros.astype(np.int16), np.zeros_like(zeros)
        return fmt.pack(Levels(codes.reshape(-1, 1, fmt.weights), scales, zero=zeros)).reshape(last - first, -1)

    def columns(self) -> NDArray[np.int32] | None:
        """An order of W's columns in which groups are contiguous, None if they are already."""
        group_of, run = self.group_of, gcd(self.group, self.k)
        if (group_of.reshape(-1, run) == group_of[::run, None]).all():
            return None  # groups may be in any order: every block has its own scale
        sizes = np.bincount(np.arange(self.k) // self.group)  # the last group may be short
        differs = np.bincount(group_of, minlength=len(sizes)) != sizes
        if differs.any():
            self.not_representable(f"g_idx gives group {int(differs.argmax())} another size than group_size")
        return np.argsort(group_of, kind="stable").astype(np.int32)

    def format(self) -> Format:
        """The group format that holds codes, scales and zeros exactly.

        Groups of 16, and float32 scales that no type of 16 bits has, need integers code - zero of eight bits.
        """
        whole, run = self.group == self.k, gcd(self.group, self.k)
        group = None if whole and self.k % ROW == 0 else next((g for g in BLOCKS if run % g == 0), 0)
        fits_bytes = self.zeros.integer and self.zeros.high <= 128 and 2**self.bits - 1 - self.zeros.low <= 127
        if fits_bytes and run % 16 == 0 and (group == 0 or not self.scale_types()):
            return i8_format(16 if run % 32 else 32)
        if group == 0:
            last = f", the last of {self.k % self.group}," if self.k % self.group else ""
            self.not_representable(f"groups of {self.group} weights{last} are no multiple of {BLOCKS[-1]}")
        middle = 2 ** (self.bits - 1)
        zero = "int" if self.zeros.integer else "float"
        if self.zeros == Zeros(middle, middle) and self.bits > 1:
            zero = "none"
        elif self.zeros.integer and not (self.zeros.low >= 0 and self.zeros.high <= 255):
            zero = "float"
        types = self.scale_types()
        if not types:
            self.not_representable("scales are float32, and neither float16 nor bfloat16 has all of them")
        return group_format(self.bits, group, scale=types[0], zero=zero)

    def scale_types(self) -> list[str]:
        """The types of 16 bits that hold all scales: their own, or for float32 those that have all of the numbers."""
        entry = self.scales.entry
        if entry.type != "F32":
            return [{"F16": "f16", "BF16": "bf16"}[entry.type]]
        kinds = {"f16", "bf16"}
        count = int(np.prod(entry.shape))
        for start in range(0, count, UNPACKED):
            scales: Floats = self.scales.file.read(entry, start, min(start + UNPACKED, count))
            with np.errstate(over="ignore"):
                if not np.array_equal(scales.astype(np.float16).astype(np.float32), scales):
                    kinds.discard("f16")
            if (scales.view(np.uint32) & 0xFFFF).any():
                kinds.discard("bf16")
        return sorted(kinds, reverse=True)  # f16 first

    def not_representable(self, rule: str) -> NoReturn:
        """Raise CheckpointError: no block format holds the matrix exactly."""
        raise self.refusal(f"{rule}, which no format of blocks holds exactly; `qgemm convert` reads it as floats")


def floats_of(stored: Stored, raw: NDArray[Any]) -> Floats:
    """Values read from a tensor of floats, in float32."""
    if stored.entry.type == "BF16":
        wide: Floats = (raw.astype(np.uint32) << 16).view(np.float32)
        return wide
    return raw.astype(np.float32)
