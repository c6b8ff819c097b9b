"""Checkpoints of compressed-tensors: a matrix W [..., N, K] of a module as tensors named after its parts.

    pack-quantized                integers of 1 to 8 bits
    weight_packed      int32   [N, K bits / 32]  code k starts at bit k * bits of a row, lowest bits first
    weight_scale       float   [N, K / G]; [N, 1] per row; [1] per tensor; [N / R, K / G] for blocks of R rows
    weight_zero_point  int32   [N bits / 32, K / G] packed along N, or int8 of the shape of the scales; none where
                               symmetric
    weight_shape       int64   [2]  N, K
    weight_g_idx       int32   [K]  the group of each column (act-order), -1 or absent where in order

    int-, naive-quantized         weight int8 [N, K], weight_scale, weight_zero_point int8; W4A8 and W4AFP8 have 4 bits
    float-, naive-, mxfp8-quantized  weight float8 (fp8.py)
    nvfp4-, mxfp4-pack-quantized  (fp4.py)
    mxfp6-pack-quantized          (mxfp6.py)

Codes and zeros are stored unsigned, offset by 2^(bits - 1); W = (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path

from ..array_weights import Stored
from ..weight import Weight
from . import bits as packing
from . import fp4, fp8, mxfp6
from .matrix import FLOATS, UNPACKED, GroupedMatrix, Rows, Zeros, floats_of
from .methods import BLOCK, MX_FORMS, MXFP8, Compressed, EightBits, Scheme

PACKED, PLAIN = ".weight_packed", ".weight"
SCALE = ".weight_scale"
INTEGERS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def matrices(path: str, stored: Mapping[str, Stored], method: Compressed) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a checkpoint, by the name of their first part, and the names of all parts."""
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for name, (_, entry) in stored.items():
        suffix = PACKED if name.endswith(PACKED) else PLAIN if name.endswith(PLAIN) else None
        if suffix is None:
            continue
        module = name.removesuffix(suffix)
        if suffix == PLAIN and (entry.type not in ("I8", *fp8.NUMBERS) or module + SCALE not in stored):
            continue
        scheme = method.for_module(module)
        if scheme is None:
            rule = "is quantized, though ignore or the targets of config_groups leave it out"
            raise CheckpointError(f"{shown_path(path)}: compressed-tensors module {shown(module)}: {rule}")
        weights[name], part_names = _matrix(module, name, stored, scheme)
        parts |= part_names
    return weights, parts


def _matrix(module: str, name: str, stored: Mapping[str, Stored], scheme: Scheme) -> tuple[Weight, set[str]]:
    """One matrix by its scheme, and the names of its parts."""
    if scheme.kind == "int":
        matrix = CompressedMatrix(module, stored, scheme)
        return matrix.weight(), {f"{module}.{part}" for part in (*INTEGERS, "input_scale", "input_zero_point")}
    if scheme.form in fp4.FORMS:
        return fp4.matrix(module, stored, scheme.form), {f"{module}.{part}" for part in fp4.PARTS}
    if scheme.form == mxfp6.FORM:
        return mxfp6.matrix(module, stored), {f"{module}.{part}" for part in fp4.PARTS}
    block = scheme.block or ((1, scheme.group) if scheme.group > 0 else BLOCK)
    settings = MXFP8 if scheme.form in MX_FORMS else EightBits(block)
    return fp8.matrix(name, stored, settings), fp8.parts(name, stored)


