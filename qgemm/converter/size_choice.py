"""Choose a type for each tensor so that all fit in a number of bytes and lose least.

Each tensor gets one of its alternatives (bytes, cost), and costs add up. The lower convex hull of a
tensor's alternatives is a chain of upgrades whose gain per byte falls. Taking all upgrades above a least gain per byte
is optimal for the bytes that it uses (the Lagrangian argument); upgrades that still fit fill the rest. `bound` is the
cost of the relaxed problem, which may take a part of an upgrade, so that no choice within the bytes costs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from qgemm.errors import QgemmError


class Alternative(NamedTuple):
    """One type for a tensor: the bytes of the result, and the cost of its errors."""

    nbytes: int
    cost: float


class Choice(NamedTuple):
    """The index of the chosen alternative of each tensor, their bytes and cost, and the least cost that is possible."""

    indices: list[int]
    nbytes: int
    cost: float
    bound: float


class _Upgrade(NamedTuple):
    """A step along the hull of a tensor: the cost that it saves for each byte, and where it leads."""

    gain: float
    tensor: int
    alternative: int


def choose(tensors: Sequence[Sequence[Alternative]], nbytes: int) -> Choice:
    """The choice of least cost within `nbytes`; QgemmError if even the smallest alternatives need more.

    The largest tensor, often an embedding with half of the bytes, gets each of its alternatives in turn: an upgrade of
    it that does not fit would otherwise leave its bytes to upgrades of little gain.
    """
    smallest = [alternatives[hull(alternatives)[0]].nbytes for alternatives in tensors]
    if sum(smallest) > nbytes:
        raise QgemmError(f"even the smallest types need {sum(smallest)} bytes, {nbytes} are left for tensors")
    choice = _greedy(tensors, nbytes)
    largest = max(range(len(tensors)), key=lambda number: max(tensors[number]).nbytes)
    for index, alternative in enumerate(tensors[largest]):
        if sum(smallest) - smallest[largest] + alternative.nbytes <= nbytes:
            fixed = _greedy([*tensors[:largest], [alternative], *tensors[largest + 1 :]], nbytes)
            if fixed.cost < choice.cost:
                indices = [*fixed.indices[:largest], index, *fixed.indices[largest + 1 :]]
                choice = Choice(indices, fixed.nbytes, fixed.cost, choice.bound)
    return choice


def _greedy(tensors: Sequence[Sequence[Alternative]], nbytes: int) -> Choice:
    """Take upgrades in the order of their gain while they fit, from the smallest alternatives, which do fit."""
    hulls = [hull(alternatives) for alternatives in tensors]
    indices = [chain[0] for chain in hulls]
    used = sum(tensors[number][index].nbytes for number, index in enumerate(indices))
    upgrades = [
        _Upgrade(_gain(tensors[number][old], tensors[number][new]), number, new)
        for number, chain in enumerate(hulls)
        for old, new in pairwise(chain)
    ]
    cost = sum(tensors[number][index].cost for number, index in enumerate(indices))
    bound = None
    for upgrade in sorted(upgrades, key=lambda upgrade: -upgrade.gain):
        old, new = tensors[upgrade.tensor][indices[upgrade.tensor]], tensors[upgrade.tensor][upgrade.alternative]
        if used + new.nbytes - old.nbytes > nbytes:
            if bound is None:
                bound = cost - upgrade.gain * (nbytes - used)
            continue
        indices[upgrade.tensor] = upgrade.alternative
        used, cost = used + new.nbytes - old.nbytes, cost + new.cost - old.cost
    bound = cost if bound is None else bound
    used, cost = _fill(tensors, indices, used, cost, nbytes)
    return Choice(indices, used, cost, min(bound, cost))


def hull(alternatives: Sequence[Alternative]) -> list[int]:
    """The indices of the lower convex hull: bytes grow, costs fall, and so does the gain per byte.

    >>> hull([Alternative(1, 8.0), Alternative(2, 5.0), Alternative(3, 4.5), Alternative(4, 1.0), Alternative(5, 1.0)])
    [0, 3]
    """
    chain: list[int] = []
    numbers = range(len(alternatives))
    possible = [index for index in numbers if isfinite(alternatives[index].cost)] or list(numbers)
    for index in sorted(possible, key=lambda index: alternatives[index]):
        point = alternatives[index]
        if chain and point.cost >= alternatives[chain[-1]].cost:
            continue
        while len(chain) > 1 and _gain(alternatives[chain[-2]], alternatives[chain[-1]]) <= _gain(
            alternatives[chain[-1]], point
        ):
            chain.pop()
        chain.append(index)
    return chain


def _gain(old: Alternative, new: Alternative) -> float:
    """The cost saved for each byte that is added."""
    return (old.cost - new.cost) / (new.nbytes - old.nbytes) if new.nbytes > old.nbytes else float("inf")


def _fill(
    tensors: Sequence[Sequence[Alternative]], indices: list[int], used: int, cost: float, nbytes: int
) -> tuple[int, float]:
    """Spend the bytes that are left on one tensor after the other, largest saving first, also off the hull."""
    while True:
        savings = [
            (tensors[number][old].cost - new.cost, number, index)
            for number, old in enumerate(indices)
            for index, new in enumerate(tensors[number])
            if new.cost < tensors[number][old].cost and used + new.nbytes - tensors[number][old].nbytes <= nbytes
        ]
        if not savings:
            return used, cost
        saving, number, index = max(savings)
        used += tensors[number][index].nbytes - tensors[number][indices[number]].nbytes
        cost -= saving
        indices[number] = index
