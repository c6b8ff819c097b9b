"""DeviceTensor.rows: rows by their index."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from helpers import cupy, random_tensor
from strategies import FORMATS, over_formats

import qgemm
from qgemm.codec.format import float_dtype

WRONG = """
import cupy, numpy, qgemm
w = qgemm.quantize(numpy.ones((70, 64), numpy.float32), "q4_0").to_device()
w.rows(cupy.asarray([{index}]))
cupy.cuda.Device().synchronize()
"""


@over_formats([fmt for fmt in FORMATS if fmt.plain or fmt.tiled])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_those_of_the_matrix(fmt, dtype):
    rng = np.random.default_rng(0)
    w = random_tensor(fmt, 1000, 9 * max(256, fmt.weights), rng)
    dense = w.to_device().dequantize(dtype)
    for shape in ((1,), (300,), (5, 7), (0,)):
        index = cupy().asarray(rng.integers(0, len(w), shape))
        rows = w.to_device().rows(index, dtype)
        assert (rows.shape, rows.dtype) == ((*shape, w.shape[1]), float_dtype(dtype))
        assert rows.tobytes() == dense[index].tobytes()


@pytest.mark.parametrize("index", [70, -1, 1 << 40])
def test_an_index_that_is_no_row_stops_the_device(index):
    """The call runs in its own process, because the process loses its device."""
    process = subprocess.run([sys.executable, "-c", WRONG.format(index=index)], capture_output=True, text=True)
    assert process.returncode
    assert "CUDA" in process.stderr
    assert "synchronize" in process.stderr


def test_in_a_graph():
    w = random_tensor(qgemm.FORMATS["q6_k"], 100, 512, np.random.default_rng(1)).to_device()
    index = cupy().arange(3)
    want = w.rows(index)
    stream = cupy().cuda.Stream(non_blocking=True)
    with stream:
        w.rows(index)
        stream.begin_capture()
        rows = w.rows(index)
        graph = stream.end_capture()
        rows.fill(0)
        graph.launch()
        stream.synchronize()
    assert rows.tobytes() == want.tobytes()
