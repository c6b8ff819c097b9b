"""The checks of `qgemm verify`: each check sees the tiles of one tensor and fills a cell of its line.

A tensor is read in pieces through the file's descriptor, so that memory is bounded for any tensor and row length, and a
file that is truncated meanwhile raises an error. The cores share the tiles of a piece; all checks share a decoded tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray

from qgemm.codec.error_bound import Doubles, a8_exact, a16_bound, excess, magnitudes
from qgemm.codec.format import Blocks, Format
from qgemm.converter.comparison import compare
from qgemm.converter.report import Line
from qgemm.converter.weight import Weight
from qgemm.locks import new_lock
from qgemm.ops import matmul, quantize_activations
from qgemm.parallel import for_slices
from qgemm.tensor import Tensor
from qgemm.text import json_value

from .common import Progress, random_tokens

X_ROWS, SEED = 4, 0  # rows of the random x, and its seed
TILE = 1 << 15  # weights that a thread checks at a time: 2 MiB with temporaries; longer rows are split
PIECE = 1 << 21  # weights that one read loads
ROW = 256  # a vector is split into rows of this length, which every block size of ggml divides
NO_CODEC = "no codec"  # this library can only list the tensor

Booleans = NDArray[np.bool_]


class Cell(NamedTuple):
    """The result of a check as text, whether it is a failure, and the result as numbers if it has any."""

    text: str
    failed: bool = False
    value: Any = None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"failed": self.failed, "found": json_value(self.text if self.value is None else self.value)}


class Tile(NamedTuple):
    """Rows of a piece: blocks [n, b], and their decoded values [n, K], as decoded and in float64.

    first: index of the first block in the whole tensor.
    """

    first: int
    rows: slice
    blocks: Blocks
    values: NDArray[Any]
    exact: Doubles


class Check(ABC):
    """Sees all tiles of a tensor, in any order and from several threads, then returns its result as a Cell."""

    title, key = "", ""  # heading of the column, key in JSON

    def __init__(self, fmt: Format) -> None:
        self.format = fmt
        self.lock = new_lock()

    def begin(self, piece: Tensor) -> None:  # noqa: B027 few need it
        """Prepare for the tiles of a piece, which is a matrix."""

    @abstractmethod
    def see(self, tile: Tile) -> None:
        """Check one tile."""

    @abstractmethod
    def cell(self) -> Cell:
        """The result over all tiles."""


class _BadBlocks(Check):
    """A check of single blocks: counts the bad ones, and remembers the first."""

    def __init__(self, fmt: Format, shape: tuple[int, ...]) -> None:
        super().__init__(fmt)
        self.shape = shape  # [..., blocks in a row]
        self.count, self.first = 0, prod(shape)

    @abstractmethod
    def good(self, tile: Tile) -> Booleans:
        """Whether each value [n, K] of a tile is good."""

    def see(self, tile: Tile) -> None:
        good = self.good(tile).reshape(-1, self.format.weights).all(axis=1)
        if good.all():
            return
        first = tile.first + int(good.argmin())
        with self.lock:
            self.count += int(np.count_nonzero(~good))
            self.first = min(self.first, first)

    def cell(self) -> Cell:
        if not self.count:
            return Cell("ok")
        first = [int(i) for i in np.unravel_index(self.first, self.shape)]
        return Cell(f"{self.count}, first {first}", True, {"blocks": self.count, "first": first})


class Finite(_BadBlocks):
    """No value is NaN or infinite. In a block that only happens when a scale is: no code is NaN or infinite."""

    title, key = "NaN/Inf", "finite"

    def good(self, tile: Tile) -> Booleans:
        finite: Booleans = np.isfinite(tile.values)
        return finite


class Decode(_BadBlocks):
    """The values equal those of the gguf package bit for bit, except that any NaN equals any NaN."""

    title, key = "decode", "decode"

    def good(self, tile: Tile) -> Booleans:
        want = oracle(self.format, tile.blocks).reshape(tile.values.shape)
        same: Booleans = tile.values.view(np.uint32) == want.view(np.uint32)
        same |= np.isnan(tile.values) & np.isnan(want)
        return same


class ProductA16(Check):
    """`matmul(x, w)` with random x is within the bound of float32 sums; the cell shows the worst error / bound."""

    title, key = "a16 err/bound", "a16"

    def __init__(self, fmt: Format, k: int) -> None:
        """k: weights of a row of every piece."""
        super().__init__(fmt)
        self.tokens = random_tokens(X_ROWS, k, SEED)
        self.x = self.tokens.astype(np.float64)
        self.worst = 0.0

    def begin(self, piece: Tensor) -> None:
        self.y = matmul(self.tokens, piece)

    def want(self, tile: Tile) -> tuple[Doubles, Doubles]:
        """The exact product of x and a tile, and its bound."""
        return self.x @ tile.exact.T, a16_bound(self.x, magnitudes(self.format, tile.blocks))

    def see(self, tile: Tile) -> None:
        worst = excess(self.y[:, tile.rows], *self.want(tile))
        with self.lock:
            self.worst = max(self.worst, worst)

    def cell(self) -> Cell:
        return Cell(f"{self.worst:.2g}", self.worst > 1, self.worst)


class ProductA8(ProductA16):
    """`matmul(x, w, "a8")` is within the error bound of its formula, for the same Q8_1 blocks of x."""

    title, key = "a8 err/bound", "a8"

    def __init__(self, fmt: Format, k: int) -> None:
        super().__init__(fmt, k)
        self.prepared = quantize_activations(self.tokens)

    def begin(self, piece: Tensor) -> None:
        self.y = matmul(self.prepared, piece)

    def want(self, tile: Tile) -> tuple[Doubles, Doubles]:
        # Compiled code adds partial dots.
        return a8_exact(self.prepared.blocks, self.format, tile.blocks, partial_dots=True)


CHECKS = (Finite, Decode, ProductA16, ProductA8)


def checks_of(tensor: Tensor) -> list[Check | Cell]:
    """One entry for each of CHECKS: the check, or a cell that says why it does not apply."""
    if 0 in tensor.shape:
        return [Cell("empty")] * len(CHECKS)
    fmt, (_, k) = tensor.format, as_matrix(tensor)
    shape = *tensor.shape[:-1], fmt.blocks_in(tensor.shape[-1])
    checks: list[Check | Cell] = [Finite(fmt, shape) if has_numbers(fmt) else Cell(NO_CODEC)]
    if fmt.levels is None:
        return [*checks, *[Cell(NO_CODEC)] * 3]
    checks.append(Decode(fmt, shape) if has_oracle(fmt) else Cell("no oracle"))
    if tensor.ndim == 1:
        return [*checks, *[Cell("no matrix")] * 2]
    return [*checks, ProductA16(fmt, k), ProductA8(fmt, k) if fmt.integer else Cell("no codes")]


def against(tensor: Tensor, weight: Weight | None, tolerance: float) -> tuple[Cell, Line | None]:
    """Compare with another tensor up to a relative RMS error -> the cell, and the converter's report line."""
    if weight is None:
        return Cell("missing", failed=True), None
    if weight.shape != tensor.shape:
        return Cell(f"shape {weight.shape}", failed=True), None
    identical, line = compare(weight, tensor)
    if identical:
        return Cell("identical"), line
    if line.error is None:
        return Cell(NO_CODEC), line
    passed = line.error == 0 or line.error < tolerance
    return Cell(f"{line.error:.2e} ({weight.type})", not passed, line.error), line