class CompressedMatrix(GroupedMatrix):
    """One matrix of integers: its parts, checked against each other and against its scheme."""

    method = "compressed-tensors"

    def __init__(self, name: str, stored: Mapping[str, Stored], scheme: Scheme) -> None:
        self.name, self.bits = name, scheme.bits
        self.label = f"CT_INT{scheme.bits}"
        self.parts = {part: stored[full] for part in INTEGERS if (full := f"{name}.{part}") in stored}
        self.packed = scheme.form == "pack-quantized"
        codes, kind = ("weight_packed", "I32") if self.packed else ("weight", "I8")
        for part in (codes, "weight_scale"):
            if part not in self.parts:
                raise self.refusal(f"there is no {part}")
        self.codes, entry = self.parts[codes], self.parts[codes].entry
        if entry.type != kind or len(entry.shape) != 2 or 0 in entry.shape:
            raise self.refusal(f"{codes} is {entry.type} {list(entry.shape)}, not a matrix of {kind}")
        self.n, self.k = self._shape(entry.shape)
        whole = {-1: (1, self.k), 0: (self.n, self.k)}
        self.shared, self.group = scheme.block or whole.get(scheme.group, (1, scheme.group))
        if scheme.block:  # the last ones may be short
            self.group = min(self.group, self.k)
        elif self.k % self.group:
            raise self.refusal(f"rows of {self.k} weights are no groups of {self.group} (group_size)")
        self.grid = (-(-self.n // self.shared), -(-self.k // self.group))
        scale = self.parts["weight_scale"].entry
        if scale.type not in FLOATS or scale.shape not in self._shapes():
            raise self.refusal(f"weight_scale is {scale.type} {list(scale.shape)}, not {list(self.grid)} floats")
        self.zero_part = self._zero_part(scheme.symmetric)
        self.order = self._order()
        self.step = 1 if self.zero_part is None else packing.WORD // gcd(packing.WORD, self.bits)
        middle = 1 << self.bits - 1
        if scheme.symmetric and self.zeros != (middle, middle, True):
            low, high = (int(zero) - middle for zero in self.zeros[:2])
            raise self.refusal(f"is symmetric by its config, but weight_zero_point has {low} to {high}")

    def _shape(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """N and K, from weight_shape or from the codes' shape."""
        if not self.packed:
            return stored[0], stored[1]
        shape = self.parts.get("weight_shape")
        if shape is None:
            raise self.refusal("there is no weight_shape")
        if shape.entry.type not in ("I64", "I32") or shape.entry.shape != (2,):
            raise self.refusal(f"weight_shape is {shape.entry.type} {list(shape.entry.shape)}, not I64 [2]")
        n, k = (int(size) for size in shape.file.read(shape.entry, 0, 2))
        if n < 1 or k < 1 or stored != (n, packing.word_count(k, self.bits)):
            raise self.refusal(f"weight_packed {list(stored)} is not {[n, k]} (weight_shape) in {self.bits} bits")
        return n, k

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes that a tensor of scales may have: axes of size 1 may be missing from the end."""
        rows, columns = self.grid
        flat: list[tuple[int, ...]] = [(rows,)] if columns == 1 else []
        return [self.grid, *flat, *([()] if rows == columns == 1 else [])]

    def _zero_part(self, symmetric: bool) -> Stored | None:
        """The tensor of the zeros, None where there is none and every zero is the middle code."""
        part = self.parts.get("weight_zero_point")
        if part is None:
            if not symmetric:
                raise self.refusal("there is no weight_zero_point, though symmetric is false")
            return None
        forms = [("I8", shape) for shape in self._shapes()]
        if self.shared == 1:
            forms = [("I32", (packing.word_count(self.n, self.bits), self.grid[1])), *forms]
        if (part.entry.type, part.entry.shape) not in forms:
            expected = " or ".join(f"{kind} {list(shape)}" for kind, shape in forms)
            actual = f"{part.entry.type} {list(part.entry.shape)}"
            raise self.refusal(f"weight_zero_point is {actual}, not {expected}")
        return part

    def _order(self) -> NDArray[np.int32] | None:
        part = self.parts.get("weight_g_idx")
        if part is None:
            return None
        if part.entry.type != "I32" or part.entry.shape != (self.k,):
            raise self.refusal(f"weight_g_idx is {part.entry.type} {list(part.entry.shape)}, not I32 [{self.k}]")
        group_of: NDArray[np.int32] = part.file.read(part.entry, 0, self.k)
        if (group_of == -1).all():
            return None
        last = self.grid[1] - 1
        if group_of.min() < 0 or group_of.max() > last:
            raise self.refusal(f"weight_g_idx names groups {group_of.min()} to {group_of.max()}, but has 0 to {last}")
        return group_of

    @property
    def scales(self) -> Stored:
        return self.parts["weight_scale"]

    def zero_range(self) -> Zeros:
        middle = 1 << self.bits - 1
        if self.zero_part is None:
            return Zeros(middle, middle)
        step = max(1, UNPACKED // (self.grid[1] * self.step)) * self.step  # rows at a time
        extremes: list[int] = []
        for start in range(0, self.n, step):
            zeros = self._zero_rows(start, min(start + step, self.n))
            extremes += [int(zeros.min()), int(zeros.max())]
        return Zeros(min(extremes), max(extremes))

    def _zero_rows(self, start: int, stop: int) -> Bytes:
        """Zeros of rows start to stop, [n, G]."""
        middle, groups = 1 << self.bits - 1, self.grid[1]
        part = self.zero_part
        if part is None:
            return np.full((stop - start, groups), middle, np.uint8)
        if part.entry.type == "I8":
            return self._unsigned(self._grid_rows(part, start, stop), "weight_zero_point")
        first, last = (packing.word_count(row, self.bits) for row in (start, stop))
        words = part.file.read(part.entry, first * groups, last * groups).reshape(-1, groups)
        codes = packing.unpack_codes(np.ascontiguousarray(words.T).view(np.uint32), self.bits, stop - start)
        return np.ascontiguousarray(codes.T)

    def rows(self, start: int, stop: int) -> Rows:
        file, entry = self.codes
        width = entry.shape[1]
        raw = file.read(entry, start * width, stop * width).reshape(-1, width)
        if self.packed:
            codes = packing.unpack_codes(raw.view(np.uint32), self.bits, self.k)
        else:
            codes = self._unsigned(raw, "weight")
        return Rows(
            codes, floats_of(self.scales, self._grid_rows(self.scales, start, stop)), self._zero_rows(start, stop)
        )

    def _grid_rows(self, part: Stored, start: int, stop: int) -> NDArray[Any]:
        """The scales or zeros of rows start to stop, [n, G], from a tensor with a row for `shared` rows of W."""
        groups, first = self.grid[1], start // self.shared
        stored = part.file.read(part.entry, first * groups, -(-stop // self.shared) * groups).reshape(-1, groups)
        return stored if self.shared == 1 else stored[np.arange(start, stop) // self.shared - first]

    def _unsigned(self, signed: NDArray[np.int8], part: str) -> Bytes:
        """Signed codes or zeros as unsigned ones."""
        middle = 1 << self.bits - 1
        if self.bits < 8 and signed.size and (signed.min() < -middle or signed.max() >= middle):
            raise self.refusal(f"{part} has {signed.min()} to {signed.max()} in {self.bits} bits")
        unsigned: Bytes = signed.view(np.uint8) + np.uint8(middle)
        return unsigned
