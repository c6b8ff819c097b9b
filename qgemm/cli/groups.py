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

NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")  # between dots, as a count is written
MOST = 3  # numbers of a name that are looked at: layer, expert, part

Numbers: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Numbers, ...]  # a set of numbers for each place: it stands for every choice of one from each


class Entry(NamedTuple):
    """One tensor of any kind of file; tensor: of a .gguf file, whose tensors products take as they are."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: Tensor | None = None


class Group(NamedTuple):
    """Tensors that differ in numbers of their names alone: the first one, how many, and the name of all, printable."""

    first: Entry
    tensors: int
    name: str


def grouped(entries: Iterable[Entry]) -> list[Group]:
    """Groups in the order of their first tensors."""
    alike: dict[object, dict[Numbers, tuple[int, Entry]]] = defaultdict(dict)
    for place, entry in enumerate(entries):
        words, numbers = _cut(entry.name)
        alike[words, entry.type, entry.shape][numbers] = place, entry
    found = []
    for (words, *_), members in alike.items():  # type: ignore[misc]
        for box in boxes(sorted(members)):
            place, first = members[tuple(numbers[0] for numbers in box)]
            found.append((place, Group(first, prod(map(len, box)), _name(words, box))))
    return [group for _, group in sorted(found, key=lambda each: each[0])]


def single(entries: Iterable[Entry]) -> list[Group]:
    """Each tensor for itself."""
    return [Group(entry, 1, printable(entry.name)) for entry in entries]


def boxes(members: Sequence[Numbers]) -> list[Box]:
    """Sorted tuples of equal length as few boxes that hold these and no other.

    >>> boxes([(0, 7), (0, 8), (1, 7), (1, 8), (2, 7)])
    [((0, 1), (7, 8)), ((2,), (7,))]
    """
    if not members[0]:
        return [()]
    alike: dict[tuple[Box, ...], list[int]] = {}
    for first, some in groupby(members, key=lambda numbers: numbers[0]):
        alike.setdefault(tuple(boxes([numbers[1:] for numbers in some])), []).append(first)
    return [(tuple(firsts), *box) for rest, firsts in alike.items() for box in rest]


def spans(numbers: Numbers) -> str:
    """Rising numbers in short.

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
    """The words of a name and the numbers between them."""
    words, numbers, end = [], [], 0
    for found in list(NUMBER.finditer(name))[:MOST]:
        words.append(name[end : found.start()])
        numbers.append(int(found[0]))
        end = found.end()
    return (*words, name[end:]), tuple(numbers)


def _name(words: Sequence[str], box: Box) -> str:
    numbers = [*map(spans, box), ""]
    return "".join(printable(word) + text for word, text in zip(words, numbers, strict=True))
