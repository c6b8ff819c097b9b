"""Checkpoints quantized by AWQ and GPTQ: a matrix W [N, K] as three or four tensors, whose columns are rows of W.

    AWQ ("gemm")
    qweight  int32   [K, N / 8]         nibble i of word c: column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32   [K / G, N / 8]     the same order
    scales   float16 [K / G, N]

    GPTQ, of 2, 3, 4 or 8 bits
    qweight  int32   [K * bits / 32, N] packed along K, lowest bits first
    qzeros   int32   [K / G, N * bits / 32] packed along N; version 1 stores zeros minus one
    scales   float16 [K / G, N]
    g_idx    int32   [K]                the group of each k: k // G, or any (act-order)

GPTQ's K need not be a multiple of G: the last group is shorter then, and K / G is rounded up.
W[n, k] = (q - zero) * scale of the group of k, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import reduce
from math import gcd

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Bytes
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path

from ..array_weights import Stored
from ..weight import Weight
from . import bits as packing
from .matrix import FLOATS, GroupedMatrix, Rows, Zeros, floats_of
from .methods import Method

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
UNPACKED = 1 << 17  # words unpacked at a time


def matrices(path: str, stored: Mapping[str, Stored], method: Method) -> tuple[dict[str, Weight], set[str]]:
    """The matrices of a checkpoint, by the name of their first part, and the names of all parts."""
    weights: dict[str, Weight] = {}
    parts: set[str] = set()
    for name in stored:
        prefix, _, part = name.rpartition(".")
        if part != PARTS[0]:
            continue
        settings = method.for_module(prefix)
        if settings is None:
            rule = "is packed, though the config's dynamic leaves it out"
            raise CheckpointError(f"{shown_path(path)}: {method.name} tensor {shown(prefix)}: {rule}")
        weights[name] = AwqGptqMatrix(prefix, stored, settings).weight()
        parts |= {f"{prefix}.{part}" for part in PARTS}
    return weights, parts


class AwqGptqMatrix(GroupedMatrix):
    """One matrix: its parts checked against each other, and readers of its rows."""

    def __init__(self, name: str, stored: Mapping[str, Stored], method: Method) -> None:
        self.name, self.settings, self.method, self.bits = name, method, method.name, method.bits
        self.label = f"{method.name.upper()}{method.bits}"
        self.parts = {part: stored[full] for part in PARTS if (full := f"{name}.{part}") in stored}
        self.awq = method.name == "awq"
        for part, kinds in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", FLOATS)):
            if part not in self.parts:
                raise self.refusal(f"there is no {part}")
            entry = self.parts[part].entry
            if entry.type not in kinds or len(entry.shape) != 2:
                raise self.refusal(f"{part} is {entry.type} {list(entry.shape)}, not a matrix of {' or '.join(kinds)}")
        self.step = packing.WORD // gcd(packing.WORD, self.bits)  # rows of W whose zeros fill whole words
        down, across = self.parts["qweight"].entry.shape
        codes = packing.WORD * (across if self.awq else down) // self.bits
        self.k, self.n = (down, codes) if self.awq else (codes, across)
        if not self.k or not self.n:
            raise self.refusal(f"qweight {[down, across]} has no weights")
        self.group = self.k if method.group == -1 or (method.group > self.k and not self.awq) else method.group
        groups = self.k // self.group if self.awq else -(-self.k // self.group)
        expected = {
            "qweight": (down, across) if self.awq else (packing.word_count(self.k, self.bits), across),
            "qzeros": (groups, packing.word_count(self.n, self.bits)),
            "scales": (groups, self.n),
        }
        for part, shape in expected.items():
            if self.parts[part].entry.shape != shape or (self.awq and self.k % self.group) or self.n % self.step:
                shapes = ", ".join(f"{p} {list(s.entry.shape)}" for p, s in self.parts.items())
                raise self.refusal(f"{shapes} do not fit {method.bits} bits and groups of {method.group}")
        self.order = self._order()
        middle = 1 << method.bits - 1
        if method.symmetric and self.zeros != (middle, middle, True):
            low, high, _ = self.zeros
            raise self.refusal(f"is symmetric by its config (sym), but has zeros of {low} to {high}")

    @property
    def scales(self) -> Stored:
        return self.parts["scales"]

    def in_memory(self) -> GroupedMatrix:
        matrix = copy(self)
        matrix.parts = {part: stored.whole() for part, stored in self.parts.items()}
        return matrix

    def zero_range(self) -> Zeros:
        """The least and greatest zero; few are unpacked at a time, since there may be as many groups as weights."""
        file, entry = self.parts["qzeros"]
        groups, width = entry.shape
        step = max(1, UNPACKED // width)
        extremes: list[int] = []
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            words = file.read(entry, start * width, stop * width).reshape(-1, width)
            zeros = self._zero(self._across(words))
            extremes += [int(zeros.min()), int(zeros.max())]
        return Zeros(min(extremes), max(extremes))

    def _order(self) -> NDArray[np.int32] | None:
        """The group of each k, [K], None if groups are in order."""
        if "g_idx" not in self.parts:
            if self.settings.reordered:
                raise self.refusal("act-order (desc_act) without g_idx is not read")
            return None
        file, entry = self.parts["g_idx"]
        if entry.type != "I32" or entry.shape != (self.k,):
            raise self.refusal(f"g_idx is {entry.type} {list(entry.shape)}, not I32 [{self.k}]")
        group_of: NDArray[np.int32] = file.read(entry, 0, self.k)
        last = self.scales.entry.shape[0] - 1
        if group_of.min() < 0 or group_of.max() > last:
            raise self.refusal(f"g_idx names groups {group_of.min()} to {group_of.max()}, but has 0 to {last}")
        return group_of

    def _across(self, words: NDArray[np.int32]) -> Bytes:
        """Words [a, b], packed along the second axis -> codes [a, b * 32 / bits]."""
        plain = np.ascontiguousarray(words).view(np.uint32)
        if self.awq:
            nibbles = ((plain >> np.uint32(4 * i) & np.uint32(15), column) for i, column in enumerate(AWQ_COLUMNS))
            plain = reduce(np.bitwise_or, (nibble << np.uint32(4 * column) for nibble, column in nibbles))
        return packing.unpack_codes(plain, self.bits, words.shape[1] * packing.WORD // self.bits)

    def _zero(self, stored: Bytes) -> Bytes:
        """The zeros for their stored values."""
        if self.settings.version == 2:
            return stored
        return (stored + np.uint8(1)) & np.uint8(2**self.bits - 1)

    def rows(self, start: int, stop: int) -> Rows:
        first, last = (packing.word_count(row, self.bits) for row in (start, stop))
        if self.awq:
            codes = np.ascontiguousarray(self._across(self.parts["qweight"].columns(first, last)).T)
        else:
            codes = self._across(np.ascontiguousarray(self.parts["qweight"].columns(start, stop).T))
        zeros = self._zero(self._across(self.parts["qzeros"].columns(first, last)))
        scales = floats_of(self.scales, self.scales.columns(start, stop))
        return Rows(codes, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T))
