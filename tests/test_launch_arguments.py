"""Arguments of a launch against the signature of its kernel: their order, types and values, without a GPU."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import pytest

import qgemm
from qgemm.cuda.jit import sources
from qgemm.cuda.kernels import gemv, prefill_sm80
from qgemm.cuda.problem import Q8_1, Problem

SCALARS = {"qgemm::i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
PRODUCTS = [
    (gemv, gemv.GEMV_SIMT, "float", 75),
    (gemv, gemv.GEMV_DP4A, Q8_1, 75),
    (prefill_sm80, prefill_sm80.PREFILL_SM80, "half", 80),
    (prefill_sm80, prefill_sm80.PREFILL_SM80_A8, Q8_1, 80),
]


def parameters(kernel):
    """(name, ctypes type) of each parameter in the order of kernels/NAME.cu."""
    text = (sources.kernels_dir() / f"{kernel}.cu").read_text()
    (listed,) = re.findall(rf'extern "C" __global__[^{{]*?\b{kernel}\(([^)]*)\)', text)
    declared = (re.sub(r"\bconst\b|__restrict__", "", part).split() for part in listed.split(","))
    return [(names[-1], SCALARS.get(names[0], ctypes.c_void_p)) for names in declared]


class Recorded:
    """Stands for Launch: keeps the arguments, and writes a call's pointers into place as Launch does."""

    def __init__(self, function, grid, block, shared, arguments, pointers, count, **_):
        self.arguments, self.pointers, self.count = arguments, pointers, count

    def __call__(self, stream, *pointers):
        assert len(pointers) == self.count
        self.pointers[:] = pointers


@pytest.mark.parametrize(("module", "kernel", "x", "sm"), PRODUCTS, ids=[kernel.name for _, kernel, *_ in PRODUCTS])
def test_arguments_are_those_of_the_signature(module, kernel, x, sm, monkeypatch):
    """Sizes and addresses are all different, so that no two can be exchanged."""
    launches = []
    monkeypatch.setattr(module, "load", lambda *_, **__: None)
    monkeypatch.setattr(
        module, "Launch", lambda *args, **named: launches.append(Recorded(*args, **named)) or launches[0]
    )
    workspace = tuple(SimpleNamespace(data=SimpleNamespace(ptr=address)) for address in (400, 500))
    monkeypatch.setattr(module, "workspace", lambda *_: workspace, raising=False)
    activation = "a8" if x == Q8_1 else "a16"
    p = Problem(qgemm.FORMATS["q4_0"], activation, 5, 70, 320, sm, x, exponent=3)
    config = kernel.ranked(p)[0][0]
    if module is prefill_sm80:
        config = config._replace(split_k=2)
    kernel.launch(p, config)(0, 100, 200, 300, 0, 0)
    level = qgemm.cuda.layout.tile.level_exponent(p.format)
    known = {
        "x": 100,
        "tiles": 200,
        "y": 300,
        "partials": 400,
        "counters": 500,
        "n": 70,
        "k": 320,
        "m": 5,
        "split_k": 2,
    }
    known |= {"factor": 2.0 ** (level - p.exponent), "unit": 2.0**p.exponent}
    expected = [(name, kind, known[name]) for name, kind in parameters(kernel.name)]
    found = [(type(argument), argument.value) for argument in launches[0].arguments]
    assert found == [(kind, value) for _, kind, value in expected]
