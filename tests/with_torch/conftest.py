"""Fixtures of the tests of qgemm.torch."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of qgemm's products by their names."""
    from qgemm.torch import joint, ops

    counts = Counter()

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*args, **named):
            counts[name] += 1
            return original(*args, **named)

        monkeypatch.setattr(owner, name, call)

    counted(ops, "matmul")
    counted(joint.products, "matmul_many")
    counted(joint.products, "gated")
    return counts


@pytest.fixture
def methods(monkeypatch):
    """The methods of the plugin of vLLM, beside a stand-in for vLLM."""
    import vllm_like

    vllm_like.install(monkeypatch)
    return importlib.import_module("qgemm.vllm.methods")


@pytest.fixture
def recorded(monkeypatch):
    """(owner, name of a function) -> a list that gets the arguments of its calls."""

    def record(owner, name):
        calls, compute = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **terms: calls.append(args) or compute(*args, **terms))
        return calls

    return record
