"""One range of a tensor into the blocks of its new format, with the error that this makes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, lcm
from typing import NamedTuple

import numpy as np

from ..bits import Floats
from ..block import CHUNK, Blocks, Format
from .rules import Step
from .weight import packed

Encode = Callable[[Floats, int], Blocks]  # values [n, weights of a block], the first one's number -> blocks [n]


class Piece(NamedTuple):
    """Blocks [n], and the sums of the squares of their error and of what they stand for."""

    blocks: Blocks
    error: float = 0.0
    power: float = 0.0


class Unfit(Exception):
    """Weights that are not finite, or blocks whose scale the format cannot hold, in a range that starts there."""

    def __init__(self, step: Step, start: int) -> None:
        super().__init__(step.weight.name, start)
        self.step, self.start = step, start


def ranges(step: Step, rows: bool = False) -> list[tuple[int, int]]:
    """The ranges in which a tensor is gone through, of whole rows if asked for: what a core keeps in its cache."""
    least = lcm(step.weight.step, step.format.weights, step.weight.shape[-1] if rows else 1)
    size, most = step.weight.size, max(1, CHUNK // least) * least
    return [(start, min(start + most, size)) for start in range(0, size, most)]


def piece(step: Step, start: int, stop: int, encode: Encode) -> Piece:
    """Convert one range; Unfit if it cannot be held."""
    weight, fmt = step.weight, step.format
    if step.copied:
        assert weight.tensor is not None
        return Piece(weight.tensor.read(start // fmt.weights, stop // fmt.weights))
    assert weight.values is not None
    x = weight.values(start, stop)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        if step.by_codes:
            assert weight.codes is not None
            blocks = packed(fmt, weight.codes.read(start, stop))
        else:
            blocks = encode(x.reshape(-1, fmt.weights), start)
        if bad(fmt, x, blocks) is not None:
            raise Unfit(step, start)
        made = fmt.decode(blocks).reshape(-1)
        return Piece(blocks, squares(made - x), squares(x))


def bad(fmt: Format, x: Floats, blocks: Blocks) -> tuple[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] | None:
    """What is wrong with a range, and where: of each weight or block whether it is bad; None if nothing is."""
    finite = np.isfinite(x)
    if not finite.all():
        return "NaN or infinite", ~finite
    refused = fmt.refused(x.reshape(-1, fmt.weights), blocks)
    if refused is None:
        return None
    return f"beyond the largest {fmt}" if fmt.plain else f"in need of {fmt.beyond}", refused


def squares(x: Floats) -> float:
    """The sum of squares of any finite values."""
    found = float(np.einsum("i,i->", x, x))
    if 1e-20 < found < inf:
        return found
    return float(np.square(x, dtype=np.float64).sum())  # squares that float32 does not hold
