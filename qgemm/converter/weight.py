"""Weight: one tensor of a source, whatever its kind, read in ranges so that none needs to fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats
from qgemm.files.gguf.layout import MAX_DIMS
from qgemm.formats import FORMATS
from qgemm.packed import Packed
from qgemm.tensor import Tensor

SAFETENSORS = "safetensors."  # starts the keys of metadata that a safetensors file had
PLAIN = FORMATS["f32"]
GROUPS = "groups"  # the family of formats whose groups are blocks (qgemm/formats/groups.py)
EXACT_HALF = 2048  # up to here every integer is a float16
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
        with np.errstate(all="ignore"):  # whatever files hold is data here
            w *= self.scale[:, None]
            if self.minimum is not None:
                w += self.minimum[:, None]
        return w.reshape(-1)


class Codes(NamedTuple):
    """A tensor as integers, before any is read: the codes are `least` to `most`, less their zero `low` to `high`.

    minimum: whether there is one besides the zero. read: (start, stop) in weights, multiples of 32 -> Groups.
    group: how many weights side by side share scale and zero. whole_rows: whether all of a row do.
    """

    least: int
    most: int
    low: int
    high: int
    minimum: bool
    read: Callable[[int, int], Groups]
    group: int = GROUP
    whole_rows: bool = False


@dataclass(frozen=True)
class Weight:
    """One tensor [..., N, K] of at most 4 dimensions, as .gguf files have them.

    Ranges of its weights are counted in C order, and start and end at multiples of `step`.

    type: what its source calls its type.
    tensor: the blocks that the source holds, to be copied; None if no format of ours has them.
    values: (start, stop) -> weights [stop - start] float32; None if the type has no decoder, or is one of integers.
    codes: the same weights as integers with scales; None if they are not.
    quantized: whether the weights were quantized already.
    irregular: whether their scales are shared otherwise than in any format's blocks, of which Q8_0 then holds most.
    original: the shape outside .gguf files, where it is another one.
    kept_as: the format in which a file keeps it that is not to quantize it, where that is not its own.
    shard: which file of a split .gguf model it is in.
    native: reads it whole into a format that holds exactly what the source has, where that is none of ggml's types;
    CheckpointError says why where there is no such format. None: `tensor` is it.
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
    irregular: bool = False
    original: tuple[int, ...] | None = None
    kept_as: Format | None = None
    shard: int = 0
    native: Callable[[], Packed] | None = None

    @property
    def size(self) -> int:
        """How many weights."""
        return prod(self.shape)


@dataclass
class Source:
    """What is converted: tensors by name, in order, and metadata for a .gguf file (is_gguf: as one had it).

    files: the paths of all files that belong to it, shards, indexes and configs, none of which is ever written over.
    """

    path: str
    weights: Mapping[str, Weight]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None
    is_gguf: bool = False
    files: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.nbytes for weight in self.weights.values())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape in as many dimensions as a .gguf file has: the first ones joined."""
    return shape if len(shape) <= MAX_DIMS else (prod(shape[: 1 - MAX_DIMS]), *shape[1 - MAX_DIMS :])


def original_shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape, if a .gguf file cannot hold it."""
    return shape if len(shape) > MAX_DIMS else None


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


def of_numbers(name: str, numbers: Floats) -> Weight:
    """A Weight of numbers in memory, float32 of any shape that a .gguf file has."""
    values = np.ascontiguousarray(numbers, np.float32)
    return of_tensor(Tensor(PLAIN, values.shape, values, name))


