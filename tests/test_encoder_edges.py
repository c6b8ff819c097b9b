"""Encoders where little or nothing weighs, of signed zeros, of scales at an end: ggml's bytes, by NumPy and in C.

ggml_edges.npz: x [24, 512], three importance matrices most of which is zero, whole groups too, and of TYPE.plain and
TYPE.imatrixI the first 8 bytes of the SHA-256 of each row that ggml 0.25.3's C code made.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DATA, digests

import qgemm
from qgemm.codec.search import searched
from qgemm.cpu.native import library

EDGES = np.load(DATA / "ggml_edges.npz")
X = EDGES["x"].astype(np.float32)
CASES = [case for case in EDGES if "." in case]
compiled = pytest.param(
    True, marks=[pytest.mark.compiles, pytest.mark.skipif(bool(library.reason()), reason=library.reason())]
)


@pytest.mark.parametrize("by_compiled_code", [False, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_of_ggml(case, by_compiled_code, monkeypatch):
    if by_compiled_code:
        monkeypatch.delenv("QGEMM_CPU")
    name, _, way = case.partition(".")
    importance = None if way == "plain" else EDGES["imatrix"][int(way[-1])]
    encoded = digests(qgemm.quantize(X, name, imatrix=importance).blocks)
    assert [row for row, (digest, other) in enumerate(zip(encoded, EDGES[case], strict=True)) if digest != other] == []


@pytest.mark.parametrize("by_compiled_code", [False, compiled], ids=["numpy", "compiled"])
@pytest.mark.parametrize(("name", "byte"), [("tq1_0", 128), ("tq2_0", 0b01010101), ("q2_0", 0)])
def test_quotients_that_are_not_finite(name, byte, by_compiled_code, monkeypatch):
    """1 / d is infinite: TQ's lroundf makes code 1 of that, Q2_0's roundf and clamping code 0 (ggml 0.25.3, x86-64)."""
    if by_compiled_code:
        monkeypatch.delenv("QGEMM_CPU")
    x = np.full((1, 256), -1e-40, np.float32)
    x[0, ::3] = 0
    blocks = qgemm.quantize(x, name).blocks
    assert set(blocks["qs"].ravel()) == {byte}
    assert not blocks["d"].any()


def test_every_type_that_ggml_encodes_is_held_against_it():
    """Except q8_1, which ggml encodes for activations only, and stq1_0, which is in a fork of llama.cpp alone."""
    expected = set()
    for name, fmt in qgemm.FORMATS.items():
        if fmt.ggml_type is not None and not fmt.plain and name not in ("q8_1", "stq1_0"):
            expected |= {f"{name}.plain"} if not fmt.encoding.needs_importance else set()
            expected |= {f"{name}.imatrix{i}" for i in range(3)} if searched(fmt) else set()
    assert set(CASES) == expected
