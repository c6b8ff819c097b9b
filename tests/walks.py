"""Walks: the files of qgemm/ that something is handed through in a call, as a reader opens them; traced, not declared.

A file is on the walk of x once a function in it is called with x itself (the array, a view of it, its address), or with
what tells of it (its Problem, the plan and the launch made for it). docs/architecture.md has the rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import qgemm

ROOT = Path(qgemm.__file__).parent
MOST, MOST_ON_THE_CPU = 8, 6  # files of a walk
ITSELF, ABOUT = "itself", "about"
DEPTH = 2  # tuples in tuples that are looked into
VARIABLE = 0x04, 0x08  # CO_VARARGS, CO_VARKEYWORDS


class Hand(NamedTuple):
    """One call from a file into another; an argument is the value that is followed ITSELF, or a record ABOUT it."""

    caller: str
    file: str
    kind: str


def traced(call: Callable[[], Any], kind: Callable[[Any], str | None]) -> list[Hand]:
    """The hands of a call, in order. kind: a value -> ITSELF or ABOUT, None for one that is not followed."""
    hands: list[Hand] = []

    def among(value: Any, depth: int = DEPTH) -> set[str]:
        own = kind(value)
        if own is None and depth and isinstance(value, (tuple, list)):
            return {item_kind for item in value for item_kind in among(item, depth - 1)}
        return set() if own is None else {own}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = file_of(frame)
        if event != "call" or file is None:
            return
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in VARIABLE)
        kinds = {item_kind for name in code.co_varnames[:count] for item_kind in among(frame.f_locals.get(name))}
        caller = caller_of(frame)
        if kinds and file != caller:
            hands.append(Hand(caller, file, ITSELF if ITSELF in kinds else ABOUT))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return hands


def file_of(frame: FrameType) -> str | None:
    """The file of a frame below qgemm/, None for any other."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def caller_of(frame: FrameType) -> str:
    """The file of qgemm/ that a frame was called from, "" for the caller of qgemm."""
    back = frame.f_back
    while back is not None:
        file = file_of(back)
        if file is not None:
            return file
        back = back.f_back
    return ""


def files(hands: Sequence[Hand]) -> list[str]:
    """The files of a walk in the order of their first call."""
    return list(dict.fromkeys(hand.file for hand in hands))


def climbs(hands: Sequence[Hand]) -> list[str]:
    """Where a walk climbs back: a call into a file that was opened before its caller, a second way of x itself."""
    order = {file: number for number, file in enumerate(files(hands))}
    up = [f"{a} -> {b} goes up" for a, b, _ in hands if a in order and order[b] < order[a]]
    own = list(dict.fromkeys(hand[:2] for hand in hands if hand.kind == ITSELF and hand.caller))
    return up + [f"{a} -> {b} does not follow on {before}" for (_, before), (a, b) in pairwise(own) if a != before]
