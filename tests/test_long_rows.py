"""Rows of any length in bounded memory: searched in parts of a row, with an importance that is read in parts.

The searches must give the bytes that they give for whole rows. Peaks are those of Python's and NumPy's allocations.
"""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import converted, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import qgemm
from qgemm.codec.search import search, searched
from qgemm.converter import range_encoding
from qgemm.converter.rules import Step
from qgemm.converter.scale_search import block_search
from qgemm.converter.weight import weight_from_tensor
from qgemm.files.imatrix import importances_of_arrays, read_imatrix

SEARCHED = [name for name, fmt in qgemm.FORMATS.items() if searched(fmt)]


def weight_of(x: np.ndarray):
    return weight_from_tensor(qgemm.Tensor("f32", x.shape, x, "w"))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", SEARCHED)
@settings(max_examples=12)
@given(data=st.data())
def test_parts_of_rows_give_the_blocks_of_whole_ones(fmt, data):
    """Experts of some rows, cut between any blocks."""
    experts, n, blocks = (data.draw(st.integers(1, limit)) for limit in (3, 3, 9))
    fmt = qgemm.FORMATS[fmt]
    step = fmt.weights
    k = step * blocks
    x = normal(experts, n, k, seed=data.draw(st.integers(0, 99)))
    weighted = data.draw(st.booleans())
    importance = normal(experts, k, seed=5) ** 2
    encode = block_search(
        weight_of(x), fmt, importances_of_arrays({"w": importance}).importance("w") if weighted else None
    )
    rows = x.reshape(-1, k)
    want = search(fmt, rows, importance.repeat(n, axis=0) if weighted else np.ones(k, np.float32))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(want) - 1)))) if len(want) > 1 else []
    flat, ends = rows.reshape(-1), pairwise([0, *cuts, len(want)])
    parts = [encode(flat[step * start : step * stop], step * start) for start, stop in ends]
    assert np.concatenate(parts).tobytes() == want.tobytes()


def test_ranges_are_rows_where_these_are_short():
    step = Step(weight_of(np.zeros((6, 1024), np.float32)), qgemm.FORMATS["q4_0"])
    assert range_encoding.ranges(step, 3000, rows=True) == [(0, 2048), (2048, 4096), (4096, 6144)]
    assert range_encoding.ranges(step, 1000, rows=True) == [(a, min(a + 992, 6144)) for a in range(0, 6144, 992)]


def peak(work) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def legacy(path: Path, k: int, value: float = 1) -> Path:
    """An importance matrix of the old kind for one tensor w of one row, not in memory."""
    with path.open("wb") as file:
        file.write(struct.pack("<2i1s2i", 1, 1, b"w", 1, k))
        for _ in range(0, k, 1 << 16):
            np.full(1 << 16, value, np.float32).tofile(file)
    return path


def test_a_long_row_is_searched_in_bounded_memory(tmp_path):
    """Searching a whole row of 2^22 weights needs 84 MB; in ranges of 2^18 it needs 25."""
    k = 1 << 22
    x = np.resize(normal(1, 99991), (1, k))
    qgemm.write(tmp_path / "x.gguf", {"w": x})
    importance = read_imatrix(legacy(tmp_path / "i.dat", k, 0.5))
    del x

    def work():
        converted(tmp_path / "x.gguf", tmp_path / "y.gguf", "q4_0", importance=importance, threads=1)

    assert peak(work) < 48 << 20
    with qgemm.open(tmp_path / "x.gguf") as before, qgemm.open(tmp_path / "y.gguf") as after:
        x = before["w"].blocks
        start = k - 4096
        mean = np.cumsum(x * x, dtype=np.float32)[-1] / np.float32(k)
        want = search(qgemm.FORMATS["q4_0"], x[:, start:], np.full(4096, 0.5, np.float32), mean)
        assert after["w"].read(start // 32, k // 32).tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", ["legacy", "gguf"])
def test_an_importance_matrix_is_read_in_parts(kind, tmp_path):
    """Checked whole when it is opened, in much less memory than it has."""
    k = 1 << 23
    if kind == "legacy":
        path = legacy(tmp_path / "i.dat", k)
    else:
        path = tmp_path / "i.gguf"
        qgemm.write(path, {"w.in_sum2": np.ones(k, np.float32), "w.counts": np.ones(1, np.float32)})
    reads = []
    assert peak(lambda: reads.append(read_imatrix(path))) < 8 << 20
    [importances] = reads
    assert list(importances) == ["w"]
    assert "w" in importances
    assert "v" not in importances
    assert importances.importance("w").size == k
    assert (importances["w"] == 1).all()


def test_a_late_value_is_checked(tmp_path):
    k = 1 << 20
    path = legacy(tmp_path / "i.dat", k)
    raw = bytearray(path.read_bytes())
    raw[-4:] = struct.pack("<f", -1)
    path.write_bytes(raw)
    with pytest.raises(qgemm.QgemmError, match="'w': an importance is negative or not finite"):
        read_imatrix(path)
