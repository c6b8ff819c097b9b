"""Tensors of many layers as one row: blk.{0-31}.ffn_down.weight stands for 32 of one type and shape."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeAlias

from qgemm.tensor import Tensor
from qgemm.text import printable

NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")  # between dots, without leading zeros
MAX_NUMBERS = 3  # numbers of a name that are compared: layer, expert, part

Numbers: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Numbers, ...]  # a set of numbers for each position; stands for all combinations


class Entry(NamedTuple):
    """One tensor of any kind of file. tensor: set for a .gguf file, whose tensors can be multiplied as they are."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: Tensor | None = None


class Group(NamedTuple):
    """Tensors whose names differ only in numbers: the first tensor, their count, and one printable name for all."""

    first: Entry
    tensors: int
    name: str


def grouped(entries: Iterable[Entry]) -> list[Group]:
    """Groups in the order of their first tensors."""
    alike: dict[object, dict[Numbers, tuple[int, Entry]]] = defaultdict(dict)
    for place, entry in enumerate(entries):
        words, numbers = _cut(entry.name)
        alike[words, entry.type, entry.shape][numbers] = place, entry
    placed_groups = []
    for (words, *_), members in alike.items():  # type: ignore[misc]
        for box in boxes(sorted(members)):
            place, first = members[tuple(numbers[0] for numbers in box)]
            placed_groups.append((place, Group(first, prod(map(len, box)), _name(words, box))))
    return [group for _, group in sorted(placed_groups, key=lambda placed: placed[0])]


def single(entries: Iterable[Entry]) -> list[Group]:
    """A group for each tensor."""
    return [Group(entry, 1, printable(entry.name)) for entry in entries]


def boxes(members: Sequence[Numbers]) -> list[Box]:
    """Sorted tuples of equal length as a few boxes that together hold exactly these tuples.

    >>> boxes([(0, 7), (0, 8), (1, 7), (1, 8), (2, 7)])
    [((0, 1), (7, 8)), ((2,), (7,))]
    """
    if not members[0]:
        return [()]
    alike: dict[tuple[Box, ...], list[int]] = {}
    for first, tuples in groupby(members, key=lambda numbers: numbers[0]):
        alike.setdefault(tuple(boxes([numbers[1:] for numbers in tuples])), []).append(first)
    return [(tuple(firsts), *box) for rest, firsts in alike.items() for box in rest]


def spans(numbers: Numbers) -> str:
    """Increasing numbers as ranges.

    >>> spans((5,)), spans((0, 1, 2, 4, 6, 7))
    ('5', '{0-2,4,6-7}')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _cut(name: str) -> tuple[tuple[str, ...], Numbers]:
    """The parts of a name around its numbers, and the numbers."""
    words, numbers, end = [], [], 0
    for match in list(NUMBER.finditer(name))[:MAX_NUMBERS]:
        words.append(name[end : match.start()])
        numbers.append(int(match[0]))
        end = match.end()
    return (*words, name[end:]), tuple(numbers)


def _name(words: Sequence[str], box: Box) -> str:
    numbers = [*map(spans, box), ""]
    return "".join(printable(word) + text for word, text in zip(words, numbers, strict=True))
