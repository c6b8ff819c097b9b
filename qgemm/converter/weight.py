"""Weight: one tensor of any source, read in ranges so that it need not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import Blocks, Format, Levels
from qgemm.codec.packing import Floats
from qgemm.errors import CheckpointError
from qgemm.files.paths import shown
from qgemm.formats import FORMATS
from qgemm.packed import Packed
from qgemm.tensor import Tensor

SAFETENSORS = "safetensors."  # prefix of metadata keys that come from a safetensors file
PLAIN = FORMATS["f32"]
GROUP_FAMILY = "groups"  # the family of formats with one group per block (qgemm/formats/groups.py)
EXACT_HALF = 2048  # float16 holds every integer up to this one
GROUP = 32  # weights per scale in every format into which codes are copied
GGML_DIMS = 4  # most dimensions that ggml reads


class Groups(NamedTuple):
    """Groups of 32 weights as integers: w = scale * (codes - zero) + minimum.

    codes [n, 32] and zero [n] or [] int16, scale and minimum [n] float32; minimum is None where there is none.
    """

    codes: NDArray[np.int16]
    zero: NDArray[np.int16]
    scale: Floats
    minimum: Floats | None = None

    def values(self) -> Floats:
        """The weights [32 n], computed as every decoder of these groups computes them."""
        w = (self.codes - self.zero.reshape(-1, 1)).astype(np.float32)
        with np.errstate(all="ignore"):  # files may hold any bits
            w *= self.scale[:, None]
            if self.minimum is not None:
                w += self.minimum[:, None]
        return w.reshape(-1)


class Codes(NamedTuple):
    """Integer view of a tensor, read lazily. Raw codes lie in [least, greatest], codes minus zero in [low, high].

    minimum: whether groups have a minimum besides the zero. read: (start, stop) in weights, multiples of 32 -> Groups.
    group: adjacent weights that share scale and zero. whole_rows: whether each row is one such group.
    """

    least: int
    greatest: int
    low: int
    high: int
    minimum: bool
    read: Callable[[int, int], Groups]
    group: int = GROUP
    whole_rows: bool = False


@dataclass(frozen=True)
class Weight:
    """One tensor [..., N, K] of the dimensions that it has in a .gguf file.

    Ranges of its weights are counted in C order; they start and end at multiples of `step`.

    type: the source's name of its type.
    tensor: the source's blocks, which can be copied; None if no format here describes them.
    values: (start, stop) -> weights [stop - start] float32; None if the type has no decoder, or holds integers.
    codes: the same weights as integers with scales; None if they are not such.
    quantized: whether the source already quantized the weights.
    irregular: whether weights share scales in a pattern that no format's blocks have; Q8_0 then loses least.
    original: the shape outside .gguf files, None if it is `shape`.
    kept_as: the format of the tensor in a file that does not quantize it, None if it is its own.
    shard: the number of its file in a split .gguf model.
    native: reads the whole tensor into a format that holds the source's weights exactly, where ggml has no such type;
    CheckpointError gives the reason where no format does. None: `tensor` is that.
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
        """The number of weights."""
        return prod(self.shape)


@dataclass
class Source:
    """The input of a conversion: tensors by name, in order, and metadata for a .gguf file.

    is_gguf: whether the metadata is that of a .gguf file. files: all files that belong to the source (shards, indexes,
    configs), which are never overwritten. shards: the number of shards of the model, of which this may be one.
    notes: sentences for the user about tensors that are missing here. beside: files of a folder beside its weights.
    """

    path: str
    weights: Mapping[str, Weight]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None
    is_gguf: bool = False
    files: Sequence[str] = ()
    shards: int = 1
    notes: Sequence[str] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(weight.nbytes for weight in self.weights.values())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with at most the dimensions of ggml: leading ones are joined."""
    return shape if len(shape) <= GGML_DIMS else (prod(shape[: 1 - GGML_DIMS]), *shape[1 - GGML_DIMS :])


def original_shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape if ggml cannot hold it, else None."""
    return shape if len(shape) > GGML_DIMS else None


def weight_from_tensor(tensor: Tensor, original: tuple[int, ...] | None = None) -> Weight:
    """A Weight of a source's blocks; original: the shape outside .gguf files if it differs."""
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
        original=original,
    )


def weight_from_numbers(name: str, numbers: Floats) -> Weight:
    """A Weight of numbers in memory, float32 of any shape that a .gguf file holds."""
    values = np.ascontiguousarray(numbers, np.float32)
    return weight_from_tensor(Tensor(PLAIN, values.shape, values, name))


def numbers_of(weight: Weight) -> Callable[[int, int], Floats]:
    """The reader of a weight's numbers; CheckpointError if it holds integers or has no decoder."""
    if weight.values is None:
        rule = f"is {weight.type}, which has no decoder" if weight.quantized else f"holds integers ({weight.type})"
        raise CheckpointError(f"tensor {shown(weight.name)}: {rule}")
    return weight.values


