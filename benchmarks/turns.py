"""Processes that take turns: what each calls is timed in short bursts, the least time counts.

The machine may be shared with other work. A burst runs at realtime priority where that is permitted, so that nothing
else gets the cores in it, and no threads of one process spin while another is timed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

BURST = 0.04  # seconds
MOST_CALLS = 100  # of a burst
REST = 0.01  # seconds between bursts: threads without work have gone to sleep


class Calls(NamedTuple):
    """What a competitor has prepared: calls by name, each over several copies of its weights in turn."""

    calls: Mapping[str, Sequence[Callable[[], Any]]]
    result: Callable[[str], Any]  # of the last call by a name
    close: Callable[[], None]


class Worker:
    """A process that serves one competitor: `make(*arguments)` gives a function from a case to Calls."""

    def __init__(self, make: Callable[..., Callable[[Any], Calls]], arguments: tuple[Any, ...], environment: Any = ()):
        self.connection, theirs = multiprocessing.Pipe()
        with _environment(dict(environment)):
            context = multiprocessing.get_context("spawn")
            self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
            self.process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        """The answer to a message: ("prepare", case), ("burst", name), ("result", name)."""
        self.connection.send(message)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()


def least(workers: Mapping[str, Worker], case: Any, rounds: int) -> dict[tuple[str, str], float]:
    """Seconds of each name of each worker for a case: the least of all bursts."""
    names = {worker: workers[worker].ask("prepare", case) for worker in workers}
    found: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for worker, calls in names.items():
            for name in calls:
                seconds = workers[worker].ask("burst", name)
                found[worker, name] = min(seconds, found.get((worker, name), seconds))
                time.sleep(REST)
    return found


@contextmanager
def realtime() -> Iterator[None]:
    """All threads of this process before all others of the machine; nothing where that is not permitted."""
    _schedule(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def burst(calls: Sequence[Callable[[], Any]]) -> float:
    """The least seconds of one of the calls, which take turns."""
    found: list[float] = []
    with realtime():
        end = time.perf_counter() + BURST
        while len(found) < MOST_CALLS and (not found or time.perf_counter() < end):
            call = calls[len(found) % len(calls)]
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return min(found)


def _serve(connection: Connection, make: Callable[..., Callable[[Any], Calls]], arguments: tuple[Any, ...]) -> None:
    """What a worker does until its owner is gone."""
    gc.disable()
    prepare, current = None, Calls({}, lambda name: None, lambda: None)
    with suppress(EOFError):
        while True:
            kind, argument = connection.recv()
            try:
                if kind == "prepare":
                    current.close()
                    prepare = prepare or make(*arguments)
                    current = prepare(argument)
                    for call in chain.from_iterable(current.calls.values()):
                        call()  # starts threads, compiles
                    answer: Any = list(current.calls)
                elif kind == "burst":
                    answer = burst(current.calls[argument])
                else:
                    answer = current.result(argument)
            except Exception as error:
                answer = error
            connection.send(answer)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes which are started in the meantime find."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
