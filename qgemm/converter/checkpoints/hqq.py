"""Checkpoints of HQQ: W [N, K] as codes of 1, 2, 3, 4 or 8 bits, with a scale and a float zero per group.

    MODULE.W_q               codes of W as [N K / G, G], for axis 0 as [G, N K / G], packed along the first axis
    MODULE.scale, .zero      float  [N K / G, 1], or [1, N K / G]
    MODULE.nbits, .axis, .group_size, .shape, .packing, .view_as_float, .quant_scale, .quant_zero   settings, a number,
                             or text as its characters' codes, uint8

    packing   W_q     code i, from the highest bits on, of element r: the code of row r + i * rows / codes per element
    8bit_u8   uint8   1 code per element
    4bit_u8   uint8   2 codes of 4 bits
    3bit_32   int32   10 codes of 3 bits; rows of zeros pad the number of rows to a multiple of ten
    2bit_u8   uint8   4 codes of 2 bits
    1bit_u8   uint8   8 codes of 1 bit

W = (code - zero) * scale, in float32 here; the library computes in half and rounds the difference too. A group along
axis 0 has weights of many rows, or of distant columns, which no block of a row holds: they are read as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes, Floats
from qgemm.files.paths import shown
from qgemm.packed import Packed

from ..array_weights import Stored
from ..weight import Weight
from .matrix import FLOATS, UNPACKED, GroupedMatrix, Rows, Zeros, floats_of
from .methods import Hqq

PART = ".W_q"
SETTINGS = (
    "nbits", "group_size", "shape", "axis", "packing", "view_as_float", "quant_scale", "quant_zero",
    "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip
LARGE = 2**14  # bound on the magnitude of zeros that count as integers
TENSORS = ("W_q", "scale", "zero")


class Packing(NamedTuple):
    """How codes lie in W_q: bits of a code, codes per element, the element's type."""

    bits: int
    per_element: int
    type: str


PACKINGS = {
    "8bit_u8": Packing(8, 1, "U8"),
    "4bit_u8": Packing(4, 2, "U8"),
    "3bit_32": Packing(3, 10, "I32"),
    "2bit_u8": Packing(2, 4, "U8"),
    "1bit_u8": Packing(1, 8, "U8"),
}


