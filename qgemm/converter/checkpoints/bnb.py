"""Checkpoints of bitsandbytes: W [N, K] in four bits, as codes of a codebook with one absmax per block, or as int8.

    NAME                                uint8 [N K / 2, 1]  byte j: the code of weight 2 j in the high nibble, of
                                                            2 j + 1 in the low; these bytes as any type. N K may be
                                                            odd; the last low nibble is unused then
    NAME.absmax                         float32 [N K / B]   in order of the weights, row by row
    NAME.quant_map                      float32 [16]        the level of each code
    NAME.quant_state.bitsandbytes__nf4  uint8               JSON: blocksize B, shape, and for double quantization
                                                            nested_blocksize, nested_offset
    NAME.nested_absmax, .nested_quant_map                   for double quantization: absmax is uint8 then, and decodes
                                                            as nested_quant_map[code] * nested_absmax[block] + offset

W = quant_map[code] * absmax in float32.

    MODULE.weight         int8     [N, K]    eight bits (LLM.int8)
    MODULE.SCB            float32  [N]       absmax of each row
    MODULE.weight_format  uint8    []        0, rows; may be absent

W = (weight * SCB) * (1 / 127) in float32. Loaded weights have SCB * (1 / 127) as scales, whose last bit may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Levels
from qgemm.codec.packing import Bytes, Floats
from qgemm.errors import CheckpointError
from qgemm.files.json_parser import parse_object
from qgemm.files.paths import shown, shown_path
from qgemm.formats.kbit import WEIGHTS, kbit_float32
from qgemm.packed import Packed
from qgemm.tensor import Tensor

from ..array_weights import Stored
from ..weight import Weight
from .matrix import GroupedMatrix, Rows, Zeros
from .methods import BitsAndBytes

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
ENDS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
BLOCKSIZES = tuple(2**i for i in range(5, 13))  # those of the library
LARGEST = float(np.finfo(np.float32).max)
LONGEST_STATE = 4096  # bytes of JSON
ROW_SCALES = "SCB"
INT8_PARTS = ("weight", ROW_SCALES, "weight_format")
PER_CODE = np.float32(7.874015718698502e-3)  # the library's 1 / 127
MIDDLE = 128  # the unsigned code of 0


def matrices(path: str, stored: Mapping[str, Stored], method: BitsAndBytes) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a checkpoint, by the name of their codes, and the names of all parts."""
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for state, (_, entry) in stored.items():
        module = state.removesuffix(".weight")
        if method.eight_bits and module != state and (entry.type == "I8" or f"{module}.{ROW_SCALES}" in stored):
            weights[state] = _Int8Matrix(module, stored).weight()
            parts |= {f"{module}.{part}" for part in INT8_PARTS}
        name, mark, kind = state.partition(STATE)
        if not mark:
            continue
        matrix = _Matrix(name, kind, stored)
        if method.eight_bits:
            matrix.refuse(f"is {kind}, though load_in_8bit is true")
        if method.kind not in (None, kind):
            matrix.refuse(f"is {kind}, though bnb_4bit_quant_type is {method.kind}")
        weights[name] = matrix.weight()
        parts |= {state, *(name + end for end in ENDS)}
    return weights, parts


