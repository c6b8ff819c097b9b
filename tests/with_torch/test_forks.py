"""Forks of a process of which a thread is inside qgemm.torch."""

from __future__ import annotations

import os
import signal
import threading

from helpers import forked
from torch_layers import assert_same, normal, torch, weights

from qgemm.torch import QLinear, storage

X = normal(3, 128)


def test_a_child_derives_a_weight_while_its_parent_does(tmp_path, monkeypatch):
    """The child's layer, and another one, multiply; so does the parent's."""
    begun, go_on, check, parent = threading.Event(), threading.Event(), storage.check_bytes, os.getpid()
    layer, other = QLinear.from_tensor(weights()), QLinear.from_tensor(weights(seed=1))

    def slow(*args):
        if os.getpid() == parent:
            begun.set()
            assert go_on.wait(60)
        check(*args)

    def work():
        signal.alarm(30)  # ends a child that hangs
        torch.save([layer(X), other(X)], tmp_path / "y.pt")

    monkeypatch.setattr(storage, "check_bytes", slow)
    thread = threading.Thread(target=lambda: layer.packed)
    thread.start()
    assert begun.wait(60)
    assert os.waitpid(forked(work), 0)[1] == 0
    go_on.set()
    thread.join()
    for y, own in zip(torch.load(tmp_path / "y.pt"), (layer, other), strict=True):
        assert_same(y, own(X))
