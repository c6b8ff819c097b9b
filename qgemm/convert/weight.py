"""Weight: one tensor of a source, whatever its kind, read in ranges so that none needs to fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats
from qgemm.formats import FORMATS
from qgemm.tensor import Tensor

SAFETENSORS = "safetensors."  # starts the keys of metadata that a safetensors file had
GROUP = 32  # weights that share a scale in every format that takes codes as they are


class Groups(NamedTuple):
    """Groups of 32 weights as integers: w = scale * (codes - zero) + minimum.

    codes [n, 32] and zero [n] or [] int16, scale and minimum [n] float32; minimum is None where there is none.
    """

    codes: NDArray[np.int16]
    zero: NDArray[np.int16]
    scale: Floats
    minimum: Floats | None = None

    def values(self) -> Floats:
        """The weights [32 n], as every decoder of such groups computes them."""
        w = (self.codes - self.zero.reshape(-1, 1)).astype(np.float32)
        w *= self.scale[:, None]
        if self.minimum is not None:
            w += self.minimum[:, None]
        return w.reshape(-1)


class Codes(NamedTuple):
    """A tensor as integers, before any is read: the codes are `least` to `most`, less their zero `low` to `high`.

    minimum: whether there is one besides the zero. read: (start, stop) in weights, multiples of 32 -> Groups.
    """

    least: int
    most: int
    low: int
    high: int
    minimum: bool
    read: Callable[[int, int], Groups]


@dataclass(frozen=True)
class Weight:
    """One tensor [..., N, K]; ranges of its weights are counted in C order and start and end at multiples of `step`.

    type: what its source calls its type.
    tensor: the blocks that the source holds, to be copied; None if no format of ours has them.
    values: (start, stop) -> weights [stop - start] float32; None if the type has no decoder, or is one of integers.
    codes: the same weights as integers with scales; None if they are not.
    quantized: whether the weights were quantized already.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    step: int
    tensor: Tensor | None = None
    values: Callable[[int, int], Floats] | None = None
    codes: Codes | None = None
    quantized: bool = False

    @property
    def size(self) -> int:
        """How many weights."""
        return prod(self.shape)


@dataclass
class Source:
    """What is converted: tensors by name, in order, and metadata for a .gguf file (is_gguf: as one had it)."""

    path: str
    weights: Mapping[str, Weight]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None
    is_gguf: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.nbytes for weight in self.weights.values())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def of_tensor(tensor: Tensor) -> Weight:
    """A Weight of blocks that a source holds."""
    fmt = tensor.format
    return Weight(
        tensor.name,
        tensor.shape,
        str(fmt),
        tensor.nbytes,
        fmt.weights,
        tensor,
        _values(tensor),
        _codes(tensor),
        not fmt.plain,
    )


def _values(tensor: Tensor) -> Callable[[int, int], Floats] | None:
    fmt = tensor.format
    if fmt.levels is None and fmt.name != "f64":
        return None

    def values(start: int, stop: int) -> Floats:
        blocks = tensor.read(start // fmt.weights, stop // fmt.weights)
        if fmt.levels is None:
            with np.errstate(over="ignore"):  # float64 beyond float32 is found as infinity is
                return blocks.astype(np.float32)
        return fmt.decode(blocks).reshape(-1)

    return values


# ---------------------------------------------------------------- codes of a source into the blocks of a format


class Grid(NamedTuple):
    """The codes that a format has: `codes` of them, with a minimum, or with this zero."""

    codes: int
    zero: int | None


GRIDS = {
    "q4_0": Grid(16, 8),
    "q4_1": Grid(16, None),
    "q5_0": Grid(32, 16),
    "q5_1": Grid(32, None),
    "q8_0": Grid(256, 128),
}
SIGNED = "q8_0"  # holds its codes less the zero


def takes(fmt: Format, codes: Codes | None) -> bool:
    """Whether a format has all codes that a tensor may have, so that nothing but scales is rounded."""
    grid = GRIDS.get(fmt.name)
    if grid is None or codes is None:
        return False
    if grid.zero is None:
        return codes.least >= 0 and codes.most < grid.codes
    return not codes.minimum and codes.low >= -grid.zero and codes.high < grid.codes - grid.zero


def packed(fmt: Format, groups: Groups) -> Blocks:
    """Groups whose codes the format takes -> blocks [n], with the scales rounded to float16."""
    zero = GRIDS[fmt.name].zero
    codes, minimum = groups.codes, groups.minimum
    if zero is None:
        if minimum is None:
            minimum = -groups.zero.astype(np.float32) * groups.scale + np.float32(0)
        minimum = np.broadcast_to(minimum, groups.scale.shape)
    else:
        codes = codes - groups.zero.reshape(-1, 1)
        if fmt.name != SIGNED:
            codes = codes + np.int16(zero)
    assert fmt.pack is not None
    return fmt.pack(Levels(codes.astype(np.int8 if fmt.name == SIGNED else np.uint8), groups.scale, minimum))


def _codes(tensor: Tensor) -> Codes | None:
    """The codes of a tensor of one of the formats above, or of Q8_1, whose blocks are Q8_0's and a sum."""
    fmt = tensor.format
    grid = GRIDS.get("q8_0" if fmt.name == "q8_1" else fmt.name)
    if grid is None:
        return None

    def read(start: int, stop: int) -> Groups:
        levels = fmt.decode_levels(tensor.read(start // GROUP, stop // GROUP))
        assert levels.scale is not None
        minimum = None if levels.minimum is None else levels.minimum[:, 0]
        codes = levels.codes[:, 0].astype(np.int16)
        return Groups(codes, np.array(levels.zero, np.int16), levels.scale[:, 0], minimum)

    if grid.zero is None:
        return Codes(0, grid.codes - 1, 0, grid.codes - 1, True, read)
    first = -grid.zero if grid.codes == 256 else 0
    return Codes(first, first + grid.codes - 1, -grid.zero, grid.codes - 1 - grid.zero, False, read)


assert all(name in FORMATS for name in GRIDS)