def matrices(path: str, stored: Mapping[str, Stored], method: Hqq) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a checkpoint, by the name of their codes, and the names of all parts."""
    modules = [name.removesuffix(PART) for name in stored if name.endswith(PART)]
    weights = {module + PART: _Matrix(module, stored).weight() for module in modules}
    return weights, {f"{module}.{part}" for module in modules for part in (*TENSORS, *SETTINGS)}


class _Matrix(GroupedMatrix):
    """One matrix: its parts checked against each other, and readers of its rows."""

    method, label = "hqq", "HQQ"

    def __init__(self, name: str, stored: Mapping[str, Stored]) -> None:
        self.name = name
        self.settings = {part: stored[full] for part in SETTINGS if (full := f"{name}.{part}") in stored}
        self.parts = {part: stored[full] for part in TENSORS if (full := f"{name}.{part}") in stored}
        for part in ("quant_scale", "quant_zero", "view_as_float"):
            if part in self.settings and self._number(part):
                raise self.refusal(f"{part} is set, which is not read")
        for part in TENSORS:
            if part not in self.parts:
                raise self.refusal(f"there is no {part}")
        self.packing, nbits = self._packing(), self._float("nbits")
        self.bits = self.packing.bits  # 5 and 6 bits are stored in 8, 1.58 bits in 2
        self.axis, shape = self._number("axis"), self._shape()
        self.label = f"HQQ{nbits:g}"
        self.n, self.k = shape
        size = self._number("group_size") if "group_size" in self.settings else -1
        weights = self.n * self.k
        self.group = size if size > 0 else self.k if self.axis == 1 else self.n
        if self.axis not in (0, 1) or weights % self.group or not 0 < nbits <= self.bits:
            values = f"nbits {nbits:g}, axis {self.axis}, group_size {self.group} and shape {list(shape)}"
            raise self.refusal(f"{values} do not fit each other")
        self.count = weights // self.group
        self._check_shapes()
        self.label += "" if self.in_rows else "_AXIS0" if self.axis == 0 else "_ACROSS"

    def _check_shapes(self) -> None:
        """Refuse parts whose shapes contradict the settings."""
        entry = self.parts["W_q"].entry
        grouped = (self.count, self.group) if self.axis == 1 else (self.group, self.count)
        rows = -(-grouped[0] // self.packing.per_element)
        exact = grouped[0] % self.packing.per_element == 0 or self.bits == 3
        if (entry.type, entry.shape) != (self.packing.type, (rows, grouped[1])) or not exact:
            actual = f"{entry.type} {list(entry.shape)}"
            raise self.refusal(f"W_q is {actual}, not {self.packing.type} {[rows, grouped[1]]} ({list(grouped)} codes)")
        expected = (self.count, 1) if self.axis == 1 else (1, self.count)
        for part in ("scale", "zero"):
            entry = self.parts[part].entry
            if entry.type not in FLOATS or entry.shape not in (expected, (self.count,)):
                raise self.refusal(f"{part} is {entry.type} {list(entry.shape)}, not {list(expected)} floats")

    def _text(self, part: str) -> str:
        stored = self.settings.get(part)
        if stored is None:
            raise self.refusal(f"there is no {part}")
        if stored.entry.type != "U8" or not 0 < stored.entry.nbytes < 64:
            raise self.refusal(f"{part} is {stored.entry.type} {list(stored.entry.shape)}, not short text")
        return stored.file.read(stored.entry, 0, stored.entry.nbytes).tobytes().decode("latin-1")

    def _number(self, part: str) -> int:
        value = self._float(part)
        if int(value) != value:
            raise self.refusal(f"{part} is {value}, not a whole number")
        return int(value)

    def _float(self, part: str) -> float:
        stored = self.settings.get(part)
        if stored is None:
            raise self.refusal(f"there is no {part}")
        if stored.entry.type not in ("U8", "I32", "I64", "F32", "BOOL") or prod(stored.entry.shape) != 1:
            raise self.refusal(f"{part} is {stored.entry.type} {list(stored.entry.shape)}, not a number")
        value = float(stored.file.read(stored.entry, 0, 1)[0])
        if not np.isfinite(value):
            raise self.refusal(f"{part} is {value}, which is no number")
        return value

    def _shape(self) -> tuple[int, int]:
        stored = self.settings.get("shape")
        if stored is None or stored.entry.type not in ("I64", "I32") or stored.entry.shape != (2,):
            raise self.refusal("shape is not that of a matrix")
        n, k = (int(size) for size in stored.file.read(stored.entry, 0, 2))
        if not (0 < n < 2**31 and 0 < k < 2**31):
            raise self.refusal(f"shape {[n, k]} is not that of a matrix")
        return n, k

    def _packing(self) -> Packing:
        name = self._text("packing")
        if name not in PACKINGS:
            raise self.refusal(f"packing {shown(name)} is not read; {', '.join(PACKINGS)} are")
        return PACKINGS[name]

    @property
    def in_rows(self) -> bool:
        """Whether each group is a run of adjacent weights of a row."""
        return self.axis == 1 and self.k % self.group == 0

    @property
    def scales(self) -> Stored:
        return self.parts["scale"]

    def zero_range(self) -> Zeros:
        low, high, whole = np.inf, -np.inf, True
        for start in range(0, self.count, UNPACKED):
            zeros = self._floats("zero", start, min(start + UNPACKED, self.count))
            whole = whole and bool((np.abs(zeros) < LARGE).all() and (np.rint(zeros) == zeros).all())
            low, high = min(low, float(zeros.min())), max(high, float(zeros.max()))
        return Zeros(low, high, whole)

    def _floats(self, part: str, start: int, stop: int) -> Floats:
        stored = self.parts[part]
        return floats_of(stored, stored.file.read(stored.entry, start, stop))

    def _codes(self, first: int, last: int) -> Bytes:
        """Codes of W_q's unpacked rows first to last, [last - first, columns]."""
        stored, (bits, per_element, _) = self.parts["W_q"], self.packing
        rows, columns = stored.entry.shape
        codes = np.empty((last - first, columns), np.uint8)
        for index in range(per_element):
            start, stop = max(first, index * rows), min(last, (index + 1) * rows)
            if start < stop:
                raw = stored.file.read(stored.entry, (start - index * rows) * columns, (stop - index * rows) * columns)
                shift = bits * (per_element - 1 - index)
                part = raw.reshape(-1, columns) >> raw.dtype.type(shift) & raw.dtype.type(2**bits - 1)
                codes[start - first : stop - first] = part
        return codes

    def rows(self, start: int, stop: int) -> Rows:
        row_groups = self.k // self.group
        first, last = start * row_groups, stop * row_groups
        scales, zeros = (self._floats(part, first, last).reshape(-1, row_groups) for part in ("scale", "zero"))
        return Rows(self._codes(first, last).reshape(-1, self.k), scales, zeros)

    def values(self, start: int, stop: int) -> Floats:
        if self.in_rows:
            return super().values(start, stop)
        if self.axis == 1:  # groups that cross rows
            first, last = start // self.group, -(-stop // self.group)
            weights = self._dequantized(self._codes(first, last), first, last)
            return weights.reshape(-1)[start - first * self.group :][: stop - start]
        first, last = start // self.count, -(-stop // self.count)
        weights = self._dequantized(self._codes(first, last), 0, self.count, axis=0)
        return weights.reshape(-1)[start - first * self.count :][: stop - start]

    def _dequantized(self, codes: Bytes, first: int, last: int, axis: int = 1) -> Floats:
        """Dequantize codes [a, b] of groups first to last, which are rows (axis 1) or columns (axis 0)."""
        scale, zero = (np.expand_dims(self._floats(part, first, last), axis) for part in ("scale", "zero"))
        with np.errstate(all="ignore"):  # scales may be anything
            weights: NDArray[Any] = (codes.astype(np.float32) - zero) * scale
        return weights

    def weight(self) -> Weight:
        if self.in_rows:
            return super().weight()
        nbytes = sum(stored.entry.nbytes for stored in self.parts.values())
        return Weight(
            f"{self.name}.weight", (self.n, self.k), self.label, nbytes, 1, values=self.values, quantized=True,
            irregular=True, native=self.native,
        )  # fmt: skip

    def native(self) -> Packed:
        if not self.in_rows:
            self.not_representable(f"axis {self.axis}: groups of {self.group} do not lie in rows")
        zeros = self._floats("zero", 0, self.count)
        with np.errstate(over="ignore"):
            if not self.zeros.integer and not np.array_equal(zeros.astype(np.float16).astype(np.float32), zeros):
                self.not_representable("zeros are no float16")
        return super().native()
