"""Locks that are free in a forked child, whichever thread of the parent held them at the fork.

That thread does not exist in the child, so nobody would release its lock there. Every lock of qgemm comes from here.
The data that a lock protects must be valid after each statement, since a fork may follow on any of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from qgemm.system.process import after_fork

Value = TypeVar("Value")

_locks: WeakSet[Any] = WeakSet()


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


class cached_property(functools.cached_property[Value]):
    """functools.cached_property; in Python 3.10 and 3.11 one holds a lock while any value of it is computed."""

    def __init__(self, func: Callable[[Any], Value]) -> None:
        super().__init__(func)
        if hasattr(self, "lock"):
            _locks.add(self.lock)


def _release_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as modules of the standard library reset theirs


after_fork(_release_all)
