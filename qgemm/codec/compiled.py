"""The table of functions of the codec that compiled code can do as well, with the same results, bit for bit.

A function of NumPy that is `compilable` asks the table at each call. An entry takes the same arguments; it returns None
where compiled code does not serve them, and then the function of NumPy, the reference, computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MODULE = "qgemm.cpu.native.encoders"  # has the table, COMPILED; it imports the codec, and is imported at the first call


@cache
def table() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """A compilable function -> the function that calls compiled code for it."""
    entries: Mapping[Callable[..., Any], Callable[..., Any]] = import_module(MODULE).COMPILED
    return entries


def compilable(reference: Callable[P, R]) -> Callable[P, R]:
    """A function of NumPy, or its entry in the table where that serves; the attribute __wrapped__ is the reference."""

    @wraps(reference)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        compiled = table().get(function)
        result: R | None = None if compiled is None else compiled(*args, **kwargs)
        return reference(*args, **kwargs) if result is None else result

    return function
