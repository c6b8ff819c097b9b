"""Values that are made at first use: once, with any number of threads, after errors and forks."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import helpers
import pytest

from qgemm.once import Once


def test_a_forked_child_does_not_wait_for_threads_of_its_parent():
    """A child has the finished values, and makes those that another thread was making at the fork."""
    once, begun, go_on = Once(), threading.Event(), threading.Event()
    once.get("there", lambda: 1)

    def slow():
        begun.set()
        assert go_on.wait(60)
        return 2

    def work():
        signal.alarm(30)  # ends the process if a thread waits without end
        assert (once.get("there", lambda: 0), once.get("slow", lambda: 3)) == (1, 3)
        Path(result).write_text("made")

    thread = threading.Thread(target=once.get, args=("slow", slow))
    thread.start()
    assert begun.wait(60)
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result"
        os.waitpid(helpers.forked(work), 0)
        assert Path(result).read_text() == "made"
    go_on.set()
    thread.join()
    assert once.get("slow", lambda: 0) == 2


def test_who_came_while_a_value_was_made_gets_that():
    """Though it was not there when they looked."""
    looked, second = [], threading.Event()

    class Values(dict):
        def __missing__(self, key):
            looked.append(key)
            if len(looked) == 2:
                second.set()
            raise KeyError(key)

    def make():
        assert second.wait(60)
        return object()

    once, got = Once(), []
    once.values = Values()
    threads = [threading.Thread(target=lambda: got.append(once.get("key", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] is got[1]


def test_what_cannot_be_made_is_tried_again():
    once = Once()
    with pytest.raises(ZeroDivisionError):
        once.get("key", lambda: 1 // 0)
    assert once.get("key", lambda: 1) == once.get("key", lambda: 1 // 0) == 1