class _Int8Matrix(GroupedMatrix):
    """One matrix of int8: its parts, and readers of its rows."""

    method, label, bits = "bitsandbytes", "INT8", 8

    def __init__(self, name: str, stored: Mapping[str, Stored]) -> None:
        self.name = name
        self.parts = {part: stored[full] for part in INT8_PARTS if (full := f"{name}.{part}") in stored}
        entry = self.parts["weight"].entry
        if entry.type != "I8" or len(entry.shape) != 2 or 0 in entry.shape:
            raise self.refusal(f"weight is {entry.type} {list(entry.shape)}, not a matrix of I8")
        self.n, self.k = entry.shape
        self.group = self.k
        if ROW_SCALES not in self.parts:
            raise self.refusal(f"there is no {ROW_SCALES}")
        if (self.scales.entry.type, self.scales.entry.shape) != ("F32", (self.n,)):
            actual = f"{self.scales.entry.type} {list(self.scales.entry.shape)}"
            raise self.refusal(f"{ROW_SCALES} is {actual}, not F32 [{self.n}]")
        layout = self.parts.get("weight_format")
        if layout is None:
            return
        if layout.entry.type != "U8" or layout.entry.nbytes != 1 or layout.file.read(layout.entry, 0, 1)[0] != 0:
            raise self.refusal("weight_format: only rows, one U8 of 0, are read")

    @property
    def scales(self) -> Stored:
        return self.parts[ROW_SCALES]

    def scale_types(self) -> list[str]:
        return []  # the product with 1 / 127 needs float32

    def zero_range(self) -> Zeros:
        return Zeros(MIDDLE, MIDDLE)

    def rows(self, start: int, stop: int) -> Rows:
        codes, absmax = self._codes(start, stop), self._absmax(start, stop)
        with np.errstate(all="ignore"):  # the file may hold any bits
            scales = absmax * PER_CODE
        return Rows(codes.view(np.uint8) ^ np.uint8(MIDDLE), scales, np.full_like(scales, MIDDLE, np.uint8))

    def values(self, start: int, stop: int) -> Floats:
        first, last = start // self.k, stop // self.k
        with np.errstate(all="ignore"):  # the file may hold any bits
            weights: Floats = self._codes(first, last) * self._absmax(first, last) * PER_CODE
        return weights.reshape(-1)

    def _codes(self, start: int, stop: int) -> NDArray[np.int8]:
        file, entry = self.parts["weight"]
        return file.read(entry, start * self.k, stop * self.k).reshape(-1, self.k)

    def _absmax(self, start: int, stop: int) -> Floats:
        return self.scales.file.read(self.scales.entry, start, stop).reshape(-1, 1)


