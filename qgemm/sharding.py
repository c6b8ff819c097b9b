"""Shares of an axis: the steps of it that each rank of a group holds, so that cuts lie where blocks and tiles end."""

from __future__ import annotations

from itertools import pairwise
from operator import index

from .errors import ShapeError

ROWS = 64  # rows of W in a tile of a GPU: shares of other sizes would be padded there


def shares(size: int, step: int, world: int, who: str = "an axis") -> list[slice]:
    """The part of an axis of each rank: whole steps, as even as they divide; the last may be cut short by the end.

    ShapeError if there are fewer steps than ranks, with the number that would do; `who` names the axis.

    >>> shares(100, 32, 3)
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    """
    world, step = index(world), index(step)
    if world < 1 or step < 1:
        raise ValueError(f"a group has at least one rank, and a step is at least 1; got {world} and {step}")
    steps = -(-size // step)
    if steps < world:
        limit = f"at most {steps} shares" if steps > 1 else "no shares"
        raise ShapeError(f"{who} of {size} cut in multiples of {step} gives {limit}, not {world}")
    ends = [min(size, steps * rank // world * step) for rank in range(world + 1)]
    return [slice(*pair) for pair in pairwise(ends)]