def _values(tensor: Tensor) -> Callable[[int, int], Floats] | None:
    fmt = tensor.format
    if fmt.levels is None and fmt.name != "f64":
        return None

    def values(start: int, stop: int) -> Floats:
        blocks = tensor.read(start // fmt.weights, stop // fmt.weights)
        if fmt.levels is None:
            with np.errstate(all="ignore"):  # float64 beyond float32 becomes infinity, which is refused later
                return blocks.astype(np.float32)
        return fmt.decoded(blocks).reshape(-1)

    return values


# ---------------------------------------------------------------- codes of a source into the blocks of a format


def has_integer_groups(fmt: Format) -> bool:
    """Whether blocks are groups of 32 integers with one scale, and a minimum or a zero that all groups share."""
    return fmt.integer and fmt.codebook is None and fmt.weights == fmt.group == GROUP and fmt.zero is not None


def packs_integer_groups(fmt: Format) -> bool:
    """Whether codes can be copied into blocks of a format."""
    return has_integer_groups(fmt) and fmt.pack is not None


def codes_fit(fmt: Format, codes: Codes | None) -> bool:
    """Whether a format holds every code that a tensor may have, so that only scales are rounded."""
    if codes is not None and fmt.family == GROUP_FAMILY:
        return _codes_fit_groups(fmt, codes)
    if codes is None or not packs_integer_groups(fmt):
        return False
    lowest, highest = fmt.code_range
    if fmt.has_minimum:
        return codes.least >= lowest and codes.greatest <= highest
    assert fmt.zero is not None
    return not codes.minimum and codes.low >= lowest - fmt.zero and codes.high <= highest - fmt.zero


def _codes_fit_groups(fmt: Format, codes: Codes) -> bool:
    """Whether a group format holds every code and zero of a tensor, and none of its groups spans several scales."""
    if (
        codes.minimum
        or codes.group % fmt.weights
        or (fmt.encoding.whole_rows and not codes.whole_rows)
        or fmt.needs_table
    ):
        return False
    top = fmt.code_range[1]
    if not fmt.zero_field:
        return fmt.zero is not None and codes.low >= -fmt.zero and codes.high <= top - fmt.zero
    zeros = codes.greatest - codes.high, codes.least - codes.low  # least and greatest zero
    largest = np.iinfo(fmt.dtype[fmt.zero_field]).max if fmt.dtype[fmt.zero_field].kind == "u" else EXACT_HALF
    return codes.least >= 0 and codes.greatest <= top and min(zeros) >= 0 and max(zeros) <= largest


def _pack_group_format(fmt: Format, groups: Groups) -> Blocks:
    """Pack groups of 32 into blocks [n] of a group format; scales are rounded to its type."""
    parts = fmt.weights // GROUP
    zero = np.broadcast_to(groups.zero, groups.scale.shape)
    codes = groups.codes if fmt.zero_field else groups.codes - zero[:, None] + np.int16(fmt.zero or 0)
    assert fmt.pack is not None
    unsigned = codes.astype(np.uint8).reshape(-1, 1, fmt.weights)
    return fmt.pack(Levels(unsigned, groups.scale[::parts, None], zero=zero[::parts, None]))


def pack_groups(fmt: Format, groups: Groups) -> Blocks:
    """Pack groups into blocks [n] of a format that holds their codes; scales are rounded to float16."""
    if fmt.family == GROUP_FAMILY:
        return _pack_group_format(fmt, groups)
    codes, minimum = groups.codes, groups.minimum
    if fmt.has_minimum:
        if minimum is None:
            with np.errstate(all="ignore"):  # overflow is refused when the block is written
                minimum = -groups.zero.astype(np.float32) * groups.scale + np.float32(0)
        minimum = np.broadcast_to(minimum, groups.scale.shape)
    else:
        codes = codes - groups.zero.reshape(-1, 1) + np.int16(fmt.zero or 0)
    assert fmt.pack is not None
    return fmt.pack(Levels(codes.astype(np.int8 if fmt.code_range[0] < 0 else np.uint8), groups.scale, minimum))


def _codes(tensor: Tensor) -> Codes | None:
    """The codes of a tensor whose format has integer groups, whether or not it can pack them."""
    fmt = tensor.format
    if fmt.family == GROUP_FAMILY:
        return _codes_of_groups(tensor)
    if not has_integer_groups(fmt):
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
    """The codes of a tensor of a group format; None where zeros are floats or codes index a codebook."""
    fmt = tensor.format
    if fmt.codebook is not None or (fmt.zero_field and fmt.dtype[fmt.zero_field].kind == "f"):
        return None
    parts = fmt.weights // GROUP

    def read(start: int, stop: int) -> Groups:
        levels = fmt.decode_levels(tensor.read(start // fmt.weights, stop // fmt.weights))
        assert levels.scale is not None
        zero = np.broadcast_to(np.asarray(levels.zero, np.int16), levels.scale.shape)
        codes = levels.codes.reshape(-1, GROUP).astype(np.int16)
        return Groups(codes, zero[:, 0].repeat(parts), levels.scale[:, 0].repeat(parts))

    highest = fmt.code_range[1]
    low, high = (-255, highest) if fmt.zero_field else (-(fmt.zero or 0), highest - (fmt.zero or 0))
    return Codes(0, highest, low, high, False, read, fmt.weights, fmt.encoding.whole_rows)