def _values(tensor: Tensor) -> Callable[[int, int], Floats] | None:
    fmt = tensor.format
    if fmt.levels is None and fmt.name != "f64":
        return None

    def values(start: int, stop: int) -> Floats:
        blocks = tensor.read(start // fmt.weights, stop // fmt.weights)
        if fmt.levels is None:
            with np.errstate(all="ignore"):  # float64 beyond float32 is found as infinity is
                return blocks.astype(np.float32)
        return fmt.decode(blocks).reshape(-1)

    return values


# ---------------------------------------------------------------- codes of a source into the blocks of a format


def holds_codes(fmt: Format) -> bool:
    """Whether blocks are such groups: 32 integers with one scale, and a minimum or a zero that all groups share."""
    return fmt.integer and fmt.codebook is None and fmt.weights == fmt.group == GROUP and fmt.zero is not None


def takes_codes(fmt: Format) -> bool:
    """Whether blocks can be made of codes as they are."""
    return holds_codes(fmt) and fmt.pack is not None


def takes(fmt: Format, codes: Codes | None) -> bool:
    """Whether a format has all codes that a tensor may have, so that nothing but scales is rounded."""
    if codes is not None and fmt.family == GROUPS:
        return _takes_groups(fmt, codes)
    if codes is None or not takes_codes(fmt):
        return False
    lowest, highest = fmt.code_range
    if fmt.has_minimum:
        return codes.least >= lowest and codes.most <= highest
    assert fmt.zero is not None
    return not codes.minimum and codes.low >= lowest - fmt.zero and codes.high <= highest - fmt.zero


def _takes_groups(fmt: Format, codes: Codes) -> bool:
    """Whether a group format has all codes and zeros of a tensor, and its groups are none of several scales."""
    if codes.minimum or codes.group % fmt.weights or (fmt.whole_rows and not codes.whole_rows) or fmt.needs_table:
        return False
    most = fmt.code_range[1]
    if not fmt.zero_field:
        return fmt.zero is not None and codes.low >= -fmt.zero and codes.high <= most - fmt.zero
    zeros = codes.most - codes.high, codes.least - codes.low  # the least, the greatest
    largest = np.iinfo(fmt.dtype[fmt.zero_field]).max if fmt.dtype[fmt.zero_field].kind == "u" else EXACT_HALF
    return codes.least >= 0 and codes.most <= most and min(zeros) >= 0 and max(zeros) <= largest


def _packed_groups(fmt: Format, groups: Groups) -> Blocks:
    """Groups of 32 whose codes a group format takes -> blocks [n], with the scales rounded to their type."""
    each = fmt.weights // GROUP
    zero = np.broadcast_to(groups.zero, groups.scale.shape)
    codes = groups.codes if fmt.zero_field else groups.codes - zero[:, None] + np.int16(fmt.zero or 0)
    assert fmt.pack is not None
    unsigned = codes.astype(np.uint8).reshape(-1, 1, fmt.weights)
    return fmt.pack(Levels(unsigned, groups.scale[::each, None], zero=zero[::each, None]))


def packed(fmt: Format, groups: Groups) -> Blocks:
    """Groups whose codes the format takes -> blocks [n], with the scales rounded to float16."""
    if fmt.family == GROUPS:
        return _packed_groups(fmt, groups)
    codes, minimum = groups.codes, groups.minimum
    if fmt.has_minimum:
        if minimum is None:
            with np.errstate(all="ignore"):  # what overflows is refused when it is written
                minimum = -groups.zero.astype(np.float32) * groups.scale + np.float32(0)
        minimum = np.broadcast_to(minimum, groups.scale.shape)
    else:
        codes = codes - groups.zero.reshape(-1, 1) + np.int16(fmt.zero or 0)
    assert fmt.pack is not None
    return fmt.pack(Levels(codes.astype(np.int8 if fmt.code_range[0] < 0 else np.uint8), groups.scale, minimum))


def _codes(tensor: Tensor) -> Codes | None:
    """The codes of a tensor whose format holds such, whether or not it takes others'."""
    fmt = tensor.format
    if fmt.family == GROUPS:
        return _codes_of_groups(tensor)
    if not holds_codes(fmt):
        return None

    def read(start: int, stop: int) -> Groups:
        levels = fmt.decode_levels(tensor.read(start // GROUP, stop // GROUP))
        assert levels.scale is not None
        minimum = None if levels.minimum is None else levels.minimum[:, 0]
        codes = levels.codes[:, 0].astype(np.int16)
        return Groups(codes, np.array(levels.zero, np.int16), levels.scale[:, 0], minimum)

    (lowest, highest), zero = fmt.code_range, fmt.zero or 0
    return Codes(lowest, highest, lowest - zero, highest - zero, fmt.has_minimum, read)


def _codes_of_groups(tensor: Tensor) -> Codes | None:
    """The codes of a tensor of a group format, None where zeros are floats or there are two codes for two signs."""
    fmt = tensor.format
    if fmt.codebook is not None or (fmt.zero_field and fmt.dtype[fmt.zero_field].kind == "f"):
        return None
    each = fmt.weights // GROUP

    def read(start: int, stop: int) -> Groups:
        levels = fmt.decode_levels(tensor.read(start // fmt.weights, stop // fmt.weights))
        assert levels.scale is not None
        zero = np.broadcast_to(np.asarray(levels.zero, np.int16), levels.scale.shape)
        codes = levels.codes.reshape(-1, GROUP).astype(np.int16)
        return Groups(codes, zero[:, 0].repeat(each), levels.scale[:, 0].repeat(each))

    most = fmt.code_range[1]
    low, high = (-255, most) if fmt.zero_field else (-(fmt.zero or 0), most - (fmt.zero or 0))
    return Codes(0, most, low, high, False, read, fmt.weights, fmt.whole_rows)
