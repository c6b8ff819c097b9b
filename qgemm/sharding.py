"""Shares of an axis: how many steps of it each rank of a group takes, so that cuts lie where blocks and tiles end."""

from __future__ import annotations

from operator import index

from .errors import UnsupportedError

ROWS = 64  # of W in a tile of a GPU: shares of other sizes would be padded there


def share(size: int, step: int, rank: int, world: int, who: str = "an axis") -> slice:
    """The part of an axis that a rank has: whole steps, as even as they divide; the last may be cut short by the end.

    UnsupportedError, which names the worlds that would do, if there are fewer steps than ranks; `who` names the axis.

    >>> [share(100, 32, rank, 3) for rank in range(3)]
    [slice(0, 32, None), slice(32, 64, None), slice(64, 100, None)]
    """
    rank, world, step = index(rank), index(world), index(step)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}: ranks are 0 to world - 1")
    if step < 1:
        raise ValueError(f"a step is at least 1, got {step}")
    steps = -(-size // step)
    if steps < world:
        most = f"at most {steps} shares" if steps > 1 else "no shares"
        raise UnsupportedError(f"{who} of {size} cut in multiples of {step} gives {most}, not {world}")
    return slice(*(min(size, steps * end // world * step) for end in (rank, rank + 1)))