def look(tensor: Tensor, checks: list[Check], progress: Progress) -> None:
    """Show every tile of a tensor to every check."""
    if not checks:
        return
    fmt, (rows, k) = tensor.format, as_matrix(tensor)
    width, step = fmt.blocks_in(k), max(1, PIECE // k)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        blocks = tensor.read(start * width, (start + count) * width).reshape(count, width)
        for check in checks:
            check.begin(Tensor(fmt, (count, k), blocks, tensor.name))

        def work(rows: slice, blocks: Blocks = blocks, start: int = start) -> None:
            part = blocks[rows]
            values = numbers(fmt, part)
            with np.errstate(all="ignore"):  # NaN and infinity are data here
                tile = Tile((start + rows.start) * width, rows, part, values, values.astype(np.float64))
                for check in checks:
                    check.see(tile)
            progress.advance(part.nbytes)

        for_slices(count, max(1, TILE // k), work)


def as_matrix(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of the tensor as a matrix. A vector, and rows longer than a tile, are split into equal rows."""
    *_, k = tensor.shape
    if tensor.ndim == 1:
        k = gcd(k, ROW)
    elif k > TILE:
        weights = tensor.format.weights
        k = weights * next(n for n in range(TILE // weights, 0, -1) if k // weights % n == 0)
    return prod(tensor.shape) // k, k


def has_numbers(fmt: Format) -> bool:
    """Whether the values of a format can be read: it has a decoder, or is a NumPy type."""
    return fmt.levels is not None or fmt.plain


def numbers(fmt: Format, blocks: Blocks) -> NDArray[Any]:
    """Blocks [n, b] -> values [n, K], on the calling thread; [n, 0] for a format without a decoder."""
    if fmt.levels is not None:
        return fmt.decode(blocks.reshape(-1)).reshape(len(blocks), -1)
    return blocks if fmt.plain else np.empty((len(blocks), 0), np.float32)


def oracle(fmt: Format, blocks: Blocks) -> NDArray[np.float32]:
    """The values that the gguf package decodes; NotImplementedError if it has no codec."""
    if fmt.ggml_type is None:
        raise NotImplementedError(f"{fmt} is no ggml type")
    if fmt.ggml_type not in set(GGMLQuantizationType):
        raise NotImplementedError(f"the gguf package does not know {fmt}")
    kind = GGMLQuantizationType(fmt.ggml_type)
    raw = np.ascontiguousarray(blocks).reshape(1, -1).view(np.uint8)
    values: NDArray[np.float32] = gguf_dequantize(raw, kind)
    return values


@cache
def has_oracle(fmt: Format) -> bool:
    """Whether the gguf package decodes this format."""
    try:
        oracle(fmt, np.zeros(1, fmt.dtype))
    except NotImplementedError:
        return False
    return True
