"""Encode one range of a tensor into blocks of its new format, and measure the error."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.codec.search import searched
from qgemm.files.imatrix import Importance

from .rules import Options, Step
from .scale_search import block_search
from .weight import pack_groups

RANGE_WEIGHTS = 1 << 20  # weights in flight on all threads together (40 MiB): ranges stay long, waits short


Encode = Callable[[Floats, int], Blocks]  # (values [n, weights per block], index of the first) -> blocks [n]
Faults = tuple[str, NDArray[np.bool_]]  # description of the fault, and a mask of faulty weights or blocks


class EncodedRange(NamedTuple):
    """Blocks [n], the sum of squared errors of their weights, and the sum of squares of the weights."""

    blocks: Blocks
    error: float = 0.0
    power: float = 0.0


class UnencodableRange(Exception):
    """A range cannot be encoded: weights are not finite, or a scale is not finite or too large for the format."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.weight.name)
        self.step = step


def range_size(threads: int) -> int:
    """The weights of a range, so that one range per thread amounts to RANGE_WEIGHTS."""
    return max(RANGE_WEIGHTS // threads, CHUNK)


def ranges(step: Step, weights: int, rows: bool = False) -> list[tuple[int, int]]:
    """Split a tensor into ranges of about `weights` weights.

    rows: split between rows, unless a row is longer than `weights`.
    """
    k = step.weight.shape[-1]
    whole_rows = step.format.encoding.whole_rows or (rows and k <= weights)
    least = lcm(step.weight.step, step.format.weights, k if whole_rows else 1)
    size, size_of_range = step.weight.size, max(1, weights // least) * least
    return [(start, min(start + size_of_range, size)) for start in range(0, size, size_of_range)]


def encode_range(step: Step, start: int, stop: int, encode: Encode) -> EncodedRange:
    """Convert one range; UnencodableRange if the format cannot hold it."""
    fmt = step.format
    if step.copied:
        blocks = read_blocks(step, start, stop)
        if bad_scales(fmt, blocks) is not None:
            raise UnencodableRange(step)
        return EncodedRange(blocks)
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is detected below
        x, blocks = encode_weights(step, start, stop, encode)
        if weight_faults(fmt, x, blocks) is not None:
            raise UnencodableRange(step)
        values = fmt.decoded(blocks)
        decoded = np.array(values, copy=np.may_share_memory(values, blocks)).reshape(-1)  # f32 decodes to its blocks
        decoded -= x
        return EncodedRange(blocks, squared_norm(decoded), squared_norm(x))


def read_blocks(step: Step, start: int, stop: int) -> Blocks:
    """Read the blocks of a range of a tensor that keeps its type."""
    assert step.weight.tensor is not None
    return step.weight.tensor.read(start // step.format.weights, stop // step.format.weights)


def encode_weights(step: Step, start: int, stop: int, encode: Encode) -> tuple[Floats, Blocks]:
    """The weights of a range and their blocks, built from the source's codes where the format holds them."""
    if step.by_codes:
        assert step.weight.codes is not None
        groups = step.weight.codes.read(start, stop)
        return groups.values(), pack_groups(step.format, groups)
    assert step.weight.values is not None
    x = step.weight.values(start, stop)
    return x, encode(x.reshape(-1, encoded_together(step)), start)


def encoded_together(step: Step) -> int:
    """The number of weights that an encoder takes together: a block, or a row."""
    return step.weight.shape[-1] if step.format.encoding.whole_rows else step.format.weights


class Encoder(NamedTuple):
    """A function that encodes weights.

    search: it searches for better scales, weighting errors by `importance` if there is one.
    """

    encode: Encode
    search: bool = False
    importance: Importance | None = None


def choose_encoder(step: Step, options: Options) -> Encoder:
    """The format's own encoder, or the search for better scales where requested and supported."""
    fmt, importance = step.format, step.importance
    if not (step.quantizes and searched(fmt)) or (importance is None and not options.search):
        return Encoder(lambda x, start: fmt.encoded(x))
    return Encoder(block_search(step.weight, fmt, importance), True, importance)


def find_faults(step: Step, start: int, stop: int, encode: Encode) -> Faults | None:
    """The faults of one range, checked as in `encode_range`; None if it has none."""
    if step.copied:
        mask = bad_scales(step.format, read_blocks(step, start, stop))
        return None if mask is None else ("damaged: a scale is not finite", mask)
    with np.errstate(over="ignore", invalid="ignore"):
        return weight_faults(step.format, *encode_weights(step, start, stop, encode))


def bad_scales(fmt: Format, blocks: Blocks) -> NDArray[np.bool_] | None:
    """The mask [n] of blocks whose scales are not finite, None if there are none. Plain numbers may be anything."""
    mask = np.zeros(len(blocks), np.bool_)
    for name in fmt.scale_fields:
        mask |= ~np.isfinite(blocks[name])
    return mask if mask.any() else None


def weight_faults(fmt: Format, x: Floats, blocks: Blocks) -> Faults | None:
    """The faults of weights or their blocks; None if they have none."""
    refused = fmt.refused(x.reshape(-1, fmt.weights), blocks)
    if refused is None and not fmt.plain:  # block formats do not hold NaN and infinity either
        return None
    finite = np.isfinite(x)
    if not finite.all():
        return "NaN or infinite", ~finite
    if refused is None:
        return None
    return f"beyond the largest {fmt}" if fmt.plain else f"in need of {fmt.beyond}", refused


def squared_norm(x: NDArray[np.floating]) -> float:
    """The sum of squares in float64, or in float32 where that neither overflows nor underflows."""
    if x.dtype != np.float32:
        return float(np.square(x, dtype=np.float64).sum())
    total = float(np.einsum("i,i->", x, x))
    if 1e-20 < total < inf:
        return total
    return float(np.square(x, dtype=np.float64).sum())  # float32 overflows or underflows
