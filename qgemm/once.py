"""Once: values computed at first use, each by one thread, different ones by several threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .locks import new_lock

Value = TypeVar("Value")


class Once(Generic[Value]):
    """A cache of values that need long to compute, for the life of a process; an attribute of a module.

    A thread waits only for the value that it asks for. An error is raised in each thread that asks for the value, and
    the next thread computes it again. A forked child has the finished values, and computes the others.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Value] = {}
        self._guard = new_lock()
        self._locks: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, computed by `make` in the first thread that asks for it."""
        try:
            return self.values[key]
        except KeyError:
            pass
        with self._guard:
            lock = self._locks.get(key) or self._locks.setdefault(key, new_lock())
        with lock:
            if key not in self.values:
                self.values[key] = make()
            return self.values[key]
