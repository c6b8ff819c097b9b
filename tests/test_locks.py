"""Locks after a fork: a child finds them free, whichever thread of its parent held them."""

from __future__ import annotations

import functools
import os
import signal
import threading

import numpy as np
import pytest
from helpers import forked

import qgemm
from qgemm import locks
from qgemm.files.gguf.shard import Shard
from qgemm.locks import cached_property, new_lock

PATIENCE = 60  # seconds that a busy machine may need


def status_of(work) -> int:
    """The exit status of a child that does `work`; a signal's number if it hangs or dies of one."""

    def limited():
        signal.alarm(30)
        work()

    return os.waitpid(forked(limited), 0)[1]


def test_a_child_finds_a_lock_free():
    """It locks again there, and the parent's stays held."""
    lock = new_lock()

    def work():
        with lock:
            assert not lock.acquire(blocking=False)
        os.write(write, b"free")

    read, write = os.pipe()
    with lock:
        assert status_of(work) == 0
        assert lock.locked()
    assert os.read(read, 4) == b"free"


def test_a_lock_that_is_gone_is_forgotten():
    lock = new_lock()
    assert lock in locks._locks
    count = len(locks._locks)
    del lock
    assert len(locks._locks) == count - 1


def test_a_child_computes_a_cached_property(tmp_path):
    """Though a thread of the parent was computing that of another object: Python 3.10 and 3.11 lock all of them."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, wait: bool) -> None:
            self.wait = wait

        @cached_property
        def value(self) -> int:
            """Documented."""
            if self.wait:
                begun.set()
                assert go_on.wait(PATIENCE)
            return 1

    slow, quick = Slow(True), Slow(False)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert begun.wait(PATIENCE)
    assert status_of(lambda: (tmp_path / "value").write_text(str(quick.value))) == 0
    assert (tmp_path / "value").read_text() == "1"
    go_on.set()
    thread.join()
    assert slow.value == 1
    assert vars(slow)["value"] == 1
    assert Slow.value.__doc__ == "Documented."
    assert isinstance(Slow.value, functools.cached_property)


@pytest.mark.parametrize("copy", [False, True])
def test_a_child_reads_a_file_while_the_parent_reads_it(tmp_path, monkeypatch, copy):
    """The lock of copied blocks is one of the library's."""
    w = qgemm.quantize(np.ones((2, 32), np.float32), "q8_0")
    qgemm.write(tmp_path / "model.gguf", {"w": w})
    begun, go_on, read, parent = threading.Event(), threading.Event(), Shard.read, os.getpid()

    def slow(self, *args):
        if os.getpid() == parent:
            begun.set()
            assert go_on.wait(PATIENCE)
        return read(self, *args)

    monkeypatch.setattr(Shard, "read", slow)
    with qgemm.open(tmp_path / "model.gguf", copy=copy) as file:
        thread = threading.Thread(target=lambda: file["w"].blocks if copy else file["w"].read(0, 1))
        thread.start()
        assert begun.wait(PATIENCE)
        assert status_of(lambda: (tmp_path / "blocks").write_bytes(file["w"].blocks.tobytes())) == 0
        assert (tmp_path / "blocks").read_bytes() == w.blocks.tobytes()
        go_on.set()
        thread.join()
