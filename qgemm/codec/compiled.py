"""Where a backend puts compiled code in the place of a function of NumPy: the same results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_instead: dict[Callable[..., Any], Callable[..., Any]] = {}


def compilable(reference: Callable[P, R]) -> Callable[P, R]:
    """The function `reference` of NumPy, or what `use` has named instead of it, unless that returns None.

    The reference itself is the attribute __wrapped__.
    """

    @wraps(reference)
    def found(*args: P.args, **kwargs: P.kwargs) -> R:
        by = _instead.get(found)
        made: R | None = None if by is None else by(*args, **kwargs)
        return reference(*args, **kwargs) if made is None else made

    return found


def use(function: Callable[P, R], instead: Callable[P, R | None]) -> None:
    """Call `instead` for a function that is `compilable` from now on, and the reference where it returns None."""
    _instead[function] = instead