class _Matrix:
    """One matrix of four bits: its parts checked against each other, and readers of them."""

    def __init__(self, name: str, kind: str, stored: Mapping[str, Stored]) -> None:
        self.name, self.kind, self.stored = name, kind, stored
        self.state_part = stored[f"{name}{STATE}{kind}"]
        if kind not in KINDS:
            self.refuse(f"quant_state of {shown(kind)} is not read; {', '.join(KINDS)} are")
        state = self._state()
        size, shape = state.get("blocksize"), state.get("shape")
        if type(size) is not int or size not in BLOCKSIZES:
            self.refuse(f"quant_state: a blocksize of {shown(str(size))} is not read")
        sizes = shape if isinstance(shape, list) else []
        if len(sizes) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
            self.refuse(f"quant_state: shape {shown(str(shape))} is not that of a matrix")
        if state.get("quant_type") != kind:
            self.refuse(f"quant_state: quant_type {shown(str(state.get('quant_type')))} is not {kind}")
        self.blocksize: int = size
        self.n, self.k = sizes
        self.codes = self.part("", None)
        if self.codes.entry.nbytes != -(-self.n * self.k // 2):
            self.refuse(f"{self.codes.entry.nbytes} bytes are not the codes of {shape} weights")
        self.blocks = -(-self.n * self.k // self.blocksize)
        book = self.part(".quant_map", ("F32", 16))
        self.codebook: Floats = book.file.read(book.entry, 0, 16)
        if not np.isfinite(self.codebook).all():
            self.refuse("quant_map holds NaN or infinity")
        self.absmax = self._absmax(state)  # (first block, last block) -> their absmax

    def refusal(self, rule: str) -> CheckpointError:
        """The error for this matrix."""
        return CheckpointError(f"{shown_path(self.state_part.file.path)}: tensor {shown(self.name)}: {rule}")

    def refuse(self, rule: str) -> NoReturn:
        """Raise the error for this matrix."""
        raise self.refusal(rule)

    def part(self, end: str, expected: tuple[str, int] | None) -> Stored:
        """A part; CheckpointError unless it has the expected type and number of elements. None: codes, of any type."""
        stored = self.stored.get(self.name + end)
        if stored is None:
            self.refuse(f"there is no {end.removeprefix('.') or 'tensor of codes'}")
        kind, count = stored.entry.type, prod(stored.entry.shape)
        if expected is not None and (kind, count) != expected:
            self.refuse(
                f"{end.removeprefix('.')} is {kind} {list(stored.entry.shape)}, not {expected[0]} [{expected[1]}]"
            )
        return stored

    def _state(self) -> dict[str, Any]:
        file, entry = self.state_part
        if entry.type != "U8" or entry.nbytes > LONGEST_STATE:
            self.refuse(f"quant_state is {entry.type} {list(entry.shape)}, not the bytes of a short JSON object")
        raw = file.read(entry, 0, entry.nbytes).tobytes()
        return parse_object(raw, lambda rule: self.refusal(f"quant_state: {rule}"))

    def _absmax(self, state: Mapping[str, Any]) -> Callable[[int, int], Floats]:
        """A function (first block, last block) -> absmax, which decodes double quantization."""
        nested = self.name + ".nested_absmax" in self.stored
        part = self.part(".absmax", ("U8" if nested else "F32", self.blocks))
        if not nested:
            return partial(part.file.read, part.entry)
        size: Any = state.get("nested_blocksize")
        offset: Any = state.get("nested_offset")
        fits = type(offset) in (int, float) and abs(offset) <= LARGEST
        if type(size) is not int or not 0 < size < 2**31 or not fits:
            values = f"nested_blocksize {shown(str(size))}, nested_offset {shown(str(offset))}"
            self.refuse(f"quant_state: {values} are not numbers of double quantization")
        outer = self.part(".nested_absmax", ("F32", -(-self.blocks // size)))
        book = self.part(".nested_quant_map", ("F32", 256))
        levels: Floats = book.file.read(book.entry, 0, 256)

        def read(start: int, stop: int) -> Floats:
            codes, first = part.file.read(part.entry, start, stop), start // size
            scales = outer.file.read(outer.entry, first, -(-stop // size))[np.arange(start, stop) // size - first]
            with np.errstate(all="ignore"):  # the file may hold any bits
                absmax: Floats = levels[codes] * scales + np.float32(offset)
            return absmax

        return read

    def _codes(self, start: int, stop: int) -> Bytes:
        """Codes of weights start to stop."""
        size = self.codes.entry.dtype.itemsize
        first, last = start // 2 // size, -(-stop // 2 // size)
        pairs = self.codes.file.read(self.codes.entry, first, last).view(np.uint8)
        return np.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[start - 2 * first * size :][: stop - start]

    def values(self, start: int, stop: int) -> Floats:
        """Weights start to stop."""
        first, last = start // self.blocksize, -(-stop // self.blocksize)
        absmax = self.absmax(first, last)[np.arange(start, stop) // self.blocksize - first]
        with np.errstate(all="ignore"):  # scales may be anything
            weights: Floats = np.multiply(self.codebook[self._codes(start, stop)], absmax, dtype=np.float32)
        return weights

    def native(self) -> Packed:
        """Blocks of 32 codes with the codebook and a float32 absmax."""
        if self.k % WEIGHTS:
            self.refuse(f"rows of {self.k} are no blocks of {WEIGHTS}; `qgemm convert` reads them as floats")
        fmt = kbit_float32(4, self.codebook)
        count = self.n * self.k // WEIGHTS
        codes = self._codes(0, self.n * self.k).reshape(count, WEIGHTS)
        absmax = self.absmax(0, self.blocks)[np.arange(count) * WEIGHTS // self.blocksize]
        assert fmt.pack is not None
        blocks = fmt.pack(Levels(codes[:, None], absmax[:, None]))
        return Tensor(fmt, (self.n, self.k), blocks.reshape(self.n, -1), self.name)

    def weight(self) -> Weight:
        """The matrix as a Weight."""
        nbytes = self.codes.entry.nbytes + self.stored[f"{self.name}.absmax"].entry.nbytes
        return Weight(
            self.name, (self.n, self.k), self.kind.upper(), nbytes, 1,
            values=self.values, quantized=True, irregular=True, native=self.native,
        )  # fmt: skip
