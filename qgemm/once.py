"""Once: values that are made at first use, each by one thread, different ones by several at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Once(Generic[Value]):
    """A cache of values that take long to make, for the life of a process: a module has one, nothing makes many.

    A thread that wants a value that is being made waits for that one alone. What cannot be made raises in each thread
    that asks for it, and is tried again by the next. A forked child has the values, and no lock of a thread that it
    does not have.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Value] = {}
        self._unlock()
        os.register_at_fork(after_in_child=self._unlock)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made by the first who asks."""
        try:
            return self.values[key]
        except KeyError:
            pass
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self.values:
                self.values[key] = make()
            return self.values[key]

    def _unlock(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
