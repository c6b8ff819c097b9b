"""Once: values that are made at first use, each by one thread, different ones by several at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .locks import new_lock

Value = TypeVar("Value")


class Once(Generic[Value]):
    """A cache of values that take long to make, for the life of a process: a module has one, nothing makes many.

    A thread that wants a value that is being made waits for that one alone. What cannot be made raises in each thread
    that asks for it, and is tried again by the next. A forked child has the finished values, and makes the others.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Value] = {}
        self._guard = new_lock()
        self._locks: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made by the first who asks."""
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
