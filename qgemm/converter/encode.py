"""One range of a tensor into the blocks of its new format, with the error that this makes."""

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

from .rules import Options, Step, importance_of
from .searching import searcher
from .weight import packed

TOGETHER = 1 << 20  # weights that a few threads have at a time, in 40 MiB: long ranges, short waits for each other

Encode = Callable[[Floats, int], Blocks]  # values [n, weights of a block], the first one's number -> blocks [n]
Faults = tuple[str, NDArray[np.bool_]]  # what is wrong with a range, and of each weight or block whether it is bad


class Piece(NamedTuple):
    """Blocks [n], and the sums of the squares of their error and of what they stand for."""

    blocks: Blocks
    error: float = 0.0
    power: float = 0.0


class Unfit(Exception):
    """Weights that are not finite, or blocks whose scale is not or cannot be held, in the tensor of a step."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.weight.name)
        self.step = step


def share(threads: int) -> int:
    """The weights of a range, of which so many threads have one each."""
    return max(TOGETHER // threads, CHUNK)


def ranges(step: Step, weights: int, rows: bool = False) -> list[tuple[int, int]]:
    """The ranges of about so many weights in which a tensor is gone through; rows: whole ones, if so many have one."""
    k = step.weight.shape[-1]
    whole = step.format.whole_rows or (rows and k <= weights)
    least = lcm(step.weight.step, step.format.weights, k if whole else 1)
    size, most = step.weight.size, max(1, weights // least) * least
    return [(start, min(start + most, size)) for start in range(0, size, most)]


def piece(step: Step, start: int, stop: int, encode: Encode) -> Piece:
    """Convert one range; Unfit if it cannot be held."""
    fmt = step.format
    if step.copied:
        blocks = copied(step, start, stop)
        if damaged(fmt, blocks) is not None:
            raise Unfit(step)
        return Piece(blocks)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        x, blocks = encoded(step, start, stop, encode)
        if bad(fmt, x, blocks) is not None:
            raise Unfit(step)
        made = np.array(fmt.decode(blocks), copy=fmt.plain).reshape(-1)  # plain ones may be the blocks themselves
        made -= x
        return Piece(blocks, squares(made), squares(x))


def copied(step: Step, start: int, stop: int) -> Blocks:
    """The blocks of one range of a tensor that keeps its type."""
    assert step.weight.tensor is not None
    return step.weight.tensor.read(start // step.format.weights, stop // step.format.weights)


def encoded(step: Step, start: int, stop: int, encode: Encode) -> tuple[Floats, Blocks]:
    """The weights of one range, and their blocks: from the codes of the source if they fit."""
    if step.by_codes:
        assert step.weight.codes is not None
        groups = step.weight.codes.read(start, stop)
        return groups.values(), packed(step.format, groups)
    assert step.weight.values is not None
    x = step.weight.values(start, stop)
    width = step.weight.shape[-1] if step.format.whole_rows else step.format.weights  # that are encoded together
    return x, encode(x.reshape(-1, width), start)


class Encoder(NamedTuple):
    """How weights become blocks; search: by looking for better scales; importance: by which it weighs their errors."""

    encode: Encode
    search: bool = False
    importance: Importance | None = None


def encoder(step: Step, options: Options) -> Encoder:
    """The format's own, or the search for better scales where that is wanted and there is one."""
    weight, fmt = step.weight, step.format
    importance = importance_of(weight, options)
    if not searched(fmt) or step.copied or step.by_codes or not (options.search or importance is not None):
        return Encoder(lambda x, start: fmt.encoded(x))
    return Encoder(searcher(weight, fmt, importance), True, importance)


def faults(step: Step, start: int, stop: int, encode: Encode) -> Faults | None:
    """What is wrong with one range, as in `piece`; None if nothing is."""
    if step.copied:
        found = damaged(step.format, copied(step, start, stop))
        return None if found is None else ("damaged: a scale is not finite", found)
    with np.errstate(over="ignore", invalid="ignore"):
        return bad(step.format, *encoded(step, start, stop, encode))


def damaged(fmt: Format, blocks: Blocks) -> NDArray[np.bool_] | None:
    """Which blocks have scales that are not finite, [n]; None if none has. Plain numbers may be anything."""
    found = np.zeros(len(blocks), np.bool_)
    for name in fmt.scale_fields:
        found |= ~np.isfinite(blocks[name])
    return found if found.any() else None


def bad(fmt: Format, x: Floats, blocks: Blocks) -> Faults | None:
    """What is wrong with weights or their blocks; None if nothing is."""
    refused = fmt.refused(x.reshape(-1, fmt.weights), blocks)
    if refused is None and not fmt.plain:  # in blocks NaN and infinity are refused too
        return None
    finite = np.isfinite(x)
    if not finite.all():
        return "NaN or infinite", ~finite
    if refused is None:
        return None
    return f"beyond the largest {fmt}" if fmt.plain else f"in need of {fmt.beyond}", refused


def squares(x: NDArray[np.floating]) -> float:
    """The sum of squares, of whatever size."""
    if x.dtype != np.float32:
        return float(np.square(x, dtype=np.float64).sum())
    found = float(np.einsum("i,i->", x, x))
    if 1e-20 < found < inf:
        return found
    return float(np.square(x, dtype=np.float64).sum())  # squares that float32 does not hold
