"""Checkpoints quantized by AWQ and GPTQ: a matrix W [N, K] as three tensors, with a column for each of its rows.

    AWQ ("gemm")
    qweight  int32   [K, N / 8]         nibble i of word c: column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32   [K / G, N / 8]     the same order
    scales   float16 [K / G, N]

    GPTQ, of 4 or 8 bits
    qweight  int32   [K * bits / 32, N] packed along K, lowest bits first
    qzeros   int32   [K / G, N * bits / 32] packed along N; in version 1 each is one less than the zero
    scales   float16 [K / G, N]
    g_idx    int32   [K]                the group of each k: k // G, or any (act-order)

W[n, k] = (q - zero) * scale of the group of k, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown, shown_path

from .arrays import Stored
from .quantization import Method
from .weight import GROUP, Codes, Groups, Weight

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
PARTS = ("qweight", "qzeros", "scales", "g_idx")
UNPACKED = 1 << 17  # words that are unpacked at a time, into 2 MiB of int16
ROWS = 8  # of W that are read at least: a word of zeros has as many columns


def matrix(prefix: str, stored: Mapping[str, Stored], method: Method) -> Weight:
    """The quantized matrix whose parts are called `prefix` and a dot before."""
    parts = {part: stored[name] for part in PARTS if (name := f"{prefix}.{part}") in stored}
    return _Matrix(prefix, parts, method).weight()


class _Matrix:
    """One matrix: its parts checked against each other, and readers of its rows."""

    def __init__(self, name: str, parts: Mapping[str, Stored], method: Method) -> None:
        self.name, self.parts, self.method = name, parts, method
        self.where = shown_path(next(iter(parts.values())).file.path)
        for part, kinds in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", ("F16", "BF16", "F32"))):
            if part not in parts:
                raise self.refusal(f"there is no {part}")
            entry = parts[part].entry
            if entry.type not in kinds or len(entry.shape) != 2:
                raise self.refusal(f"{part} is {entry.type} {list(entry.shape)}, not a matrix of {' or '.join(kinds)}")
        each = 32 // method.bits  # codes a word
        down, across = parts["qweight"].entry.shape
        self.k, self.n = (down, across * each) if method.name == "awq" else (down * each, across)
        self.group = self.k if method.group == -1 else method.group
        if not self.k or not self.n:
            raise self.refusal(f"qweight {[down, across]} has no weights")
        groups = self.k // self.group
        wanted = {"qzeros": (groups, self.n // each), "scales": (groups, self.n)}
        for part, shape in wanted.items():
            if parts[part].entry.shape != shape or self.k % self.group or self.n % ROWS:
                found = ", ".join(f"{p} {list(s.entry.shape)}" for p, s in parts.items())
                raise self.refusal(f"{found} do not fit {method.bits} bits and groups of {method.group}")
        self.group_of = self.order()
        runs = self.group_of[: self.k // GROUP * GROUP].reshape(-1, GROUP)
        # The group of each 32 weights of a row, where they share one.
        self.group_of_32 = runs[:, 0] if self.k % GROUP == 0 and (runs == runs[:, :1]).all() else None
        self.zeros = self.zero_range()
        middle = 1 << method.bits - 1
        if method.symmetric and self.zeros != (middle, middle):
            raise self.refusal(f"is symmetric by its config, but has zeros of {self.zeros[0]} to {self.zeros[1]}")

    def zero_range(self) -> tuple[int, int]:
        """The least and the largest zero; groups may be as many as weights, so few are unpacked at a time."""
        file, entry = self.parts["qzeros"]
        groups, width = entry.shape
        most = max(1, UNPACKED // width)
        found: list[int] = []
        for start in range(0, groups, most):
            stop = min(start + most, groups)
            words = file.read(entry, start * width, stop * width).reshape(-1, width)
            zeros = self.zero(self.unpacked(words, by_column=True))
            found += [int(zeros.min()), int(zeros.max())]
        return min(found), max(found)

    def refusal(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.method.name} tensor {shown(self.name)}: {rule}")

    def order(self) -> NDArray[np.int32]:
        """The group of each k, [K]."""
        ordered = np.arange(self.k, dtype=np.int32) // np.int32(self.group)
        if "g_idx" not in self.parts:
            if self.method.reordered:
                raise self.refusal("act-order without g_idx is not read")
            return ordered
        file, entry = self.parts["g_idx"]
        if entry.type != "I32" or entry.shape != (self.k,):
            raise self.refusal(f"g_idx is {entry.type} {list(entry.shape)}, not I32 [{self.k}]")
        found: NDArray[np.int32] = file.read(entry, 0, self.k)
        if found.min() < 0 or found.max() > ordered[-1]:
            raise self.refusal(f"g_idx names groups {found.min()} to {found.max()}, but has 0 to {ordered[-1]}")
        return found

    def unpacked(self, words: NDArray[Any], by_column: bool) -> NDArray[np.int16]:
        """Words [a, b] -> codes [a, b * codes a word], or [a * codes a word, b]."""
        bits, each = self.method.bits, 32 // self.method.bits
        words = words.view(np.uint32)
        codes = np.empty((*words.shape, each) if by_column else (len(words), each, words.shape[1]), np.int16)
        for i in range(each):
            at = AWQ_COLUMNS[i] if self.method.name == "awq" else i
            found = words >> np.uint32(bits * i) & np.uint32(2**bits - 1)
            if by_column:
                codes[..., at] = found
            else:
                codes[:, at] = found
        return codes.reshape(len(words), -1) if by_column else codes.reshape(-1, words.shape[1])

    def zero(self, stored: NDArray[np.int16]) -> NDArray[np.int16]:
        """The zeros that stored ones stand for."""
        if self.method.version == 2:
            return stored
        return (stored + np.int16(1)) & np.int16(2**self.method.bits - 1)

    def rows(self, start: int, stop: int) -> tuple[NDArray[np.int16], NDArray[np.int16], Floats]:
        """Rows of W: codes [n, K], zeros and scales [n, groups]; multiples of ROWS."""
        awq, each = self.method.name == "awq", 32 // self.method.bits
        words = self.parts["qweight"].columns(*((start // each, stop // each) if awq else (start, stop)))
        codes = self.unpacked(words, by_column=awq)
        zeros = self.zero(self.unpacked(self.parts["qzeros"].columns(start // each, stop // each), by_column=True))
        scales = self.parts["scales"].columns(start, stop)
        if self.parts["scales"].entry.type == "BF16":
            scales = (scales.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(codes.T), zeros.T, scales.T.astype(np.float32)

    def values(self, start: int, stop: int) -> Floats:
        """Weights of whole rows."""
        codes, zeros, scales = self.rows(start // self.k, stop // self.k)
        codes -= zeros[:, self.group_of]
        with np.errstate(invalid="ignore", over="ignore"):  # scales may be anything
            return (codes.astype(np.float32) * scales[:, self.group_of]).reshape(-1)

    def groups(self, start: int, stop: int) -> Groups:
        """Weights start .. stop - 1 as groups of 32."""
        codes, zeros, scales = self.rows(start // self.k, stop // self.k)
        assert self.group_of_32 is not None
        return Groups(codes.reshape(-1, GROUP), zeros[:, self.group_of_32].ravel(), scales[:, self.group_of_32].ravel())

    def weight(self) -> Weight:
        """The matrix as any other."""
        most = 2**self.method.bits - 1
        codes = Codes(0, most, -self.zeros[1], most - self.zeros[0], False, self.groups)
        return Weight(
            f"{self.name}.weight",
            (self.n, self.k),
            f"{self.method.name.upper()}{self.method.bits}",
            sum(stored.entry.nbytes for stored in self.parts.values()),
            ROWS * self.k,
            values=self.values,
            codes=None if self.group_of_32 is None else codes,
            quantized=True,
            irregular=self.group_of_32 is None,
        )
