"""Processes that alternate: their calls are timed in short bursts, and the least time counts.

The machine may be shared with other work. A burst runs at realtime priority if that is permitted, so that nothing else
uses the cores meanwhile, and threads of one process do not spin while another is timed.
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
MAX_CALLS = 100  # calls in a burst
REST = 0.01  # seconds between bursts, in which idle threads go to sleep


class Calls(NamedTuple):
    """The prepared calls of a library by name, each as a list over several copies of its weights."""

    calls: Mapping[str, Sequence[Callable[[], Any]]]
    result: Callable[[str], Any]  # the result of the last call of a name
    close: Callable[[], None]


class Worker:
    """A process for one library: `make(*arguments)` returns a function from a case to Calls."""

    def __init__(self, make: Callable[..., Callable[[Any], Calls]], arguments: tuple[Any, ...], environment: Any = ()):
        self.connection, theirs = multiprocessing.Pipe()
        with _environment(dict(environment)):
            context = multiprocessing.get_context("spawn")
            self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
            self.process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        """Send a message, ("prepare", case), ("burst", name) or ("result", name), and return the answer."""
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
    """The least seconds of all bursts of a case, by worker and name."""
    names = {worker: workers[worker].ask("prepare", case) for worker in workers}
    shortest: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for worker, calls in names.items():
            for name in calls:
                seconds = workers[worker].ask("burst", name)
                shortest[worker, name] = min(seconds, shortest.get((worker, name), seconds))
                time.sleep(REST)
    return shortest


@contextmanager
def realtime() -> Iterator[None]:
    """Run all threads of this process at realtime priority; does nothing if that is not permitted."""
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
    """The least seconds of a call; the calls alternate."""
    seconds: list[float] = []
    with realtime():
        end = time.perf_counter() + BURST
        while len(seconds) < MAX_CALLS and (not seconds or time.perf_counter() < end):
            call = calls[len(seconds) % len(calls)]
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _serve(connection: Connection, make: Callable[..., Callable[[Any], Calls]], arguments: tuple[Any, ...]) -> None:
    """The loop of a worker process, which ends with its owner."""
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
    """Set environment variables for processes that start within."""
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
